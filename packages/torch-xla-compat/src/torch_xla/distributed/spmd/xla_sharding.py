"""Meshes, marks and manual regions under torch_xla's names, signatures and exception types; what they do is `spmd_core`'s."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import spmd_core as spmd
from spmd_core import barrier, custom_ops, einsum_linear, manual, metrics
from spmd_core.errors import MeshError, PartitionSpecError
from spmd_core.mesh import check_devices
from spmd_core.sharding import PartitionSpec as PartitionSpec
from spmd_core.sharding import Sharding, validate_spec
from spmd_core.sharding import ShardingType as ShardingType
from spmd_core.tensor import XLAShardedTensor
from torch_xla import _XLAC, runtime
from torch_xla._upstream import raising


class Mesh(spmd.Mesh):
    """`spmd_core.Mesh`; what it refuses is an AssertionError."""

    def __init__(
        self,
        device_ids: np.ndarray | Sequence[int],
        mesh_shape: tuple[int, ...],
        axis_names: tuple[str, ...] | None = None,
    ) -> None:
        with raising(AssertionError, MeshError):
            super().__init__(device_ids, mesh_shape, axis_names)
            check_devices(self, runtime.global_runtime_device_count())

    def get_axis_name_idx(self, name: str) -> int | None:  # type: ignore[override]
        """The index of an axis, None for a name that the mesh lacks. TypeError for an unnamed mesh."""
        if self.axis_names is None:
            raise TypeError(
                "an axis has a name only in a mesh with axis_names; this mesh has none. Pass axis_names to Mesh."
            )
        return self.axis_names.index(name) if name in self.axis_names else None

    def _validate_translated_partition_spec(self, partition_spec: Sequence[Any]) -> None:
        _check_spec(self, tuple(partition_spec))

    def _get_op_sharding_args(
        self, partition_spec: PartitionSpec
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Sequence[int]], int]:
        """(tile_assignment, group_assignment, replication_groups, type) as `_XLAC.OpSharding` takes them."""
        found = self.get_op_sharding(partition_spec)
        return (
            found.tile_assignment,
            found.group_assignment,
            found.replication_groups,
            int(found.type),
        )

    def get_op_sharding(self, partition_spec: PartitionSpec) -> _XLAC.OpSharding:
        """XLA's description of what the spec means over this mesh; made, and counted as `CreateOpSharding`, once for each spec.

        Raises:
            AssertionError: an axis that the mesh lacks by its number, one that is named twice, or nested tuples.
            ValueError: an axis that the mesh lacks by its name, or an entry of another type.
        """
        known: dict[Any, _XLAC.OpSharding] = self.__dict__.setdefault("_op_shardings", {})
        key = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in partition_spec)
        if key not in known:
            _check_spec(self, key)
            metrics.count("op_shardings")
            known[key] = _XLAC.OpSharding.of(Sharding.of(self, key, len(key)))
        return known[key]

    get_op_sharding_v2 = get_op_sharding

    @staticmethod
    def from_str(mesh_str: str) -> "Mesh":
        """The mesh that `str(mesh)` was taken from. ValueError for anything else."""
        mesh = spmd.Mesh.from_str(mesh_str)
        return Mesh(mesh.device_ids, mesh.mesh_shape, mesh.axis_names)


def _check_spec(mesh: spmd.Mesh, spec: PartitionSpec) -> None:
    """Raises what torch_xla raises: ValueError for a name that the mesh lacks and for another type of entry, AssertionError for the rest."""
    try:
        validate_spec(mesh, spec)
    except PartitionSpecError as error:
        axes = [
            axis
            for entry in spec
            for axis in (entry if isinstance(entry, (tuple, list)) else (entry,))
        ]
        unknown = [
            axis for axis in axes if isinstance(axis, str) and axis not in (mesh.axis_names or ())
        ]
        if unknown:
            raise ValueError(
                f"Axis name {unknown[0]} is not defined in the given mesh: {error}"
            ) from error
        if any(
            not isinstance(axis, (int, np.integer, str, tuple, list, type(None)))
            or isinstance(axis, bool)
            for axis in axes
        ):
            raise
        raise AssertionError(str(error)) from error


@dataclass(frozen=True)
class _Device:
    """A device as jax's mesh utilities look at one."""

    id: int
    platform: str
    device_kind: str
    coords: Sequence[int] | None
    core_on_chip: int
    slice_index: int | None
    process_index: int

    @classmethod
    def of(cls, number: int, row: dict[str, Any]) -> "_Device":
        """The device of a row of `xr.global_runtime_device_attributes()`; what is missing in it is what a device without it has."""
        platform = row["name"].split(":")[0].lower()
        facts = (
            row.get("coords"),
            row.get("core_on_chip", 0),
            row.get("slice_index"),
            row.get("process_index", 0),
        )
        return cls(number, platform, row.get("kind", ""), *facts)


class HybridMesh(spmd.HybridMesh, Mesh):
    """`spmd_core.HybridMesh`, also by position. What it refuses is a ValueError, as with torch_xla."""

    def __init__(
        self,
        ici_mesh_shape: tuple[int, ...],
        dcn_mesh_shape: tuple[int, ...] | None = None,
        axis_names: tuple[str, ...] | None = None,
        *,
        num_slices: int | None = None,
    ) -> None:
        super().__init__(ici_mesh_shape, dcn_mesh_shape, axis_names, num_slices=num_slices)

    @staticmethod
    def _devices() -> Sequence[Any]:
        """What `xr.global_runtime_device_attributes()` tells of the devices, by the numbers in their names."""
        rows = sorted(
            runtime.global_runtime_device_attributes(),
            key=lambda row: int(row["name"].split(":")[1]),
        )
        return [_Device.of(i, row) for i, row in enumerate(rows)]


def set_global_mesh(mesh: spmd.Mesh | None) -> None:
    """Makes `mesh` the one that is used where a call names none."""
    spmd.set_global_mesh(mesh)


def get_global_mesh() -> Any:
    """The global mesh, or None."""
    return spmd.get_global_mesh()


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """All devices on one axis."""
    count = spmd.global_runtime_device_count()
    return Mesh(range(count), (count,), None if axis_name is None else (axis_name,))


def _check_rank(t: Any, partition_spec: Sequence[Any]) -> None:
    if (
        isinstance(t, torch.Tensor)
        and isinstance(partition_spec, (tuple, list))
        and len(partition_spec) != t.dim()
    ):
        raise AssertionError(
            f"Partition spec length ({len(partition_spec)}) should be equal to the input rank ({t.dim()}); got {tuple(partition_spec)} for shape "
            f"{tuple(t.shape)}. Write one entry for each dim."
        )


def _describe(mesh: Any, partition_spec: Any) -> None:
    """Checks the spec as torch_xla does, by making its description (once for each mesh and spec)."""
    if isinstance(mesh, Mesh) and isinstance(partition_spec, (tuple, list)):
        mesh.get_op_sharding(tuple(partition_spec))


def _require_spmd() -> None:
    if not runtime.is_spmd():
        raise RuntimeError(
            "Please enable SPMD via `torch_xla.runtime.use_spmd()`: marks need SPMD mode, and it is off. Call it before."
        )


def mark_sharding(
    t: torch.Tensor, mesh: spmd.Mesh, partition_spec: PartitionSpec
) -> XLAShardedTensor:
    """`spmd_core.mark_sharding`, for a tensor that has no other sharding yet. Data of the host starts to go up. Does not wait.

    Raises:
        AssertionError: not one entry for each dim, or a spec that `Mesh.get_op_sharding` refuses so.
        ValueError: a spec that `Mesh.get_op_sharding` refuses so.
        RuntimeError: SPMD mode is off, or data on the device was sharded otherwise.
    """
    _require_spmd()
    _check_rank(t, partition_spec)
    _describe(mesh, partition_spec)
    if (
        isinstance(t, XLAShardedTensor)
        and t.sharding is not None
        and not t.sharding.is_replicated
        and t._handle.storage.value.data is not None
    ):
        wanted = Sharding.of(mesh, partition_spec, t.dim())
        if wanted != t.sharding:
            raise RuntimeError(
                f"Existing annotation must be cleared first: the tensor has {t.sharding.text} and was to get {wanted.text}. "
                "Call clear_sharding(t) before."
            )
    return spmd.start_upload(spmd.mark_sharding(t, mesh, partition_spec))


def annotate_custom_sharding(
    t: torch.Tensor, mesh: spmd.Mesh, partition_spec: PartitionSpec
) -> XLAShardedTensor:
    """`spmd_core.annotate`: constrains the present value, over an existing sharding too."""
    _require_spmd()
    _check_rank(t, partition_spec)
    _describe(mesh, partition_spec)
    return spmd.annotate(t, mesh, partition_spec)


def mark_sharding_with_gradients(
    t: torch.Tensor, mesh: spmd.Mesh, partition_spec: PartitionSpec
) -> torch.Tensor:
    """`spmd_core.mark_sharding_with_gradients`."""
    _require_spmd()
    _check_rank(t, partition_spec)
    _describe(mesh, partition_spec)
    return spmd.mark_sharding_with_gradients(t, mesh, partition_spec)


class MarkShardingFunction:
    """`mark_sharding_with_gradients` as `apply`, through `torch.ops.xla.aot_mark_sharding`, so that a trace keeps it."""

    @staticmethod
    def apply(t: torch.Tensor, mesh: spmd.Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
        """A new tensor, marked; its gradient too."""
        result: torch.Tensor = torch.ops.xla.aot_mark_sharding(t, str(mesh), str(partition_spec))
        return result


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Takes a mark back; returns the tensor."""
    return spmd.clear_sharding(t)


def _region_mesh(mesh: spmd.Mesh | None) -> spmd.Mesh:
    chosen = get_global_mesh() if mesh is None else mesh
    if chosen is None:
        raise AttributeError(
            "a manual region needs a mesh; got None, and no global mesh is set. Pass mesh=, or call set_global_mesh(mesh)."
        )
    return chosen


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: spmd.Mesh | None = None
) -> XLAShardedTensor:
    """`spmd_core.enable_manual_sharding`, over the global mesh where none is given."""
    return spmd.enable_manual_sharding(t, partition_spec, mesh=_region_mesh(mesh))


def disable_manual_sharding(
    t: torch.Tensor,
    partition_spec: PartitionSpec,
    full_shape: Sequence[int],
    *,
    mesh: spmd.Mesh | None = None,
) -> XLAShardedTensor:
    """`spmd_core.disable_manual_sharding`, over the global mesh where none is given. RuntimeError for a tensor that is not a block."""
    if isinstance(t, XLAShardedTensor) and not manual.is_local(t):
        raise RuntimeError(
            "Input tensor is not manual sharded; only blocks make a whole. Call enable_manual_sharding first."
        )
    return spmd.disable_manual_sharding(t, partition_spec, full_shape, mesh=_region_mesh(mesh))


_mark_manual_sharding = _XLAC._mark_manual_sharding


def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """`spmd_core.shard_as`. AssertionError where the structures differ."""
    with raising(AssertionError, ValueError):
        return spmd.shard_as(a, b)


def wrap_as_sharded_tensor(
    t: torch.Tensor,
    mesh_shape: tuple[int, ...] | None = None,
    partition_spec: PartitionSpec | None = None,
) -> XLAShardedTensor:
    """The tensor: every tensor on the device is an XLAShardedTensor already. With a shape and a spec it is marked."""
    return XLAShardedTensor(t, mesh_shape, partition_spec)


def unwrap_sharded_tensor(t: Any) -> Any:
    """The tensor: there is nothing around it."""
    return t


def wrap_if_sharded(x: Any) -> Any:
    """The tensor: there is nothing to put around it."""
    return x


@dataclass(frozen=True)
class ShardingSpec(spmd.ShardingSpec):
    """`spmd_core.ShardingSpec` with torch_xla's methods."""

    def can_apply(self, t: Any) -> bool:
        """Whether the tensor's rank is the spec's length."""
        return super().can_apply(t)

    def xla_spec(self, t: torch.Tensor) -> _XLAC.XlaShardingSpec | None:
        """The spec for this tensor, None where it cannot apply."""
        return (
            _XLAC.XlaShardingSpec(t, self.mesh.get_op_sharding(self.partition_spec), self.minibatch)
            if self.can_apply(t)
            else None
        )

    def apply(self, t: torch.Tensor) -> None:
        """Marks a tensor on device `xla`."""
        if t.device.type != "xla":
            raise AssertionError(
                f"the tensor to shard must be on device 'xla'; got one on {t.device}. Move it first: t = t.to('xla')."
            )
        mark_sharding(t, self.mesh, self.partition_spec)


EinsumLinear = einsum_linear.EinsumLinear


def apply_xla_patch_to_nn_linear(module: torch.nn.Module) -> torch.nn.Module:
    """`spmd_core.einsum_linear.apply_einsum_linear`: children that are Linear layers contract their last dim in place of a flattened product."""
    return einsum_linear.apply_einsum_linear(module)


def xla_patched_nn_linear_forward(m: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """A Linear layer's forward as one contraction."""
    result: torch.Tensor = torch.ops.xla.einsum_linear_forward(input, m.weight, m.bias)
    return result


class XLAPatchedLinear:
    """A contraction of the last dim, as `apply(input, weight, bias)`."""

    @staticmethod
    def apply(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The linear layer of the arguments."""
        result: torch.Tensor = torch.ops.xla.einsum_linear_forward(input, weight, bias)
        return result


def apply_backward_optimization_barrier(m: torch.nn.Module) -> torch.nn.Module:
    """`spmd_core.barrier.apply_backward_optimization_barrier`."""
    return barrier.apply_backward_optimization_barrier(m)


def _get_sharding_type(partition_spec: Sequence[Any], num_devices: int) -> ShardingType:
    """The kind of a spec that names every axis of its mesh or none."""
    if num_devices == 1:
        return ShardingType.MAXIMAL
    if all(entry is None for entry in partition_spec):
        return ShardingType.REPLICATED
    return (
        ShardingType.PARTIAL
        if any(entry is None for entry in partition_spec)
        else ShardingType.TILED
    )


# The operators `torch.ops.xla.*` are there with spmd_core.
_operators = custom_ops
