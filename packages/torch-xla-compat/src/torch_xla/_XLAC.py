"""Private functions of torch_xla's C++ module that its documentation and its users rely on."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import spmd_core as spmd
from spmd_core import debugging, dtypes
from spmd_core import metrics as _metrics
from spmd_core.arguments import checked, require_kind
from spmd_core.auto import registration
from spmd_core.errors import PartitionSpecError
from spmd_core.graph import storage
from spmd_core.manual.region import is_local, region_of
from spmd_core.manual.shard_map import disable_manual_sharding, enable_manual_sharding
from spmd_core.runtime import processes
from spmd_core.sharding import partition_spec, sharding, xla_text
from spmd_core.sharding.sharding import ShardingType
from spmd_core.tensor import shards
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from torch_xla._upstream import raising


class OpSharding:
    """XLA's description of a sharding, built from upstream's four arguments.

    `str()` gives the same text as `_get_xla_sharding_spec`.
    """

    def __init__(
        self,
        tile_assignment: Sequence[Any],
        group_assignment: Sequence[Any],
        replication_groups: Sequence[Sequence[int]],
        sharding_type: int,
    ) -> None:
        found = next((one for one in ShardingType if one == sharding_type), None)
        if found is None:
            names = ", ".join(f"{int(one)} ({one.name})" for one in ShardingType)
            raise ValueError(
                f"a sharding's type is one of {names}; got {sharding_type!r}. Use one of them."
            )
        self.type = found
        self.tile_assignment, self.group_assignment, self.replication_groups = (
            tile_assignment,
            group_assignment,
            replication_groups,
        )

    @classmethod
    def of(cls, found: sharding.Sharding) -> "OpSharding":
        """Returns the description of a `spmd_core` sharding."""
        tiles = found.tile_assignment
        if found.type is ShardingType.PARTIAL:
            groups = np.arange(found.num_shards).reshape(found.tiles).tolist()
            return cls(
                tiles.tolist(),
                groups,
                tiles.reshape(found.num_shards, -1).tolist(),
                int(found.type),
            )
        if found.type is ShardingType.REPLICATED:
            return cls(found.mesh.get_logical_mesh().tolist(), [], [], int(found.type))
        return cls(tiles[..., 0].tolist(), [], [], int(found.type))

    def __str__(self) -> str:
        if self.type in (ShardingType.REPLICATED, ShardingType.MAXIMAL):
            return "{replicated}"
        if self.type is ShardingType.MANUAL:
            return "{manual}"
        if self.type is ShardingType.PARTIAL:
            shape, groups = (
                _shape_of(self.group_assignment),
                [sorted(group) for group in self.replication_groups],
            )
            if len(groups) == 1:
                return "{replicated}"
            order = _flat(self.group_assignment)
            ids = [i for group in order for i in groups[group]]
            return (
                f"{{devices=[{','.join(map(str, (*shape, len(groups[0]))))}]"
                f"{','.join(map(str, ids))} last_tile_dim_replicate}}"
            )
        shape = _shape_of(self.tile_assignment)
        return (
            f"{{devices=[{','.join(map(str, shape))}]"
            f"{','.join(map(str, _flat(self.tile_assignment)))}}}"
        )

    def __repr__(self) -> str:
        return f"OpSharding({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpSharding) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


class XlaShardingSpec:
    """A tensor's global shape and sharding, as torch_xla's loader passes them to its C++ code."""

    @checked()
    def __init__(self, tensor: torch.Tensor, op_sharding: Any, minibatch: bool = False) -> None:
        require_kind("tensor", tensor, torch.Tensor, write="a tensor")
        self.global_shape, self.sharding, self.minibatch = (
            tuple(tensor.shape),
            op_sharding,
            minibatch,
        )


def _flat(nested: Any) -> list[int]:
    return (
        [x for part in nested for x in _flat(part)]
        if isinstance(nested, (list, tuple))
        else [int(nested)]
    )


def _shape_of(nested: Any) -> tuple[int, ...]:
    return (len(nested), *_shape_of(nested[0])) if isinstance(nested, (list, tuple)) else ()


def _xla_get_default_device() -> str:
    """The name of the one logical device: `"xla:0"`."""
    return str(spmd.device())


def _own(t: torch.Tensor) -> XLAShardedTensor:
    require_kind("tensor", t, torch.Tensor, write="a tensor on device 'xla'")
    if not isinstance(t, XLAShardedTensor):
        raise RuntimeError(
            f"a tensor on device 'xla' is needed; got one on {t.device}. "
            "Move it first: t = t.to('xla')."
        )
    return t


def _require_list(name: str, tensors: object) -> None:
    require_kind(name, tensors, list, tuple, write="the tensors in a list")


def _get_xla_sharding_spec(t: torch.Tensor) -> str:
    """XLA's text of a tensor's sharding; '' for a tensor without one."""
    tensor = _own(t)
    if is_local(tensor):
        return "{manual}"
    return (
        ""
        if tensor.sharding is None and tensor.sharding_spec == "{replicated}"
        else tensor.sharding_spec
    )


def _get_xla_sharding_type(t: torch.Tensor) -> ShardingType | None:
    """The type of the sharding of `_get_xla_sharding_spec`; None for a tensor without one."""
    tensor = _own(t)
    if is_local(tensor):
        return ShardingType.MANUAL
    return tensor.sharding_type if _get_xla_sharding_spec(tensor) else None


def _get_xla_op_sharding(t: torch.Tensor) -> OpSharding | None:
    """The sharding of `_get_xla_sharding_spec` as an object; None for a tensor without one."""
    tensor = _own(t)
    if tensor.sharding is not None:
        return OpSharding.of(tensor.sharding)
    text = "" if is_local(tensor) else _get_xla_sharding_spec(tensor)
    return OpSharding.of(sharding.from_text(text, tensor.dim())) if text else None


def _get_xla_sharding_specs(tensors: Sequence[torch.Tensor]) -> list[str]:
    _require_list("tensors", tensors)
    return [_get_xla_sharding_spec(t) for t in tensors]


def _pending(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with each computed one replaced by a copy, which is pending."""
    _require_list("tensors", tensors)
    return [
        t if storage.read(_own(t)._handle).data is None else t.detach().clone() for t in tensors
    ]


def _get_xla_tensors_hlo(tensors: Sequence[torch.Tensor]) -> str:
    """HLO, before partitioning, of the program that would compute the tensors.

    The shardings in it list every device id, as those of `_get_xla_sharding_spec`. For a tensor
    that is computed, the program copies it.
    """
    text = debugging.hlo(*_pending(tensors), stage="before")
    return _SHORT_IDS.sub(lambda found: _long_text(found[0]), text)


# A sharding whose ids are the elements of a reshaped range.
_SHORT_IDS = re.compile(
    r"\{devices=\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?(?: last_tile_dim_replicate)?\}"
)


def _long_text(text: str) -> str:
    blocks, _ = xla_text.blocks(text, num_devices=1)
    ids = [device_id for holders in blocks.reshape(-1) for device_id in holders]
    holders = len(ids) // blocks.size
    sizes = (*blocks.shape, holders) if holders > 1 else blocks.shape
    return xla_text.tiled(sizes, ids, is_partial=holders > 1)


def _get_xla_tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    """The recorded operations that would compute the tensors, one per line.

    For a tensor that is computed, the program copies it.
    """
    return debugging.operations(*_pending(tensors))


def _get_xla_tensor_debug_info(t: torch.Tensor) -> str:
    """Text with a tensor's device, shape, sharding, and state of its value.

    The value is on the host, on the devices, or pending.
    """
    tensor = _own(t)
    value = storage.read(tensor._handle)
    on_host = value.data is not None and value.placement.jax_sharding is None
    on_device = value.data is not None and not on_host
    device, text = (
        "SPMD:0" if spmd.is_spmd() else str(tensor.device),
        _get_xla_sharding_spec(tensor),
    )
    facts = {
        "TensorID": tensor.data_ptr(),
        "Device": device,
        "Shape": f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
        "ShardingSpec": text or None,
        "IR": None if on_host else "xla::device_data" if on_device else repr(value),
        "XLAData": None,
        "Tensor on host": f"with size {list(tensor.shape)}" if on_host else None,
    }
    if on_device:
        data = {
            "Data Device": device,
            "Data Shape": _shape_text(tensor),
            "OpSharding": text or "{replicated}",
            "NumShards": len(value.placement.device_sharding.device_set),
        }
        facts["XLAData"] = "XLAShardedData: " + "".join(
            f"\n  {name}: {fact}" for name, fact in data.items()
        )
    return "\n".join(f"{name}: {fact}" for name, fact in facts.items())


def _shape_text(t: torch.Tensor) -> str:
    """XLA's text of a shape, such as `f32[4,2]{1,0}`."""
    name = np.dtype(dtypes.to_jax(t.dtype)).name
    for ours, short in (
        ("bool", "pred"),
        ("bfloat", "bf"),
        ("float8_", "f8"),
        ("float", "f"),
        ("uint", "u"),
        ("int", "s"),
        ("complex", "c"),
    ):
        if name.startswith(ours):
            name = short + name.removeprefix(ours)
            break
    layout = "{" + ",".join(map(str, reversed(range(t.dim())))) + "}" if t.dim() else ""
    return f"{name}[{','.join(map(str, t.shape))}]{layout}"


def _get_graph_hash(tensors: Sequence[torch.Tensor]) -> bytes:
    """Hash of the program that would compute the tensors.

    Programs with equal hashes are compiled once.
    """
    return debugging.graph_hash(*_pending(tensors))


def _xla_get_tensor_id(t: torch.Tensor) -> int:
    """A number equal for tensors with the same storage and storage offset."""
    return _own(t).data_ptr()


def _xla_get_auto_sharding() -> bool:
    """Whether shardings are found automatically."""
    return registration.is_automatic()


def _xla_metrics_report() -> str:
    """A table of all counters."""
    return _metrics.report()


def _global_tensor_from_cpu_shards(
    blocks: Sequence[torch.Tensor], op_sharding: Any, global_shape: Sequence[int] | None = None
) -> XLAShardedTensor:
    """Builds a sharded tensor from its blocks on the host.

    Args:
        blocks: one block for each device, in the order of the local devices, padding included.
        op_sharding: the sharding of the result.
        global_shape: shape of the result; None means that the blocks have no padding.

    Raises:
        RuntimeError: not one block for each device, blocks of different shapes, or blocks that do
            not make a tensor of `global_shape`.
    """
    devices = spmd.global_runtime_device_count()
    _require_list("blocks", blocks)
    for block in blocks:
        require_kind("a block", block, torch.Tensor, write="a tensor")
    if len(blocks) != devices:
        raise RuntimeError(
            f"there must be one shard for each device; got {len(blocks)} for {devices} devices. "
            "Pass one for each."
        )
    if any(block.shape != blocks[0].shape for block in blocks):
        raise RuntimeError(
            "shards have one shape, padding included; got "
            f"{sorted({tuple(block.shape) for block in blocks})}. Pad the smaller ones."
        )
    with raising(RuntimeError, PartitionSpecError):
        found = sharding.from_text(str(op_sharding), blocks[0].dim())
    shape = (
        tuple(n * tiles for n, tiles in zip(blocks[0].shape, found.tiles))
        if global_shape is None
        else tuple(global_shape)
    )
    if len(shape) != found.ndim or found.shard_shape(shape) != blocks[0].shape:
        raise RuntimeError(
            "the shards must make a tensor of the global shape; got shards of shape "
            f"{tuple(blocks[0].shape)} under {found.text} for {shape}. "
            "Leave global_shape out where nothing is padded."
        )
    if found.is_replicated:
        if any(not torch.equal(block, blocks[0]) for block in blocks):
            raise RuntimeError(
                "every device holds the whole of a replicated tensor; got shards that differ. "
                "Give the same one for each device."
            )
        return spmd.mark_sharding(blocks[0].to("xla"), spmd.Mesh(range(devices), (devices,)), ())
    t = spmd.mark_sharding(
        torch.empty(shape, dtype=blocks[0].dtype, device="xla"), found.mesh, found.dims
    )
    names = [f"{d['name']}" for d in spmd.distributed.device_attributes()]
    indices, replicas = found.indices(shape), found.replica_ids()
    where = {int(device): i for i, device in enumerate(found.mesh.device_ids)}
    return t.load_local_shards_(
        [
            shards.XLAShard(block, list(indices[where[i]]), names[i], replicas[where[i]])
            for i, block in enumerate(blocks)
        ]
    )


def _mark_manual_sharding(t: torch.Tensor) -> XLAShardedTensor:
    """Returns the tensor as a device-local one, inside a manual region.

    A tensor that is already local, or is computed from local tensors, is returned as it is. Any
    other tensor enters a region over the global mesh, or over all devices without one; there each
    device holds the whole tensor as its own local value. The argument is not changed: use the
    returned tensor.

    Raises:
        RuntimeError: the tensor is data rather than the result of an operation; each device would
            hold its own copy of it.
    """
    tensor = _own(t)
    if is_local(tensor):
        return tensor
    if storage.read(tensor._handle).data is not None:
        raise RuntimeError(
            "Marking any data tensors as manual is not supported: only what is computed can be; "
            f"got data of shape {tuple(t.shape)}. Call enable_manual_sharding on it."
        )
    return enable_manual_sharding(
        tensor, (None,) * tensor.dim(), mesh=spmd.get_global_mesh() or processes.get_1d_mesh()
    )


def _spmd_full_to_shard_shape(t: torch.Tensor) -> torch.Tensor:
    """Enters a manual region: returns each device's own block of a sharded tensor."""
    tensor = _own(t)
    if tensor.sharding is None:
        raise RuntimeError(
            "Input tensor is not sharded; a block of it is not defined. "
            "Call mark_sharding on it first."
        )
    return tensor.to_local()


def _spmd_shard_to_full_shape(
    t: torch.Tensor, op_sharding: Any, full_shape: Sequence[int], dtype: Any = None
) -> torch.Tensor:
    """Leaves a manual region: joins the blocks of `_spmd_full_to_shard_shape` into one tensor."""
    region = region_of(_own(t))
    if region is None:
        raise RuntimeError(
            "Input tensor is not manual sharded; only blocks make a whole. "
            "Call enable_manual_sharding first."
        )
    spec = _spec_over(region.mesh, str(op_sharding), t.dim())
    return spmd.mark_sharding(
        disable_manual_sharding(t, spec, full_shape, mesh=region.mesh), region.mesh, spec
    )


def _spec_over(mesh: spmd.Mesh, text: str, ndim: int) -> partition_spec.PartitionSpecLike:
    """The partition spec whose sharding over `mesh` has this text. RuntimeError without one."""
    axes = range(len(mesh.mesh_shape))
    entries = [order for n in range(len(axes) + 1) for order in itertools.permutations(axes, n)]
    for spec in itertools.product(entries, repeat=ndim):
        used = [axis for entry in spec for axis in entry]
        if len(used) == len(set(used)) and sharding.Sharding.of(mesh, spec, ndim).text == text:
            return spec
    raise RuntimeError(
        f"blocks make a whole over the mesh of their region; got {text} for {mesh!r}. "
        "Pass mesh.get_op_sharding(partition_spec)."
    )


def _set_allow_execution(allow: bool) -> None:
    """Allows or forbids execution of programs; while forbidden, what would execute one raises."""
    spmd.debugging.allow_execution(allow)


def _get_xla_tensor_dimension_size(t: torch.Tensor, dim: int) -> torch.Tensor:
    """The size of a dim as an int32 scalar on the device; a constant, because sizes are static."""
    return torch.tensor(_own(t).shape[dim], dtype=torch.int32, device="xla")


def _get_number_of_elements(t: torch.Tensor) -> int:
    return math.prod(t.shape)


def _xla_sync_multi(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[str] = (),
    wait: bool = False,
    sync_xla_data: bool = True,
) -> None:
    spmd.sync(wait=wait)


def _xla_step_marker(
    device: str = "", devices: Sequence[str] = (), wait: bool = False, reset_scope: bool = True
) -> None:
    spmd.sync(wait=wait)


def _set_buffer_donation(t: torch.Tensor, should_donate: bool) -> bool:
    """Records whether the next program may take over the tensor's buffer, without effect.

    Programs here take over every buffer that no tensor holds any more, and no other. The record is
    dropped when the tensor gets new data. Returns whether the tensor has data, which a pending one
    does not.
    """
    handle = _own(t)._handle
    if storage.read(handle).data is None:
        return False
    t.__dict__["_buffer_donation"] = (handle.storage.version, should_donate)
    return True


def _get_buffer_donation(t: torch.Tensor) -> bool:
    """The record of `_set_buffer_donation` for the tensor's present data; else False."""
    version, noted = _own(t).__dict__.get("_buffer_donation", (None, False))
    return bool(noted and version == _own(t)._handle.storage.version)


# Whether programs should take over only the buffers that `_set_buffer_donation` recorded.
# Guarded by: the GIL. Cleared by: the end of `alias_with_buffer_donor_config`.
_donor_config = {"enabled": False}


def _xla_set_enable_alias_with_buffer_donor_config(should_alias: bool) -> None:
    """Records the switch, which has no effect: see `_set_buffer_donation`."""
    _donor_config["enabled"] = bool(should_alias)


def _xla_get_enable_alias_with_buffer_donor_config() -> bool:
    """The last value of `_xla_set_enable_alias_with_buffer_donor_config`; False at the start."""
    return _donor_config["enabled"]
