"""`XLAShard`: one device's part of a tensor, in host memory; reads and writes the local shards.

`fill` takes blocks one by one, so that weights are loaded shard by shard.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import EllipsisType

import numpy as np
import torch

from spmd_core import dtypes
from spmd_core.arguments import require_kind
from spmd_core.errors import ShardError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Handle, Storage
from spmd_core.graph.values import Spec, Value
from spmd_core.program import execution, leaves
from spmd_core.program.program_graph import padded_shape
from spmd_core.runtime import buffers, devices, in_flight
from spmd_core.sharding.sharding import Sharding


@dataclass
class XLAShard:
    """One device's part of a tensor: a CPU copy.

    Attributes:
        data: the block as stored, padding included, on the CPU.
        indices: for each dim, the slice of the global tensor that the block holds (clamped to the
            tensor's shape, step 1); `...` if the block is the whole tensor. A tensor on the host is
            indexed with `tuple(indices)`.
        shard_device: the device's name, such as `"CPU:3"`.
        replica_id: the device's number among the devices that hold the same block.
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    data: torch.Tensor
    indices: list[slice] | EllipsisType
    shard_device: str
    replica_id: int

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The block without padding, a view of `data`."""
        if isinstance(self.indices, EllipsisType):
            return self.data
        return self.data[tuple(slice(s.stop - s.start) for s in self.indices)]

    @unpadded_data.setter
    def unpadded_data(self, value: torch.Tensor) -> None:
        self.unpadded_data.copy_(value)


def sharded_storage(handle: Handle, what: str) -> Storage:
    """The storage of a handle that has a sharding of its own.

    Args:
        handle: the handle.
        what: the caller's name, for the error message.

    Raises:
        ShardError: the handle has no sharding, or is a view.
    """
    if handle.sharding is None or not isinstance(handle, Storage):
        raise ShardError(
            f"{what} needs a tensor with a sharding; "
            f"this one, of shape {handle.spec.shape}, has none. "
            "Call spmd.mark_sharding(tensor, mesh, partition_spec) first, "
            "on the tensor itself rather than a view of it."
        )
    return handle


def read_local(storage: Storage) -> list[XLAShard]:
    """The blocks on this process's devices, by device id. Cuts, uploads and waits."""
    sharding = storage.sharding
    assert sharding is not None
    array = execution.place(storage)
    in_flight.programs.wait_all()
    execution.raise_if_wrong(storage.value)
    indices, replicas, positions = (
        sharding.indices(storage.spec.shape),
        sharding.replica_ids(),
        _positions(sharding),
    )
    found = []
    for shard in buffers.addressable(array):
        device = devices.position_of_device(shard.device)
        where = positions[device]
        data = dtypes.tensor_view(np.array(shard.data, copy=True, order="C"))
        index: list[slice] | EllipsisType = (
            ... if sharding.is_replicated else [slice(s.start, s.stop, 1) for s in indices[where]]
        )
        found.append(XLAShard(data, index, devices.device_name(device), replicas[where]))
    return found


def write_local(storage: Storage, shards: Sequence[XLAShard]) -> None:
    """Replaces the blocks on this process's devices. Does not wait.

    Raises:
        TypeError, ShardError: see `XLAShardedTensor.load_local_shards_`.
    """
    require_kind("new_shards", shards, list, tuple, write="the list that local_shards gives")
    for shard in shards:
        require_kind("a shard", shard, XLAShard, write="one of the list that local_shards gives")
    sharding = storage.sharding
    assert sharding is not None
    if sharding.is_replicated:
        raise ShardError(
            "load_local_shards_ writes the blocks of a tensor that is split; "
            "this one is replicated, so that every device holds all of it. "
            "Use copy_ with the whole tensor."
        )
    local = devices.local_device_ids(sharding.mesh)
    blocks = _by_device(shards, local)
    shape, dtype = sharding.shard_shape(storage.spec.shape), storage.spec.dtype
    for device, shard in blocks.items():
        if tuple(shard.data.shape) != shape or shard.data.dtype != dtype:
            raise ShardError(
                "a shard's data is the block as stored, padding included, "
                f"of shape {shape} and dtype {dtype}; got shape "
                f"{tuple(shard.data.shape)} and dtype {shard.data.dtype} for "
                f"{devices.device_name(device)}. Write to the unpadded_data of the shards "
                "that local_shards gives."
            )
    _refuse_different_copies(sharding, storage.spec.shape, blocks)
    placement = leaves.marked_placement(sharding)
    array = buffers.from_blocks(
        {device: shard.data for device, shard in blocks.items()},
        placement.device_sharding,
        sharding.padded_shape(storage.spec.shape),
    )
    with lock:
        leaves.replace(storage, array, placement)


# A block in host memory that is to be filled: where it lies in the tensor, and the memory.
Part = tuple[tuple[slice, ...], torch.Tensor]
# A start and a stop for each dim of a tensor, with padding.
_Bounds = tuple[tuple[int, int], ...]


def fill(storage: Storage, read: Callable[[tuple[slice, ...], torch.Tensor], None]) -> None:
    """Replaces a storage's value, computed or pending, by blocks that come one by one.

    The storage keeps its mark; without one, each device gets the whole. A block that several of
    this process's devices hold is read once. The host holds one block at a time, so this waits for
    each to be on its devices.

    Args:
        storage: of any shape and dtype.
        read: called with a slice for each dim, with bounds, and a CPU tensor of that shape and of
            the storage's dtype, which it fills.
    """

    def read_each(parts: Sequence[Part]) -> None:
        for index, block in parts:
            read(index, block)

    value = filled(storage, read_each, host_bytes=0)
    with lock:
        storage.write(value)


def filled(storage: Storage, read: Callable[[Sequence[Part]], None], *, host_bytes: int) -> Value:
    """A value for a storage, which stays as it is, from blocks that come some at a time.

    Args:
        storage: see `fill`.
        read: called with blocks to fill, each as `fill` has it; several times.
        host_bytes: the host holds blocks of as many bytes, or one. Those of emulated devices stay
            there, so all of them come at once.
    """
    spec, placement = storage.spec, leaves.device_placement(storage.sharding)
    stored_shape = padded_shape(spec, placement.sharding)
    blocks = buffers.blocks_of(placement.device_sharding, stored_shape)
    each = max((math.prod(b - a for a, b in bounds) for bounds in blocks), default=1)
    if host_bytes > 0 and devices.platform() == "cpu" and blocks:
        array = buffers.put_together(
            _read(read, blocks, spec), placement.device_sharding, stored_shape
        )
    else:
        arrays, items = [], [*blocks]
        num = max(1, host_bytes // max(1, each * spec.dtype.itemsize))
        for start in range(0, len(items), num):
            for bounds, block in _read(read, items[start : start + num], spec).items():
                arrays += buffers.put(block, blocks[bounds])
        array = buffers.joined(arrays, placement.device_sharding, stored_shape, spec.dtype)
    with lock:
        return Value.leaf(spec, array, placement, None)


def _read(
    read: Callable[[Sequence[Part]], None], blocks: Iterable[_Bounds], spec: Spec
) -> dict[_Bounds, torch.Tensor]:
    """Blocks in host memory, with what was read and zeros as padding."""
    made, parts = {}, []
    for bounds in blocks:
        inside = _inside(bounds, spec.shape)
        block = buffers.host_block([b - a for a, b in bounds], spec.dtype)
        parts.append((inside, block[tuple(slice(s.stop - s.start) for s in inside)]))
        made[bounds] = block
    read(parts)
    return made


def local_blocks(storage: Storage) -> list[tuple[slice, ...]]:
    """The blocks of a storage that this process's devices hold, which `fill` will ask for."""
    spec, placement = storage.spec, leaves.device_placement(storage.sharding)
    stored_shape = padded_shape(spec, placement.sharding)
    blocks = buffers.blocks_of(placement.device_sharding, stored_shape)
    return [_inside(bounds, spec.shape) for bounds in blocks]


def _inside(bounds: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[slice, ...]:
    """A block without its padding."""
    return tuple(slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, shape))


def _positions(sharding: Sharding) -> dict[int, int]:
    """The position in the mesh of each device."""
    return {device: i for i, device in enumerate(sharding.mesh.ids)}


def _by_device(shards: Sequence[XLAShard], local: tuple[int, ...]) -> dict[int, XLAShard]:
    names = {devices.device_name(device): device for device in local}
    given = [shard.shard_device for shard in shards]
    if sorted(given) != sorted(names):
        raise ShardError(
            "load_local_shards_ needs one shard for each local device of the tensor's mesh, "
            f"{', '.join(names)}; got shards for "
            f"{', '.join(map(str, given)) or 'none'}. Pass the list that local_shards gives."
        )
    return {names[shard.shard_device]: shard for shard in shards}


def _refuse_different_copies(
    sharding: Sharding, shape: tuple[int, ...], blocks: dict[int, XLAShard]
) -> None:
    """Raises ShardError if devices that hold the same block would get different data.

    A program reads any of the copies, so they must stay equal.
    """
    indices, positions = sharding.indices(shape), _positions(sharding)
    first: dict[tuple[tuple[int, int], ...], int] = {}
    for device, shard in blocks.items():
        index = indices[positions[device]]
        other = first.setdefault(tuple((s.start, s.stop) for s in index), device)
        inside = tuple(slice(s.stop - s.start) for s in index)
        mine, theirs = shard.data[inside].detach(), blocks[other].data[inside].detach()
        # Compares bytes, so that a NaN equals itself.
        if (
            other != device
            and dtypes.numpy_view(mine).tobytes() != dtypes.numpy_view(theirs).tobytes()
        ):
            raise ShardError(
                "devices that hold copies of one block must get equal data; "
                f"got different data for {devices.device_name(other)} and "
                f"{devices.device_name(device)}, which both hold {list(index)}. "
                "Write the same block to both."
            )
