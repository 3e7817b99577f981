"""Conversion between DTensor's placements and partition specs."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from spmd_core.arguments import checked, require_kind
from spmd_core.errors import PartitionSpecError, UnsupportedOpError
from spmd_core.marks.device_mesh import AnyMesh, from_device_mesh
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import PartitionSpecLike
from spmd_core.sharding.sharding import Sharding

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def placement_types() -> ModuleType:
    """torch's module of placement types, imported at the first call.

    The import takes a second, which only programs with placements should pay.
    """
    from torch.distributed.tensor import placement_types  # noqa: PLC0415

    return placement_types


@checked(ndim=0)
def partition_spec_of(
    device_mesh: AnyMesh, placements: Sequence["Placement"], ndim: int
) -> tuple[Mesh, PartitionSpecLike]:
    """The mesh and the partition spec of placements, for tensors of rank `ndim`.

    If several dimensions of the mesh shard one dim, they split it in their order; `_StridedShard`
    changes the order by its `split_factor`.

    Raises:
        ValueError: not one placement for each dimension of the mesh.
        UnsupportedOpError: an unknown placement, or `Partial`, which no stored tensor has, as sums
            are computed when they are read.
        IndexError: a `Shard` of a dim that the tensor does not have.
    """
    types = placement_types()
    over = from_device_mesh(device_mesh)
    if len(placements) != len(over.axes):
        raise ValueError(
            "there must be one placement for each dimension of the mesh; got "
            f"{len(placements)} placements {tuple(placements)} for {len(over.axes)} dimensions. "
            "Write Replicate() for a dimension that does not shard."
        )
    sharded = getattr(types, "_StridedShard", ())
    factors: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for axes, placement in zip(over.axes, placements):
        if isinstance(placement, types.Replicate):
            continue
        if not isinstance(placement, (types.Shard, sharded)):
            raise UnsupportedOpError(
                "a tensor of the global view is sharded or replicated along each axis; "
                f"got {placement!r}. Use Shard(dim) or Replicate(); "
                "sums over devices are pending inside shard_map only."
            )
        if not -ndim <= placement.dim < ndim:
            raise IndexError(
                "Shard names a dim of the tensor; "
                f"got dim {placement.dim} for a tensor of rank {ndim}. Use {-ndim} to {ndim - 1}."
            )
        factors.setdefault(placement.dim % ndim, []).append(
            (axes, getattr(placement, "split_factor", 1))
        )
    dims = [_in_order(over.mesh, factors.get(dim, [])) for dim in range(ndim)]
    return over.mesh, Sharding.of(over.mesh, tuple(dims), ndim).partition_spec


def _in_order(mesh: Mesh, sharding: list[tuple[tuple[int, ...], int]]) -> tuple[int, ...]:
    """The axes that shard one dim, the major one first.

    `sharding` lists (axes, split_factor) in the order of the mesh. The factor is the number of
    pieces into which later entries split the dim before this one does.
    """
    order: list[tuple[int, ...]] = []
    for axes, factor in reversed(sharding):
        pieces = [
            math.prod(mesh.mesh_shape[a] for before in order[:place] for a in before)
            for place in range(len(order) + 1)
        ]
        if factor not in pieces:
            raise PartitionSpecError(
                "the split_factor of a strided shard must be the number of pieces that later "
                f"dimensions of the mesh make first, one of {sorted(set(pieces))}; got {factor}. "
                "Use Shard(dim), or correct the factor."
            )
        order.insert(pieces.index(factor), axes)
    return tuple(axis for axes in order for axis in axes)


def placements_of(sharding: Sharding) -> tuple["Placement", ...]:
    """For each axis of the sharding's mesh `Shard(dim)` or `Replicate()`.

    `_StridedShard` if a later axis of the mesh splits the dim first.
    """
    require_kind("sharding", sharding, Sharding, write="tensor.sharding of a marked tensor")
    types = placement_types()
    placements = [types.Replicate()] * len(sharding.mesh.mesh_shape)
    for dim, axes in enumerate(sharding.dims):
        for place, axis in enumerate(axes):
            first = math.prod(
                sharding.mesh.mesh_shape[other] for other in axes[:place] if other > axis
            )
            placements[axis] = (
                types.Shard(dim) if first == 1 else types._StridedShard(dim, split_factor=first)
            )
    return tuple(placements)
