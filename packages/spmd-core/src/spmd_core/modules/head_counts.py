"""Head counts that a program divided by hand for tensor parallelism, as torch's tutorial does.

There a process has local blocks, so the tutorial sets `attention.n_heads //= tp_mesh.size()` before
`parallelize_module`. Here tensors are global, and so are the counts.
"""

import re
import warnings
from typing import Any

from torch import nn

from spmd_core.sharding.mesh import Mesh
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_COUNT = re.compile(r"(n|num)_(\w+_)?heads?")


def restore_head_counts(root: nn.Module, mesh: Mesh, axes: tuple[int, ...], *, depth: int) -> None:
    """Sets divided head counts of the modules inside back to their whole values, with a warning.

    A module has divided counts if it has an attribute `head_dim`, and its counts times the number
    of devices along the axes, and not its counts themselves, are the heads that its linear layers
    which the axes split by columns compute. A module for which that does not hold is left alone.

    Args:
        root: the module to which a plan was applied.
        mesh: the mesh of the plan.
        axes: its axes along which the plan splits.
        depth: the number of frames between this function and the caller to warn.
    """
    size = 1
    for axis in axes:
        size *= mesh.mesh_shape[axis]
    if size == 1:
        return
    restored = []
    for name, module in root.named_modules():
        counts = _divided_counts(module, axes, size)
        for attribute, count in counts.items():
            setattr(module, attribute, count * size)
            path = f"{name}.{attribute}" if name else attribute
            restored.append(f"{path} from {count} to {count * size}")
    if restored:
        warnings.warn(
            "a tensor of device xla is the whole one, so a module keeps the number of all its "
            f"heads; got counts that were divided by {size}, the number of devices along the "
            f"plan's axis. They were set back: {', '.join(restored)}. Remove the lines that divide "
            "them.",
            stacklevel=depth + 1,
        )


def _divided_counts(module: nn.Module, axes: tuple[int, ...], size: int) -> dict[str, int]:
    """The attributes of a module that are head counts, if they were divided; else none."""
    head_dim = module.__dict__.get("head_dim")
    if not _is_count(head_dim):
        return {}
    counts = {
        name: value
        for name, value in module.__dict__.items()
        if _COUNT.fullmatch(name) and _is_count(value)
    }
    widths = {
        layer.out_features
        for layer in module.children()
        if isinstance(layer, nn.Linear) and _split_by_columns(layer, axes)
    }
    if not widths or {count * size * head_dim for count in counts.values()} != widths:
        return {}
    return counts


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _split_by_columns(layer: nn.Linear, axes: tuple[int, ...]) -> bool:
    weight = layer.weight
    sharding = weight.sharding if isinstance(weight, XLAShardedTensor) else None
    return sharding is not None and set(axes) <= set(sharding.dims[0])
