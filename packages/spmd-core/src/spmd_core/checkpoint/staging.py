"""Copies of a state in host memory, which are written while the devices go on.

The next step takes over the buffers that are saved, so a save copies this process's own blocks
before it returns. (Buffers that a save would protect until they are written double the memory of
parameters and moments on the devices.) On a CPU, the copies lie in memory that the next save uses
again; elsewhere, in what jax allocates for a transfer.
"""

import functools
import os
from collections.abc import Callable, Mapping
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


class Memory:
    """Host memory for copies, which the next save uses again."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._taken: list[np.ndarray] = []
        self._copies: list[Callable[[], None]] = []
        self._threads = Threads(min(4, os.cpu_count() or 1) - 1, "checkpoint-copy")

    def copy(self, data: np.ndarray) -> np.ndarray:
        """Memory for a copy, contiguous, which `finish` makes."""
        free = self._free.get(data.nbytes)
        memory = free.pop() if free else _new(data.nbytes)
        self._taken.append(memory)
        copy = memory.view(data.dtype).reshape(data.shape) if data.size else np.array(data)
        for to, of in zip(_pieces(copy), _pieces(data)):
            self._copies.append(functools.partial(np.copyto, to, of))
        return copy

    def finish(self) -> None:
        """Makes all copies: by several threads, as the devices wait."""
        copies, self._copies = self._copies, []
        self._threads.all(copies, here=True)

    def reuse(self) -> None:
        """Frees what no copy of the last save took, and has the next save use the rest again."""
        self._free = {}
        for memory in self._taken:
            self._free.setdefault(memory.nbytes, []).append(memory)
        self._taken, self._copies = [], []


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    """An array in pieces that threads copy, along its first dim."""
    num = -(-array.nbytes // _COPY_BYTES)
    return [array] if num < 2 else np.array_split(array, min(num, len(array)))


def _new(num_bytes: int) -> np.ndarray:
    return dtypes.numpy_view(buffers.host_block([num_bytes], torch.uint8))


class Views(Memory):
    """Takes no copies: of data that nothing changes until it is written, such as mapped files."""

    def copy(self, data: np.ndarray) -> np.ndarray:
        return data


def staged(entries: Mapping[str, Entry], memory: Memory) -> dict[str, Staged]:
    """This process's part of a state, copied to host memory. Cuts, and waits for the devices.

    Raises:
        DeviceMemoryError, ProgramError, IndexRangeError: of the programs that compute it.
    """
    sources = {name: _source(entry) for name, entry in entries.items()}
    in_flight.programs.wait_all()
    found = {}
    try:
        for name, source in sources.items():
            entry = entries[name]
            if isinstance(source, _Source):
                found[name] = _from_devices(name, source, entry.shape, memory)
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
    itemsize: int,
) -> tuple[tuple[int, ...], list[tuple[jax.Device, int, blocks.Bounds]]]:
    """What this process writes of an array, which is the same in each save of a run.

    Args:
        name: of the array.
        shape: of what is saved, without padding.
        stored_shape: of the array on the devices.
        sharding: of that.
        row: which of its rows is saved; None: all of it.
        itemsize: bytes of an element.

    Returns:
        The shape of chunks; and for each block its device, the row there, and its bounds.
    """
    block = sharding.shard_shape(stored_shape)
    chunks = blocks.chunk_shape(block if row is None else block[1:], shape, itemsize)
    found = []
    for own in blocks.owned(name, stored_shape, sharding):
        bounds, first = own.bounds, 0
        if row is not None:
            (start, stop), *rest = bounds
            if not start <= row < stop:
                continue
            bounds, first = tuple(rest), row - start
        inside = blocks.clipped(bounds, shape)
        if 0 not in shape and any(a == b for a, b in inside):
            continue  # padding alone
        found.append((own.device, first, inside))
    return chunks, found


def _from_devices(name: str, source: _Source, shape: tuple[int, ...], memory: Memory) -> Staged:
    array, row = source.array, source.row
    dtype = np.dtype(array.dtype)
    chunks, planned = _planned(name, shape, array.shape, array.sharding, row, dtype.itemsize)
    shards = {shard.device: shard for shard in array.addressable_shards}
    mine = [(shards[device].data, first, inside) for device, first, inside in planned]
    # On the CPU, numpy's array is the device's memory.
    is_cpu = devices.platform() == "cpu"
    if not is_cpu:
        for data, *_ in mine:
            data.copy_to_host_async()
    copies = []
    for data, first, inside in mine:
        host = np.asarray(data)
        if row is not None:
            host = host[first]
        host = host[tuple(slice(b - a) for a, b in inside)]
        host = memory.copy(host) if is_cpu else np.ascontiguousarray(host)
        copies.append((tuple(slice(a, b) for a, b in inside), host))
    return Staged(shape, dtype, chunks, copies)


def _from_host(tensor: torch.Tensor, memory: Memory) -> Staged:
    """A tensor on the host, which all processes have: the first one writes it."""
    tensor = tensor.detach().cpu()
    shape, dtype = tuple(tensor.shape), np.dtype(dtypes.to_jax(tensor.dtype))
    chunks = blocks.chunk_shape(shape, shape, dtype.itemsize)
    if not processes.is_master():
        return Staged(shape, dtype, chunks, [])
    data = memory.copy(dtypes.numpy_view(tensor.contiguous()))
    return Staged(shape, dtype, chunks, [(tuple(slice(0, n) for n in shape), data)])
