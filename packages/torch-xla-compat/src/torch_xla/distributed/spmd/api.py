"""DTensor's functions on an xla mesh, under the names that torch imports from this module."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import spmd_core as spmd
from spmd_core.errors import MeshError, PartitionSpecError, UnsupportedOpError
from spmd_core.marks import dtensor
from spmd_core.marks.device_mesh import from_device_mesh
from spmd_core.marks.placements import partition_spec_of
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from torch_xla._upstream import raising
from torch_xla.distributed.spmd.xla_sharding import Mesh

auto_policy = dtensor.auto_policy


def convert_to_xla_mesh(dt_mesh: DeviceMesh) -> Mesh:
    """Returns the mesh with the same devices, shape and names; turns SPMD mode on.

    Raises:
        AssertionError: a mesh of another device type.
    """
    spmd.use_spmd()
    with raising(AssertionError, MeshError):
        mesh = from_device_mesh(dt_mesh).mesh
    return Mesh(mesh.device_ids, mesh.mesh_shape, mesh.axis_names)


def convert_to_xla_partition_spec(
    tensor: torch.Tensor, placements: Sequence[Any]
) -> tuple[Any, ...]:
    """Converts `Shard` and `Replicate` placements to a partition spec with indices of axes.

    Raises:
        ValueError: a placement of another type.
    """
    axes = spmd.Mesh(range(1), (1,) * len(placements)) if placements else spmd.Mesh([0], (1,))
    with raising(ValueError, UnsupportedOpError):
        try:
            return tuple(partition_spec_of(axes, placements, tensor.dim())[1])
        except UnsupportedOpError as error:
            raise ValueError(f"Unsupported placement type: {error}") from error


def xla_distribute_tensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Any] | None = None
) -> XLAShardedTensor:
    """`spmd_core.dtensor.distribute_tensor`; turns SPMD mode on.

    Raises:
        AssertionError: a mesh of another device type, not one placement for each of its dimensions,
            or a tensor that is sharded already.
        ValueError: a DTensor of another device type, or a placement that is neither Shard nor
            Replicate.
    """
    spmd.use_spmd()
    if (
        placements is not None
        and isinstance(device_mesh, DeviceMesh)
        and len(placements) != device_mesh.ndim
    ):
        raise AssertionError(
            f"placements must have one entry for each dimension of the mesh, {device_mesh.ndim}; "
            f"got {len(placements)}. Use Replicate() for the rest."
        )
    with (
        raising(ValueError, TypeError, UnsupportedOpError),
        raising(AssertionError, MeshError, PartitionSpecError),
    ):
        return dtensor.distribute_tensor(tensor, device_mesh, placements)


def xla_distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """`spmd_core.dtensor.distribute_module`; turns SPMD mode on."""
    spmd.use_spmd()
    return dtensor.distribute_module(module, device_mesh, partition_fn, input_fn, output_fn)
