"""The names of modules in their models."""

from collections.abc import Iterable

from torch import nn

from spmd_core.program import tensor_names


def paths(modules: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """The name of each of these modules in the model that has it; "" for a model itself."""
    wanted = set(modules)
    found: dict[nn.Module, str] = {}
    for root in tensor_names.roots():
        for path, module in root.named_modules():
            if module in wanted:
                found.setdefault(module, path)
    return found
