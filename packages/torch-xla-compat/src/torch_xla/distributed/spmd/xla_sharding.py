"""Meshes, sharding and manual regions with torch_xla's names and exceptions, over `spmd_core`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import spmd_core as spmd
from spmd_core import metrics
from spmd_core.arguments import require_kind
from spmd_core.errors import MeshError, PartitionSpecError
from spmd_core.manual import region, shard_map
from spmd_core.marks import custom_ops, marking
from spmd_core.modules import barrier, einsum_linear
from spmd_core.sharding.mesh import check_devices
from spmd_core.sharding.partition_spec import PartitionSpecLike as PartitionSpec
from spmd_core.sharding.partition_spec import validate_spec
from spmd_core.sharding.sharding import Sharding
from spmd_core.sharding.sharding import ShardingType as ShardingType
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from torch_xla import _XLAC, runtime
from torch_xla._upstream import raising

_SPEC = "one entry for each dim, such as ('data', None)"


class Mesh(spmd.Mesh):
    """`spmd_core.Mesh` that raises AssertionError for invalid arguments."""

    def __init__(
        self,
        device_ids: np.ndarray | Sequence[int],
        mesh_shape: tuple[int, ...],
        axis_names: tuple[str, ...] | None = None,
    ) -> None:
        try:
            super().__init__(device_ids, mesh_shape, axis_names)
            check_devices(self, runtime.global_runtime_device_count())
        except MeshError as error:
            raise AssertionError(
                _in_upstreams_words(str(error), device_ids, mesh_shape, axis_names)
            ) from error

    def get_axis_name_idx(self, name: str) -> int | None:  # type: ignore[override]
        """Index of an axis; None for an unknown name. TypeError for a mesh without axis names."""
        if self.axis_names is None:
            raise TypeError(
                "an axis has a name only in a mesh with axis_names; this mesh has none. "
                "Pass axis_names to Mesh."
            )
        return self.axis_names.index(name) if name in self.axis_names else None

    def _validate_translated_partition_spec(self, partition_spec: Sequence[Any]) -> None:
        _check_spec(self, tuple(partition_spec))

    def _get_op_sharding_args(
        self, partition_spec: PartitionSpec
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Sequence[int]], int]:
        """Returns `_XLAC.OpSharding`'s arguments.

        They are tile_assignment, group_assignment, replication_groups and type.
        """
        found = self.get_op_sharding(partition_spec)
        return (
            found.tile_assignment,
            found.group_assignment,
            found.replication_groups,
            int(found.type),
        )

    def get_op_sharding(self, partition_spec: PartitionSpec) -> _XLAC.OpSharding:
        """XLA's description of the sharding that the spec gives over this mesh.

        It is created once for each spec; the metrics count it as `CreateOpSharding`.

        Raises:
            AssertionError: an axis index that the mesh lacks, an axis that is used twice, or nested
                tuples.
            ValueError: an axis name that the mesh lacks, or an entry of another type.
            TypeError: the spec is no tuple.
        """
        require_kind("partition_spec", partition_spec, tuple, list, write=_SPEC)
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
        """Parses the text that `str(mesh)` gives. ValueError for any other text."""
        mesh = spmd.Mesh.from_str(mesh_str)
        return Mesh(mesh.device_ids, mesh.mesh_shape, mesh.axis_names)


def _in_upstreams_words(text: str, device_ids: Any, mesh_shape: Any, axis_names: Any) -> str:
    """The message of a MeshError; a rule that upstream also has is stated in upstream's words.

    Users' tests match upstream's messages by regular expression.
    """
    rules: dict[str, Callable[[], str]] = {
        "axis_names must have one name for each axis of mesh_shape": lambda: (
            f"Number of axis names {len(axis_names)} must match mesh dimensions {len(mesh_shape)}"
        ),
        "axis names must be unique": lambda: "Axis names must be unique",
        "the product of mesh_shape must be the number of device_ids": lambda: (
            f"Number of device IDs ({np.size(device_ids)}) must match mesh size "
            f"({math.prod(mesh_shape)})"
        ),
        "device_ids must be unique": lambda: "Device IDs must be unique",
        "every device id of a mesh must be below the number of devices": lambda: (
            "Device IDs must be less than mesh size, and in a mesh of some devices less than the "
            "number of all"
        ),
    }
    for ours, upstreams in rules.items():
        if text.startswith(ours):
            return upstreams() + text.removeprefix(ours)
    return text


def _check_spec(mesh: spmd.Mesh, spec: PartitionSpec) -> None:
    """Validates a partition spec with torch_xla's exception types.

    Raises:
        ValueError: an axis name that the mesh lacks, or an entry of another type.
        AssertionError: any other invalid spec.
    """
    try:
        validate_spec(mesh, spec)
    except PartitionSpecError as error:
        axes = [
            axis
            for entry in spec
            for axis in (entry if isinstance(entry, (tuple, list)) else (entry,))
        ]
        text = str(error)
        for axis in axes:
            if isinstance(axis, str) and axis not in (mesh.axis_names or ()):
                raise ValueError(
                    f"Axis name {axis} is not defined in the given mesh: {text}"
                ) from error
            if not isinstance(axis, (int, np.integer, str, tuple, list, type(None))) or isinstance(
                axis, bool
            ):
                raise ValueError(
                    f"Spec type {type(axis)} is not supported in partition spec: {text}"
                ) from error
        if text.startswith("the index of a mesh axis"):
            text = f"partition_spec {spec} contains out of bound index into mesh_shape: {text}"
        elif text.startswith("a mesh axis may shard a tensor once"):
            text = (
                "Each device mesh dimension should appear at most once in partition_spec "
                f"{spec}: {text}"
            )
        raise AssertionError(text) from error


@dataclass(frozen=True)
class _Device:
    """A device with the attributes that jax's mesh utilities read."""

    id: int
    platform: str
    device_kind: str
    coords: Sequence[int] | None
    core_on_chip: int
    slice_index: int | None
    process_index: int

    @classmethod
    def of(cls, number: int, row: dict[str, Any]) -> "_Device":
        """Creates a device from a row of `xr.global_runtime_device_attributes()`.

        Missing attributes get the value that they have on a device without them.
        """
        platform = row["name"].split(":")[0].lower()
        facts = (
            row.get("coords"),
            row.get("core_on_chip", 0),
            row.get("slice_index"),
            row.get("process_index", 0),
        )
        return cls(number, platform, row.get("kind", ""), *facts)


class HybridMesh(spmd.HybridMesh, Mesh):
    """`spmd_core.HybridMesh` that takes positional arguments, and raises ValueError."""

    def __init__(
        self,
        ici_mesh_shape: tuple[int, ...],
        dcn_mesh_shape: tuple[int, ...] | None = None,
        axis_names: tuple[str, ...] | None = None,
        *,
        num_slices: int | None = None,
    ) -> None:
        try:
            super().__init__(ici_mesh_shape, dcn_mesh_shape, axis_names, num_slices=num_slices)
        except MeshError as error:
            text = str(error)
            if "there is a single slice" in text:
                text = f"Invalid dcn_mesh_shape for single slice mesh: {text}"
            elif text.startswith("dcn_mesh_shape must say which axes go between slices"):
                text = f"Provide dcn_mesh_shape to create a mesh for multislice: {text}"
            raise MeshError(text) from error

    @staticmethod
    def _devices() -> Sequence[Any]:
        """Devices by `xr.global_runtime_device_attributes()`, ordered by the number in the name."""
        rows = sorted(
            runtime.global_runtime_device_attributes(),
            key=lambda row: int(row["name"].split(":")[1]),
        )
        return [_Device.of(i, row) for i, row in enumerate(rows)]


def set_global_mesh(mesh: spmd.Mesh | None) -> None:
    """Makes `mesh` the default mesh of calls without one; None removes it."""
    spmd.set_global_mesh(mesh)


def get_global_mesh() -> Any:
    """The global mesh, or None."""
    return spmd.get_global_mesh()


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """Returns a mesh with all devices along one axis."""
    count = spmd.global_runtime_device_count()
    return Mesh(range(count), (count,), None if axis_name is None else (axis_name,))


def _check_rank(t: Any, partition_spec: Sequence[Any]) -> None:
    if (
        isinstance(t, torch.Tensor)
        and isinstance(partition_spec, (tuple, list))
        and len(partition_spec) != t.dim()
    ):
        raise AssertionError(
            f"Partition spec length ({len(partition_spec)}) should be equal to the input rank "
            f"({t.dim()}); got {tuple(partition_spec)} for shape "
            f"{tuple(t.shape)}. Write one entry for each dim."
        )


def _describe(mesh: Any, partition_spec: Any) -> None:
    """Validates the spec as torch_xla does, by creating its OpSharding once per mesh and spec."""
    if isinstance(mesh, Mesh) and isinstance(partition_spec, (tuple, list)):
        mesh.get_op_sharding(tuple(partition_spec))


def _require_spmd() -> None:
    if not runtime.is_spmd():
        raise RuntimeError(
            "Please enable SPMD via `torch_xla.runtime.use_spmd()`: marks need SPMD mode, which "
            "is off. Call it before."
        )


def mark_sharding(
    t: torch.Tensor, mesh: spmd.Mesh, partition_spec: PartitionSpec
) -> XLAShardedTensor:
    """`spmd_core.mark_sharding` for a tensor that has no other sharding yet. Does not wait.

    Starts the upload of data on the host.

    Raises:
        AssertionError: not one entry for each dim, or `Mesh.get_op_sharding` raises it.
        ValueError: `Mesh.get_op_sharding` raises it.
        RuntimeError: SPMD mode is off, or the tensor is data with another sharding.
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
                "Existing annotation must be cleared first: the tensor has "
                f"{t.sharding.text} and was to get {wanted.text}. "
                "Call clear_sharding(t) before."
            )
    return marking.start_upload(spmd.mark_sharding(t, mesh, partition_spec))


def annotate_custom_sharding(
    t: torch.Tensor, mesh: spmd.Mesh, partition_spec: PartitionSpec
) -> XLAShardedTensor:
    """`spmd_core.constrain`: constrains the current value, also of a tensor with a sharding."""
    _require_spmd()
    _check_rank(t, partition_spec)
    _describe(mesh, partition_spec)
    return spmd.constrain(t, mesh, partition_spec)


def mark_sharding_with_gradients(
    t: torch.Tensor, mesh: spmd.Mesh, partition_spec: PartitionSpec
) -> torch.Tensor:
    """`spmd_core.mark_sharding` with `inplace=False`: marks a new tensor and its gradient."""
    _require_spmd()
    _check_rank(t, partition_spec)
    _describe(mesh, partition_spec)
    return spmd.mark_sharding(t, mesh, partition_spec, inplace=False)


class MarkShardingFunction:
    """`mark_sharding_with_gradients`, called as torch_xla's autograd function of this name.

    It calls the operator `torch.ops.xla.aot_mark_sharding`, which torch's tracers record.
    """

    @staticmethod
    def apply(t: torch.Tensor, mesh: spmd.Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
        """Returns a new tensor with the sharding; its gradient gets the same one."""
        require_kind("t", t, torch.Tensor, write="a tensor")
        require_kind("mesh", mesh, spmd.Mesh, write="Mesh(device_ids, mesh_shape, axis_names)")
        require_kind("partition_spec", partition_spec, tuple, list, write=_SPEC)
        result: torch.Tensor = torch.ops.xla.aot_mark_sharding(
            t, str(mesh), str(tuple(partition_spec))
        )
        return result


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Removes a tensor's sharding; returns the tensor."""
    return spmd.clear_sharding(t)


def _region_mesh(mesh: spmd.Mesh | None) -> spmd.Mesh:
    chosen = get_global_mesh() if mesh is None else mesh
    if chosen is None:
        raise AttributeError(
            "a manual region needs a mesh; got None, and no global mesh is set. "
            "Pass mesh=, or call set_global_mesh(mesh)."
        )
    return chosen


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: spmd.Mesh | None = None
) -> XLAShardedTensor:
    """Splits a tensor into the blocks of a manual region, by default over the global mesh."""
    return shard_map.enable_manual_sharding(t, partition_spec, mesh=_region_mesh(mesh))


def disable_manual_sharding(
    t: torch.Tensor,
    partition_spec: PartitionSpec,
    full_shape: Sequence[int],
    *,
    mesh: spmd.Mesh | None = None,
) -> XLAShardedTensor:
    """Joins the blocks of a manual region into a tensor, by default over the global mesh.

    Raises:
        RuntimeError: the tensor is not local to a manual region.
    """
    if isinstance(t, XLAShardedTensor) and not region.is_local(t):
        raise RuntimeError(
            "Input tensor is not manual sharded; only blocks can be joined into a tensor. "
            "Call enable_manual_sharding first."
        )
    return shard_map.disable_manual_sharding(t, partition_spec, full_shape, mesh=_region_mesh(mesh))


_mark_manual_sharding = _XLAC._mark_manual_sharding


def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """`spmd_core.shard_as`. AssertionError if the structures differ."""
    with raising(AssertionError, ValueError):
        return spmd.shard_as(a, b)


def wrap_as_sharded_tensor(
    t: torch.Tensor,
    mesh_shape: tuple[int, ...] | None = None,
    partition_spec: PartitionSpec | None = None,
) -> XLAShardedTensor:
    """Returns the tensor: every tensor on the device is already an XLAShardedTensor.

    With a mesh shape and a partition spec, shards it.
    """
    return XLAShardedTensor(t, mesh_shape, partition_spec)


def unwrap_sharded_tensor(t: Any) -> Any:
    """Returns its argument: tensors have no wrapper here."""
    return t


def wrap_if_sharded(x: Any) -> Any:
    """Returns its argument: sharded tensors need no wrapper here."""
    return x


@dataclass(frozen=True)
class ShardingSpec(spmd.ShardingSpec):
    """`spmd_core.ShardingSpec` with torch_xla's methods and errors."""

    def __post_init__(self) -> None:
        if isinstance(self.partition_spec, (tuple, list)):
            _check_spec(self.mesh, tuple(self.partition_spec))
        super().__post_init__()

    def can_apply(self, t: Any) -> bool:
        """Whether the tensor's rank equals the length of the spec."""
        return super().can_apply(t)

    def xla_spec(self, t: torch.Tensor) -> _XLAC.XlaShardingSpec | None:
        """XLA's form of the spec for this tensor; None if it cannot apply."""
        return (
            _XLAC.XlaShardingSpec(t, self.mesh.get_op_sharding(self.partition_spec), self.minibatch)
            if self.can_apply(t)
            else None
        )

    def apply(self, t: torch.Tensor) -> None:
        """Shards a tensor on device `xla` with `mark_sharding`."""
        require_kind("t", t, torch.Tensor, write="a tensor")
        if t.device.type != "xla":
            raise AssertionError(
                f"the tensor to shard must be on device 'xla'; got one on {t.device}. "
                "Move it first: t = t.to('xla')."
            )
        mark_sharding(t, self.mesh, self.partition_spec)


EinsumLinear = einsum_linear.EinsumLinear


def apply_xla_patch_to_nn_linear(module: torch.nn.Module) -> torch.nn.Module:
    """Replaces the module's Linear layers by `EinsumLinear`, which keeps leading dims apart.

    torch's own Linear flattens the leading dims of its input.
    """
    require_kind("module", module, torch.nn.Module, write="a torch.nn.Module")
    return einsum_linear.apply_einsum_linear(module)


def xla_patched_nn_linear_forward(m: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """A Linear layer's forward as one contraction of the last dim."""
    require_kind("m", m, torch.nn.Linear, write="a torch.nn.Linear")
    require_kind("input", input, torch.Tensor, write="a tensor")
    result: torch.Tensor = torch.ops.xla.einsum_linear_forward(input, m.weight, m.bias)
    return result


class XLAPatchedLinear:
    """A linear layer as one contraction, called as torch_xla's autograd function of this name."""

    @staticmethod
    def apply(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Contracts the last dim of `input` with `weight` and adds `bias`."""
        require_kind("input", input, torch.Tensor, write="a tensor")
        require_kind("weight", weight, torch.Tensor, write="a tensor")
        result: torch.Tensor = torch.ops.xla.einsum_linear_forward(input, weight, bias)
        return result


def apply_backward_optimization_barrier(m: torch.nn.Module) -> torch.nn.Module:
    """Inserts a barrier after the gradients of `m` in each backward pass; returns `m`."""
    require_kind("m", m, torch.nn.Module, write="a torch.nn.Module")
    return barrier.apply_backward_optimization_barrier(m)


def _get_sharding_type(partition_spec: Sequence[Any], num_devices: int) -> ShardingType:
    """The sharding type of a spec that uses every axis of its mesh, or none."""
    if num_devices == 1:
        return ShardingType.MAXIMAL
    if all(entry is None for entry in partition_spec):
        return ShardingType.REPLICATED
    return (
        ShardingType.PARTIAL
        if any(entry is None for entry in partition_spec)
        else ShardingType.TILED
    )


# Importing this module of spmd_core registers the operators `torch.ops.xla.*`.
_operators = custom_ops
