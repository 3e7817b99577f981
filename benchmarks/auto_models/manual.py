"""Shardings by hand: the mesh of each strategy, and marks by rules over names.

A rule is a regular expression that must match a whole name, with a partition spec over the axes
data, fsdp and tensor. Axes that a mesh lacks drop out, so the same rules are data parallelism on a
mesh (data,), FSDP on (fsdp,), and Megatron's tensor parallelism beside FSDP on (fsdp, tensor).
"""

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

import spmd_core as spmd
from benchmarks.auto_models.model import Manual
from examples.gpt2.presets import BATCH_AXES
from examples.gpt2.shardings import Spec, on_mesh

# By strategy: the axes of its mesh, in order.
AXES: dict[str, tuple[str, ...]] = {
    "data": ("data",),
    "fsdp": ("fsdp",),
    "fsdp_tensor": ("fsdp", "tensor"),
    "fully_shard": ("fsdp",),
    "spatial": ("data", "height", "width"),
}
# Specs of the hidden state (batch, rows, width): FSDP gathers the weights rather than this.
HIDDEN: Spec = (BATCH_AXES, None, None)
Rules: TypeAlias = Mapping[str, Spec]


def mesh_of(strategy: str, num_devices: int, *, inner: int = 0) -> spmd.Mesh:
    """The mesh of a strategy.

    Args:
        strategy: a key of `AXES`.
        num_devices: how many devices it has.
        inner: the size of axis tensor, by default 2; or of height times width, by default 4. A
            strategy of one axis has none.

    Raises:
        ValueError: `inner` does not divide the number of devices.

    Example:
        >>> [*mesh_of("fsdp_tensor", 8).shape().values()], [*mesh_of("spatial", 8).shape().values()]
        ([4, 2], [2, 2, 2])
    """
    axes = AXES[strategy]
    if len(axes) == 1:
        return spmd.Mesh(range(num_devices), (num_devices,), axes)
    inner = inner or min(num_devices, 2 if len(axes) == 2 else 4)
    if num_devices % inner:
        raise ValueError(
            f"the inner axes must divide the number of devices; got {inner} for {num_devices}. "
            "Pass one of its divisors."
        )
    sizes: tuple[int, ...] = (num_devices // inner, inner)
    if len(axes) == 3:
        width = max(n for n in range(1, inner + 1) if inner % n == 0 and n * n <= inner)
        sizes = (num_devices // inner, inner // width, width)
    return spmd.Mesh(range(num_devices), sizes, axes)


def by_rules(parameters: Rules, outputs: Rules, inputs: Spec = (BATCH_AXES,)) -> dict[str, Manual]:
    """The three strategies of a model whose shardings are rules.

    Args:
        parameters: for each parameter and buffer that has dims, the first rule that matches.
        outputs: for modules, by name, whose first output is to be marked.
        inputs: of each example input; a spec that is too long is cut to the input's dims.
    """

    def shard(model: nn.Module, batch: tuple[Tensor, ...], mesh: spmd.Mesh) -> None:
        mark_inputs(batch, mesh, inputs)
        mark_parameters(model, mesh, parameters)
        mark_outputs(model, mesh, outputs)

    return dict.fromkeys(("data", "fsdp", "fsdp_tensor"), shard)


def mark_inputs(batch: tuple[Tensor, ...], mesh: spmd.Mesh, spec: Spec = (BATCH_AXES,)) -> None:
    """Marks example inputs, in place."""
    for t in batch:
        spmd.mark_sharding(t, mesh, on_mesh(spec, mesh)[: t.dim()])


def spec_of(name: str, rules: Rules) -> Spec:
    """The spec of the first rule that matches a whole name.

    Raises:
        LookupError: none does.
    """
    for pattern, spec in rules.items():
        if re.fullmatch(pattern, name):
            return spec
    raise LookupError(f"every parameter must match a rule; got {name!r}. Add one for it.")


def mark_parameters(model: nn.Module, mesh: spmd.Mesh, rules: Rules) -> None:
    """Marks all parameters and buffers by the first rule that matches; replicates other buffers.

    Raises:
        LookupError: no rule is for a parameter.
    """
    for name, t in model.named_parameters():
        spmd.mark_sharding(t, mesh, on_mesh(spec_of(name, rules), mesh))
    for buffer in model.buffers():
        spmd.mark_sharding(buffer, mesh, ())


def mark_outputs(model: nn.Module, mesh: spmd.Mesh, rules: Rules) -> None:
    """Has each forward mark the result of the modules that a rule matches."""

    def hook_of(spec: Spec) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            spmd.mark_sharding(output if isinstance(output, Tensor) else output[0], mesh, spec)

        return hook

    used = set()
    for name, module in model.named_modules():
        for pattern, spec in rules.items():
            if re.fullmatch(pattern, name):
                module.register_forward_hook(hook_of(on_mesh(spec, mesh)))
                used.add(pattern)
                break
    if unused := rules.keys() - used:
        raise LookupError(f"a rule must match a module; got {sorted(unused)}. Correct its pattern.")
