"""Copies of a state in host memory, which are written while the devices go on.

The next step takes over the buffers that are saved, so a save copies this process's own blocks
before it returns. (Buffers that a save would protect until they are written double the memory of
parameters and moments on the devices.) On a CPU, the copies lie in memory that the next save uses
again; elsewhere, in what jax allocates for a transfer.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
import torch

from spmd_core import dtypes
from spmd_core.checkpoint import blocks
from spmd_core.checkpoint.entries import Entry
from spmd_core.checkpoint.threads import Threads
from spmd_core.graph.recorders import lock
from spmd_core.graph.stacks import Row
from spmd_core.graph.storage import Storage
from spmd_core.program import execution, leaves
from spmd_core.runtime import buffers, devices, in_flight, processes
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_COPY_BYTES = 4 << 20


@dataclass
class Staged:
    """An array to write: this process's blocks of it, in host memory.

    Attributes:
        shape: of the whole array.
        dtype: numpy's.
        chunks: the shape of its chunks.
        blocks: the data, by the slices that it has in the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    blocks: list[tuple[tuple[slice, ...], np.ndarray]]


@dataclass(frozen=True)
class _Source:
    """Where an array lies on the devices.

    Attributes:
        array: the data, with padding.
        row: the index in its first dim; None: the whole.
    """

    array: jax.Array
    row: int | None


@dataclass(frozen=True, eq=False)
class _Block:
    """A block that this process writes.

    Attributes:
        device: that has it.
        row: which row of the device's data has it; None: all of it.
        inside: the slices of it there, without padding; None: there is no padding.
        index: the slices that it has in the array.
    """

    device: jax.Device
    row: int | None
    inside: tuple[slice, ...] | None
    index: tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class _Plan:
    """What this process writes of an array: the same object in each save of a run."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    blocks: tuple[_Block, ...]


class Memory:
    """Host memory for copies, which the next save uses again."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._taken: list[np.ndarray] = []
        # The arrays of the last save and of this one by name, where they follow a plan.
        self._kept: dict[str, tuple[_Plan, Staged]] = {}
        self._staged: dict[str, tuple[_Plan, Staged]] = {}
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        self._threads = Threads(min(4, os.cpu_count() or 1) - 1, "checkpoint-copy")

    def expect(self, plans: Mapping[str, _Plan]) -> None:
        """Begins a save of arrays by these plans. Memory of all others is free for it."""
        for name, (plan, array) in [*self._kept.items()]:
            if plans.get(name) is not plan:
                del self._kept[name]
                for _, block in array.blocks:
                    memory = block.reshape(-1).view(np.uint8)
                    self._free.setdefault(memory.nbytes, []).append(memory)

    def array(self, name: str, plan: _Plan, blocks: Sequence[np.ndarray]) -> Staged:
        """Memory for copies of an array's blocks, which `finish` makes.

        Args:
            name: of the array.
            plan: of `expect`. The array that the last save had by it is used again.
            blocks: the data of its blocks.
        """
        if name in self._kept:
            _, found = self._kept.pop(name)
            for (_, copy), block in zip(found.blocks, blocks):
                self._add(copy, block)
        else:
            copies = [self._copy(block) for block in blocks]
            indices = (block.index for block in plan.blocks)
            found = Staged(plan.shape, plan.dtype, plan.chunks, [*zip(indices, copies)])
        self._staged[name] = plan, found
        return found

    def copy(self, data: np.ndarray) -> np.ndarray:
        """Memory for a copy, contiguous, which `finish` makes."""
        copy = self._copy(data)
        self._taken.append(copy)
        return copy

    def _copy(self, data: np.ndarray) -> np.ndarray:
        free = self._free.get(data.nbytes)
        memory = free.pop() if free else _new(data.nbytes)
        copy = memory.view(data.dtype).reshape(data.shape)
        self._add(copy, data)
        return copy

    def _add(self, copy: np.ndarray, data: np.ndarray) -> None:
        if data.nbytes <= _COPY_BYTES:
            self._copies.append((copy, data))
        else:
            self._copies += zip(_pieces(copy), _pieces(data))

    def finish(self) -> None:
        """Makes all copies: by several threads, as the devices wait."""
        copies, self._copies = self._copies, []
        self._threads.all([functools.partial(np.copyto, *each) for each in copies], here=True)

    def reuse(self) -> None:
        """Frees what no copy of the last save took, and has the next save use the rest again."""
        self._free = {}
        for copy in self._taken:
            memory = copy.reshape(-1).view(np.uint8)
            self._free.setdefault(memory.nbytes, []).append(memory)
        self._kept, self._staged = self._staged, {}
        self._taken, self._copies = [], []


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    """An array in pieces that threads copy, along its first dim."""
    return np.array_split(array, min(-(-array.nbytes // _COPY_BYTES), len(array)))


def _new(num_bytes: int) -> np.ndarray:
    return dtypes.numpy_view(buffers.host_block([num_bytes], torch.uint8))


class Views(Memory):
    """Takes no copies: of data that nothing changes until it is written, such as mapped files."""

    def expect(self, plans: Mapping[str, _Plan]) -> None:
        """Keeps nothing."""

    def array(self, name: str, plan: _Plan, blocks: Sequence[np.ndarray]) -> Staged:
        indices = (block.index for block in plan.blocks)
        return Staged(plan.shape, plan.dtype, plan.chunks, [*zip(indices, blocks)])

    def copy(self, data: np.ndarray) -> np.ndarray:
        return data


def staged(entries: Mapping[str, Entry], memory: Memory) -> dict[str, Staged]:
    """This process's part of a state, copied to host memory. Cuts, and waits for the devices.

    Raises:
        DeviceMemoryError, ProgramError, IndexRangeError: of the programs that compute it.
    """
    sources = {name: _source(entry) for name, entry in entries.items()}
    plans = {
        name: _planned(
            name,
            entries[name].shape,
            source.array.shape,
            source.array.sharding,
            source.row,
            np.dtype(source.array.dtype),
        )
        for name, source in sources.items()
        if isinstance(source, _Source)
    }
    in_flight.programs.wait_all()
    found = {}
    try:
        memory.expect(plans)
        for name, source in sources.items():
            if isinstance(source, _Source):
                found[name] = _from_devices(name, source, plans[name], memory)
            else:
                found[name] = _from_host(source, memory)
        memory.finish()
    except BaseException:
        memory.reuse()
        raise
    return found


def _source(entry: Entry) -> _Source | torch.Tensor:
    tensor = entry.tensor
    if not isinstance(tensor, XLAShardedTensor):
        return tensor if entry.row is None else tensor[entry.row]
    handle = tensor._handle
    if not isinstance(handle, Storage):
        with torch.no_grad():
            return _source(Entry(tensor.clone(), entry.row))
    value = execution.materialize(handle)
    execution.raise_if_wrong(value)
    with lock:
        data, placement = value.data, value.placement
        # The rows of a stack are read where they are: to take them out would copy them.
        if data.__class__ is Row and placement.room is None and entry.row is None:
            leaves.refuse_local(value)
            return _Source(data.stack.value.data, data.index)
    return _Source(execution.place(handle), entry.row)


@functools.lru_cache(maxsize=4096)
def _planned(
    name: str,
    shape: tuple[int, ...],
    stored_shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    row: int | None,
    dtype: np.dtype,
) -> _Plan:
    """What this process writes of an array, which is the same in each save of a run.

    Args:
        name: of the array.
        shape: of what is saved, without padding.
        stored_shape: of the array on the devices.
        sharding: of that.
        row: which of its rows is saved; None: all of it.
        dtype: numpy's.
    """
    block = sharding.shard_shape(stored_shape)
    chunks = blocks.chunk_shape(block if row is None else block[1:], shape, dtype.itemsize)
    found = []
    for own in blocks.owned(name, stored_shape, sharding):
        bounds, first = own.bounds, None
        if row is not None:
            (start, stop), *rest = bounds
            if not start <= row < stop:
                continue
            bounds, first = tuple(rest), row - start
        inside = blocks.clipped(bounds, shape)
        if 0 not in shape and any(a == b for a, b in inside):
            continue  # padding alone
        there = tuple(slice(b - a) for a, b in inside)
        index = tuple(slice(a, b) for a, b in inside)
        found.append(_Block(own.device, first, None if inside == bounds else there, index))
    return _Plan(shape, dtype, chunks, tuple(found))


def _from_devices(name: str, source: _Source, plan: _Plan, memory: Memory) -> Staged:
    shards = {shard.device: shard.data for shard in source.array.addressable_shards}
    # On the CPU, numpy's array is the device's memory.
    is_cpu = devices.platform() == "cpu"
    if not is_cpu:
        for block in plan.blocks:
            shards[block.device].copy_to_host_async()
    found = []
    for block in plan.blocks:
        host = np.asarray(shards[block.device])
        if block.row is not None:
            host = host[block.row]
        if block.inside is not None:
            host = host[block.inside]
        found.append(host if is_cpu else np.ascontiguousarray(host))
    return (memory if is_cpu else Views()).array(name, plan, found)


def _from_host(tensor: torch.Tensor, memory: Memory) -> Staged:
    """A tensor on the host, which all processes have: the first one writes it."""
    tensor = tensor.detach().cpu()
    shape, dtype = tuple(tensor.shape), np.dtype(dtypes.to_jax(tensor.dtype))
    chunks = blocks.chunk_shape(shape, shape, dtype.itemsize)
    if not processes.is_master():
        return Staged(shape, dtype, chunks, [])
    data = memory.copy(dtypes.numpy_view(tensor.contiguous()))
    return Staged(shape, dtype, chunks, [(tuple(slice(0, n) for n in shape), data)])
