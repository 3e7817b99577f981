"""Head counts that a program divided by hand for tensor parallelism, as torch's tutorial does.

There a process has local blocks, so the tutorial sets `attention.n_heads //= tp_mesh.size()` before
`parallelize_module`. Here tensors are global, and so are the counts.
"""

import math
import re
import warnings
from typing import Any

from torch import nn

from spmd_core.sharding.mesh import Mesh
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_COUNT = re.compile(r"(n|num)_(\w+_)?heads?|n?heads?")
# Where modules keep the width of a head, the factor of their scores, and the counts of the model.
_WIDTHS = re.compile(r"(attention_)?head_(dim|size|width)|(dim|size)_(per_)?head|d_(head|k|kv)")
_SCALES = re.compile(r"((softmax|attn|attention)_)?(scale|scaling)(_factor)?")
_CONFIGS = ("config", "cfg", "args", "model_args", "params")


def restore_head_counts(root: nn.Module, mesh: Mesh, axes: tuple[int, ...], *, depth: int) -> None:
    """Sets divided head counts of the modules inside back to their whole values, with a warning.

    A module has divided counts if its counts times the number of devices along the axes, and not
    its counts themselves, are the heads that its linear layers which the axes split by columns
    compute. That takes the width of a head: an attribute such as `head_dim`, or a scale that is its
    inverse root. Without these, the counts of the configuration that the module keeps decide. A
    module that has none of them is left alone, as nothing in it tells.

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
    own = module.__dict__
    counts = {
        name: value for name, value in own.items() if _COUNT.fullmatch(name) and _is_count(value)
    }
    layers = [layer for layer in module.children() if isinstance(layer, nn.Linear)]
    widths = {layer.out_features for layer in layers if _split_by_columns(layer, axes)}
    if not counts or not widths:
        return {}
    whole = {name: count * size for name, count in counts.items()}
    head_dim = _head_dim(own)
    if head_dim is not None:
        # As they are, they may be those of layers that the plan leaves whole.
        every_width = {layer.out_features for layer in layers}
        fits = _compute(counts, head_dim, every_width)
        is_divided = not fits and _compute(whole, head_dim, widths)
    else:
        configs = [own[name] for name in _CONFIGS if own.get(name) is not None]
        is_divided = any(
            all(_field(config, name) == count for name, count in whole.items())
            for config in configs
        )
    return counts if is_divided else {}


def _head_dim(attributes: dict[str, Any]) -> int | None:
    for name, value in attributes.items():
        if _WIDTHS.fullmatch(name) and _is_count(value):
            return int(value)
    for name, value in attributes.items():
        if _SCALES.fullmatch(name) and isinstance(value, float) and 0 < value < 1:
            width = round(value**-2)
            if math.isclose(width**-0.5, value, rel_tol=1e-6):
                return width
    return None


def _compute(counts: dict[str, int], head_dim: int, widths: set[int]) -> bool:
    """Whether layers of these widths compute so many heads, each by its own layer or by one."""
    heads = {count * head_dim for count in counts.values()}
    return heads <= widths or max(heads) + 2 * min(heads) in widths


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _split_by_columns(layer: nn.Linear, axes: tuple[int, ...]) -> bool:
    weight = layer.weight
    sharding = weight.sharding if isinstance(weight, XLAShardedTensor) else None
    return sharding is not None and set(axes) <= set(sharding.dims[0])
