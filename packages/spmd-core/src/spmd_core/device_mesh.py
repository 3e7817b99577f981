"""Completes torch's `DeviceMesh` of device type "xla", which has no process group: slices by name, coordinates, ranks."""

from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

from spmd_core import runtime

# torch makes a mesh of this type without process groups, and then leaves out what it would have learnt from them: `mesh["tp"]`, `get_rank()` and
# `get_coordinate()` fail. All of this ends when torch sets it for every type.
_mesh_tensor = DeviceMesh._get_mesh_tensor_from_full_mesh
_rank, _local_rank = DeviceMesh.get_rank, DeviceMesh.get_local_rank


def own_rank() -> int:
    """Where this process stands in a mesh of device type "xla": its first device."""
    return runtime.first_local_device()


def _mesh_tensor_without_group(
    full_mesh: torch.Tensor, current_rank: int | None = None
) -> torch.Tensor:
    if current_rank is None and not distributed.is_initialized():
        current_rank = own_rank()
    return _mesh_tensor(full_mesh, current_rank)


def _rank_of(self: DeviceMesh) -> int:
    return own_rank() if self.device_type == "xla" else _rank(self)


def _local_rank_of(self: DeviceMesh, mesh_dim: int | str | None = None) -> int:
    if self.device_type != "xla":
        return _local_rank(self, mesh_dim)
    if mesh_dim is None and self.ndim > 1:
        raise RuntimeError(
            f"a mesh of several dimensions has a local rank in each; got get_local_rank() on {self}. Name one: get_local_rank(mesh_dim=0)."
        )
    names = self.mesh_dim_names or ()
    if isinstance(mesh_dim, str) and mesh_dim not in names:
        raise KeyError(
            f"mesh_dim must be one of the mesh's names, {names}; got {mesh_dim!r}. Use one of them."
        )
    dim = (
        0 if mesh_dim is None else names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim
    )
    coordinate = _coordinate(self)
    if coordinate is None:
        raise RuntimeError(
            f"only a device of the mesh has a rank in it; device {own_rank()}, the first of this process, is not one of {self}'s."
        )
    return coordinate[dim]


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    where = (mesh.mesh == own_rank()).nonzero()
    return tuple(where[0].tolist()) if len(where) else None


class _Default:
    """A value for meshes to which torch has given none of their own."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def __get__(self, mesh: DeviceMesh | None, owner: Any = None) -> Any:
        if mesh is not None and mesh.device_type == "xla":
            return self._value(mesh)
        raise AttributeError(
            f"{'DeviceMesh' if mesh is None else mesh} has no attribute {self._name!r}"
        )


DeviceMesh._get_mesh_tensor_from_full_mesh = staticmethod(_mesh_tensor_without_group)  # type: ignore[method-assign]
DeviceMesh.get_rank = _rank_of  # type: ignore[method-assign]
DeviceMesh.get_local_rank = _local_rank_of  # type: ignore[method-assign]
DeviceMesh._dim_group_names = _Default("_dim_group_names", lambda mesh: [])  # type: ignore[assignment]
DeviceMesh._coordinate_on_dim = _Default("_coordinate_on_dim", _coordinate)  # type: ignore[assignment]
DeviceMesh._rank = _Default("_rank", lambda mesh: own_rank())  # type: ignore[assignment]
