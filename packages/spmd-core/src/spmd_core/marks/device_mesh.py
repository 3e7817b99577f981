"""torch's `DeviceMesh` for device type xla: conversion from and to `Mesh`, slices and ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch
from torch import distributed
from torch.distributed import device_mesh as torch_device_mesh
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

from spmd_core.arguments import require_kind
from spmd_core.errors import MeshError, UnsupportedOpError
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import (
    Mesh,
    check_devices,
    checked_grid,
    get_global_mesh,
    given_or_global,
)

AnyMesh: TypeAlias = DeviceMesh | Mesh


@dataclass(frozen=True)
class AxesOf:
    """A DeviceMesh, expressed as axes of a `Mesh`.

    Attributes:
        mesh: a mesh of all devices of the DeviceMesh; for a slice such as `mesh["tp"]`, of the mesh
            from which it was cut.
        axes: for each dimension of the DeviceMesh the corresponding axes of `mesh`, major first:
            one axis, or several for a flattened dimension.
    """

    mesh: Mesh
    axes: tuple[tuple[int, ...], ...]


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """torch's `init_device_mesh` for device type "xla": all devices in order, no process group.

    The mesh can be sliced by name, as in `mesh["tp"]`.

    Raises:
        MeshError: another device type, the product of the shape is not the number of devices, or
            the names are not one for each axis.
    """
    if device_type != "xla":
        raise MeshError(
            "spmd.dtensor.init_device_mesh makes meshes of device type 'xla'; "
            f"got {device_type!r}. "
            "For others use torch.distributed.init_device_mesh."
        )
    shape, names = checked_grid(mesh_shape, mesh_dim_names)
    count = devices.global_runtime_device_count()
    if math.prod(shape) != count:
        raise MeshError(
            "the product of mesh_shape must be the number of devices; "
            f"got {shape} with product {math.prod(shape)} for {count} devices. "
            f"Write for instance ({count},), or build DeviceMesh('xla', ids) over some of them."
        )
    return torch_device_mesh.init_device_mesh("xla", shape, mesh_dim_names=names)


def to_device_mesh(mesh: Mesh) -> DeviceMesh:
    """The DeviceMesh of device type "xla" with the same devices, shape and names."""
    require_kind("mesh", mesh, Mesh, write="Mesh(device_ids, mesh_shape, axis_names)")
    ids = torch.from_numpy(mesh.get_logical_mesh().copy())
    return DeviceMesh("xla", ids, mesh_dim_names=mesh.axis_names)


def from_device_mesh(device_mesh: AnyMesh | None) -> AxesOf:
    """Expresses a DeviceMesh of device type "xla" as axes of a `Mesh`.

    A `Mesh` stands for itself, None for the global mesh. A slice becomes axes of the whole mesh: to
    shard over `mesh["tp"]` is to shard over that axis, and to replicate over the others.

    Raises:
        MeshError: another device type, devices that do not exist, or no global mesh.
    """
    if device_mesh is None:
        device_mesh = given_or_global(None, "a placement")
    if isinstance(device_mesh, Mesh):
        return AxesOf(device_mesh, tuple((axis,) for axis in range(len(device_mesh.mesh_shape))))
    if not isinstance(device_mesh, DeviceMesh) or device_mesh.device_type != "xla":
        got = (
            f"device type {device_mesh.device_type!r}"
            if isinstance(device_mesh, DeviceMesh)
            else type(device_mesh).__name__
        )
        raise MeshError(
            f"a mesh of device type 'xla' is needed; got {got}. "
            "Build one: spmd.dtensor.init_device_mesh('xla', shape, mesh_dim_names=names)."
        )
    root = device_mesh._get_root_mesh()
    names = root.mesh_dim_names
    mesh = Mesh(root.mesh.reshape(-1).tolist(), tuple(root.mesh.shape), names)
    check_devices(mesh, devices.global_runtime_device_count())
    if device_mesh is root:
        return AxesOf(mesh, tuple((axis,) for axis in range(root.ndim)))
    assert names is not None and device_mesh.mesh_dim_names is not None
    return AxesOf(
        mesh, tuple(_axes_of_dimension(device_mesh, root, dim) for dim in range(device_mesh.ndim))
    )


def _axes_of_dimension(device_mesh: DeviceMesh, root: DeviceMesh, dim: int) -> tuple[int, ...]:
    """The axes of `root` whose devices have the same distances as those along `dim` of a slice."""
    names, root_names = device_mesh.mesh_dim_names, root.mesh_dim_names
    assert names is not None and root_names is not None
    if names[dim] in root_names:
        return (root_names.index(names[dim]),)
    # The layout of a flattened dimension is a list of (size, stride) in the order of the devices.
    layout = device_mesh._layout[dim]
    parts = list(
        zip(
            *(
                part if isinstance(part, tuple) else (part,)
                for part in (layout.shape, layout.stride)
            )
        )
    )
    axes: list[int] = []
    for size, stride in parts:
        run = _axes_with(root, size, stride)
        if run is None:
            raise MeshError(
                "a flattened dimension must be whole axes of its mesh; "
                f"got {names[dim]!r} of size {size} and stride {stride} in {root}. "
                "Build the Mesh yourself and pass that."
            )
        axes.extend(run)
    return tuple(axes)


def _axes_with(root: DeviceMesh, size: int, stride: int) -> tuple[int, ...] | None:
    """Consecutive axes of `root` with the product `size`, the last of which has stride `stride`."""
    shape = tuple(root.mesh.shape)
    for last in range(len(shape)):
        if math.prod(shape[last + 1 :]) != stride:
            continue
        for first in range(last, -1, -1):
            if math.prod(shape[first : last + 1]) == size:
                return tuple(range(first, last + 1))
    return None


# torch makes a mesh of this type without process groups, so that `mesh["tp"]`, `get_rank()` and
# `get_coordinate()` fail. The replacements below can go once torch supports them for all types.
_torch_mesh_tensor = DeviceMesh._get_mesh_tensor_from_full_mesh
_torch_rank, _torch_local_rank = DeviceMesh.get_rank, DeviceMesh.get_local_rank
_torch_group = DeviceMesh.get_group
_MeshEnvironment: Any = type(torch_device_mesh._mesh_resources)
_torch_current_mesh: Callable[..., DeviceMesh] = _MeshEnvironment.get_current_mesh
# Called by torch's DTensor before it uses a mesh; torch 2.11 lacks it.
_torch_part = getattr(DeviceMesh, "_is_current_rank_part_of_mesh", None)


def own_rank() -> int:
    """The rank of this process in a mesh of device type "xla": the id of its first device."""
    return devices.first_local_device()


def _mesh_tensor_without_group(
    full_mesh: torch.Tensor, current_rank: int | None = None
) -> torch.Tensor:
    if current_rank is None and not distributed.is_initialized():
        current_rank = own_rank()
    return _torch_mesh_tensor(full_mesh, current_rank)


def _rank_of(self: DeviceMesh) -> int:
    return own_rank() if self.device_type == "xla" else _torch_rank(self)


def _local_rank_of(self: DeviceMesh, mesh_dim: int | str | None = None) -> int:
    if self.device_type != "xla":
        return _torch_local_rank(self, mesh_dim)
    if mesh_dim is None and self.ndim > 1:
        raise RuntimeError(
            "a mesh of several dimensions has a local rank in each; "
            f"got get_local_rank() on {self}. Name one: get_local_rank(mesh_dim=0)."
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
            "only a device of the mesh has a rank in it; "
            f"device {own_rank()}, the first of this process, is not one of {self}'s. Ask where "
            "mesh.get_coordinate() is not None."
        )
    return coordinate[dim]


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    where = (mesh.mesh == own_rank()).nonzero()
    return tuple(where[0].tolist()) if len(where) else None


def _refuse(what: str) -> NoReturn:
    raise UnsupportedOpError(
        "a mesh of device type 'xla' has no process groups, as the partitioner moves the data "
        f"between its devices; got {what}. Use the functions for whole tensors: "
        "spmd.dtensor.distribute_tensor or mark_sharding in place of DTensor, "
        "spmd.context_parallel in place of torch's, "
        "spmd.shard_map for collectives of your own."
    )


def _current_mesh(self: Any) -> DeviceMesh:
    """The default mesh of torch's functions: that of the innermost `with mesh:`, or ours."""
    if self.mesh_stack or not (get_global_mesh() is not None or devices.is_spmd()):
        return _torch_current_mesh(self)
    return to_device_mesh(given_or_global(None, "a call of torch without a mesh"))


def _group_of(self: DeviceMesh, mesh_dim: int | str | None = None) -> Any:
    return _refuse("get_group()") if self.device_type == "xla" else _torch_group(self, mesh_dim)


def _part_of_mesh(self: DeviceMesh) -> bool:
    if self.device_type == "xla":
        _refuse("a DTensor over it")
    assert _torch_part is not None
    return bool(_torch_part(self))


class _NoGroups(list[str]):
    """The names of a mesh's groups: none."""

    def __getitem__(self, position: Any) -> Any:
        _refuse("a collective over it")


class _GroupAttribute:
    """A descriptor for an attribute that torch sets only on meshes with process groups."""

    def __init__(self, name: str, value: Callable[[DeviceMesh], Any]) -> None:
        self._name, self._value = name, value

    def __get__(self, mesh: DeviceMesh | None, owner: type | None = None) -> Any:
        if mesh is not None and mesh.device_type == "xla":
            return self._value(mesh)
        raise AttributeError(
            f"{'DeviceMesh' if mesh is None else mesh} has no attribute {self._name!r}"
        )


DeviceMesh._get_mesh_tensor_from_full_mesh = staticmethod(  # type: ignore[method-assign]
    _mesh_tensor_without_group
)
_MeshEnvironment.get_current_mesh = _current_mesh
DeviceMesh.get_rank = _rank_of  # type: ignore[method-assign]
DeviceMesh.get_local_rank = _local_rank_of  # type: ignore[method-assign]
DeviceMesh.get_group = _group_of  # type: ignore[method-assign]
if _torch_part is not None:
    DeviceMesh._is_current_rank_part_of_mesh = _part_of_mesh  # type: ignore[method-assign]
DeviceMesh._dim_group_names = _GroupAttribute("_dim_group_names", lambda mesh: _NoGroups())  # type: ignore[assignment]
DeviceMesh._coordinate_on_dim = _GroupAttribute("_coordinate_on_dim", _coordinate)  # type: ignore[assignment]
DeviceMesh._rank = _GroupAttribute("_rank", lambda mesh: own_rank())  # type: ignore[assignment]
