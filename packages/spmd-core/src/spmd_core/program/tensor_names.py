"""Finds what tensors are to the user: parameters, buffers, gradients, and an optimizer's state.

No tensor keeps its name, so that none costs anything. An error that names tensors looks for them in
all modules and optimizers of the process.
"""

import gc
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from spmd_core.graph.storage import Storage

Kind = TypeVar("Kind")


def names() -> dict[Storage, str]:
    """The names of tensors on the device, such as `GPT.h.0.attn.weight`, by storage.

    A gradient is `the gradient of GPT.wte.weight`, and state is `exp_avg of GPT.wte.weight`.
    """
    found: dict[Storage, str] = {}
    of_parameter: dict[int, str] = {}
    for module in _roots():
        root = type(module).__name__
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            name = f"{root}.{path}"
            of_parameter.setdefault(id(tensor), name)
            _add(found, tensor, name)
            if tensor.is_leaf and tensor.grad is not None:
                _add(found, tensor.grad, f"the gradient of {name}")
    for optimizer in _all(torch.optim.Optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = of_parameter.get(id(parameter), "a parameter of no module")
                for key, value in optimizer.state.get(parameter, {}).items():
                    _add(found, value, f"{key} of {owner}")
    return found


def _add(found: dict[Storage, str], tensor: Any, name: str) -> None:
    handle = getattr(tensor, "_handle", None)
    if handle is not None:
        found.setdefault(handle.storage, name)


def _roots() -> list[nn.Module]:
    """The modules that are part of no other one."""
    modules = list(_all(nn.Module))
    inner = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inner]


def _all(kind: type[Kind]) -> Iterator[Kind]:
    # By its type: a proxy's `__class__` may import a module, or raise.
    return (x for x in _objects() if issubclass(type(x), kind))


def _objects() -> list[Any]:
    """What the garbage collector tracks, with what was exempted from it.

    Training loops exempt what lives as long as they do, and its list leaves that out.
    """
    is_exempt = gc.get_freeze_count() > 0
    if is_exempt:
        gc.unfreeze()
    objects = gc.get_objects()
    if is_exempt:
        gc.freeze()
    return objects
