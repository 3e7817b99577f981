"""Collectives over replica groups inside a manual region, where each device is a replica.

Groups of device numbers are translated to axes of the region's mesh.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from spmd_core.manual import collectives
from spmd_core.manual.region import region_of
from spmd_core.sharding.sharding import Manual
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_OPS = {"sum": "sum", "min": "min", "max": "max"}
_INSTEAD = "Use groups along axes of the mesh, or spmd_core.shard_map and its collectives."


def region(value: Any) -> Manual | None:
    """The manual region to which a tensor is local; None for any other tensor.

    Outside a region there is one replica, the logical device.
    """
    return region_of(value) if isinstance(value, XLAShardedTensor) else None


def all_reduce(
    found: Manual, reduce_type: str, value: torch.Tensor, scale: float, groups: Any
) -> torch.Tensor:
    """Reduces every device's own value over its group, and multiplies it by `scale`."""
    result = collectives.in_region(
        found, collectives.all_reduce, value, _axes(found, groups), _operation(reduce_type)
    )
    return result if scale == 1.0 else result * scale


def reduce_scatter(
    found: Manual,
    reduce_type: str,
    value: torch.Tensor,
    scale: float,
    dim: int,
    count: int,
    groups: Any,
) -> torch.Tensor:
    """Sums over the group, times `scale`; each device keeps its part of `dim`.

    Raises:
        ValueError: another reduction than the sum, or a `count` that is not the size of the group.
    """
    axes = _axes(found, groups)
    size = _size(found, axes)
    if _operation(reduce_type) != "sum" or count != size:
        raise ValueError(
            f"reduce_scatter sums over a group and gives each of its {size} devices a part; "
            f"got {reduce_type!r} and shard_count={count}. "
            f"Pass REDUCE_SUM and shard_count={size}."
        )
    result = collectives.in_region(found, collectives.reduce_scatter, value, axes, dim)
    return result if scale == 1.0 else result * scale


def all_gather(found: Manual, value: torch.Tensor, dim: int, groups: Any) -> torch.Tensor:
    """Concatenates the values of the group's devices along `dim`."""
    return collectives.in_region(found, collectives.all_gather, value, _axes(found, groups), dim)


def all_to_all(
    found: Manual, value: torch.Tensor, split_dim: int, concat_dim: int, count: int, groups: Any
) -> torch.Tensor:
    """Splits `split_dim` into a part for each device of the group; joins along `concat_dim`.

    Raises:
        ValueError: `count`, the number of parts, is not the size of the group.
    """
    axes = _axes(found, groups)
    if count != _size(found, axes):
        raise ValueError(
            f"all_to_all gives each device of a group a part; got split_count={count} for "
            f"{_size(found, axes)} devices. Pass their number."
        )
    return collectives.in_region(found, collectives.all_to_all, value, axes, split_dim, concat_dim)


def _operation(reduce_type: str) -> str:
    if reduce_type not in _OPS:
        raise ValueError(
            f"in a manual region values are reduced by {', '.join(_OPS)}; got {reduce_type!r}. "
            "Gather them and reduce the result."
        )
    return _OPS[reduce_type]


def _size(found: Manual, axes: Sequence[int]) -> int:
    return int(np.prod([found.mesh.mesh_shape[axis] for axis in axes]))


def _axes(found: Manual, groups: Any) -> tuple[int, ...]:
    """The mesh axes along which each group's devices lie, in the group's order.

    Without groups, all axes of the region. ValueError if no axes make these groups.
    """
    if not groups:
        return found.axes
    wanted = sorted([int(device) for device in group] for group in groups)
    ids = found.mesh.get_logical_mesh()
    for n in range(len(found.axes) + 1):
        for axes in itertools.combinations(found.axes, n):
            others = [axis for axis in range(ids.ndim) if axis not in axes]
            if (
                sorted(ids.transpose(*others, *axes).reshape(-1, _size(found, axes)).tolist())
                == wanted
            ):
                return axes
    raise ValueError(
        "the groups of a collective are the devices along axes of the region's mesh; "
        f"got {groups} for {found.mesh!r}. {_INSTEAD}"
    )
