"""The collectives of replicas, where the replicas are the devices of a manual region: groups of device numbers become axes of its mesh."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from spmd_core import manual
from spmd_core.sharding import Manual
from spmd_core.tensor import XLAShardedTensor

_OPS = {"sum": "sum", "min": "min", "max": "max"}
_INSTEAD = "Use groups along axes of the mesh, or spmd_core.shard_map and its collectives."


def region(value: Any) -> Manual | None:
    """The region to whose devices a tensor is local; None where there is one replica, the logical device."""
    return manual.region_of(value) if isinstance(value, XLAShardedTensor) else None


def all_reduce(
    found: Manual, reduce_type: str, value: torch.Tensor, scale: float, groups: Any
) -> torch.Tensor:
    """The reduction of every device's own value over its group, times `scale`."""
    result = manual.in_region(
        found, manual.all_reduce, value, _axes(found, groups), _operation(reduce_type)
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
    """The sum over the group, times `scale`, of which each device keeps its part of `dim`. ValueError for another reduction or count."""
    axes = _axes(found, groups)
    size = _size(found, axes)
    if _operation(reduce_type) != "sum" or count != size:
        raise ValueError(
            f"reduce_scatter sums over a group and gives each of its {size} devices a part; got {reduce_type!r} and shard_count={count}. "
            f"Pass REDUCE_SUM and shard_count={size}."
        )
    result = manual.in_region(found, manual.reduce_scatter, value, axes, dim)
    return result if scale == 1.0 else result * scale


def all_gather(found: Manual, value: torch.Tensor, dim: int, groups: Any) -> torch.Tensor:
    """The values of the devices of the group, joined along `dim`."""
    return manual.in_region(found, manual.all_gather, value, _axes(found, groups), dim)


def all_to_all(
    found: Manual, value: torch.Tensor, split_dim: int, concat_dim: int, count: int, groups: Any
) -> torch.Tensor:
    """Each device's `count` parts of `split_dim`, one to each device of the group, joined along `concat_dim`. ValueError for another count."""
    axes = _axes(found, groups)
    if count != _size(found, axes):
        raise ValueError(
            f"all_to_all gives each device of a group a part; got split_count={count} for {_size(found, axes)} devices. Pass their number."
        )
    return manual.in_region(found, manual.all_to_all, value, axes, split_dim, concat_dim)


def _operation(reduce_type: str) -> str:
    if reduce_type not in _OPS:
        raise ValueError(
            f"in a manual region values are reduced by {', '.join(_OPS)}; got {reduce_type!r}. Gather them and reduce the result."
        )
    return _OPS[reduce_type]


def _size(found: Manual, axes: Sequence[int]) -> int:
    return int(np.prod([found.mesh.mesh_shape[axis] for axis in axes]))


def _axes(found: Manual, groups: Any) -> tuple[int, ...]:
    """The axes along which the devices of each group lie, in its order; all of the region for no groups. ValueError where there are none."""
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
        f"the groups of a collective are the devices along axes of the region's mesh; got {groups} for {found.mesh!r}. {_INSTEAD}"
    )
