"""Moves data between host and device memory, and between devices."""

import functools
import math
import mmap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import jax
import numpy as np
import torch

from spmd_core import counters, dtypes, progress, releases, source_lines
from spmd_core.errors import ProgramError
from spmd_core.runtime import abstract, watch
from spmd_core.runtime.abstract import AbstractArray
from spmd_core.runtime.devices import all_devices, platform
from spmd_core.runtime.in_flight import FAILURES, wait_for
from spmd_core.runtime.jax_sharding import device_ids_of, replicated
from spmd_core.sharding.process_parts import ProcessPart

# Of arrays that are smaller, jax may keep a copy in host memory (see `_assembled`).
_KEPT_BYTES = 1 << 20
# A block in host memory of this size has pages of its own.
_OWN_BYTES = 1 << 20
# An upload of this size is shown on a terminal.
_SHOWN_BYTES = 1 << 28
# The alignment, in bytes, at which a CPU device uses the memory of a numpy array without a copy.
_ALIGNMENT = 64
_multihost_utils = releases.jax_module("jax.experimental.multihost_utils", "process_allgather")


def upload(
    tensor: torch.Tensor, jax_sharding: jax.sharding.Sharding, padded_shape: tuple[int, ...]
) -> jax.Array:
    """Host data as a device array of `padded_shape`; each device receives only its shard.

    Does not wait.
    """
    if abstract.run() is not None:
        return abstract.array(padded_shape, dtypes.to_jax(tensor.dtype), jax_sharding)
    data = dtypes.numpy_view(tensor.detach().contiguous())
    counters.count("uploads")
    counters.count("uploaded_bytes", data.nbytes)
    with jax.enable_x64(True), _shown(data):
        if padded_shape == data.shape:
            if jax_sharding.is_fully_addressable and jax_sharding.is_fully_replicated:
                return jax.device_put(data, jax_sharding)
            return jax.make_array_from_callback(data.shape, jax_sharding, lambda index: data[index])
        return jax.make_array_from_callback(
            padded_shape, jax_sharding, lambda index: _padded_block(data, index, padded_shape)
        )


def _shown(data: np.ndarray) -> AbstractContextManager[Any]:
    """A line on the terminal about a large upload."""
    if data.nbytes < _SHOWN_BYTES:
        return nullcontext()
    return progress.shown(f"uploading {data.dtype}{[*data.shape]}, {data.nbytes / 1e9:.1f} GB")


def copied(
    array: jax.Array, conversions: tuple[np.dtype, ...], jax_sharding: jax.sharding.NamedSharding
) -> jax.Array:
    """A copy in memory of its own, on the same devices. Does not wait.

    Args:
        array: what is copied.
        conversions: the dtypes that it is converted to, one after the other; at least one.
        jax_sharding: of the copy.
    """
    if isinstance(array, AbstractArray):
        return abstract.array(array.shape, conversions[-1], jax_sharding)
    with jax.enable_x64(True):
        for dtype in conversions:  # in one program, XLA would drop one to 16 bits and back
            array = _copied(dtype, jax_sharding)(array)
    return array


@functools.lru_cache(maxsize=1024)
def _copied(dtype: np.dtype, jax_sharding: jax.sharding.NamedSharding) -> Any:
    """The program that copies arrays."""
    return jax.jit(lambda x: jax.numpy.array(x, dtype=dtype, copy=True), out_shardings=jax_sharding)


def upload_and_wait(
    tensor: torch.Tensor, jax_sharding: jax.sharding.Sharding, padded_shape: tuple[int, ...]
) -> jax.Array:
    """`upload` of memory that the caller may write to afterwards. The tensor may have gaps."""
    if abstract.run() is not None or platform() != "cpu":
        array = upload(tensor, jax_sharding, padded_shape)
        if not isinstance(array, AbstractArray):
            array.block_until_ready()
        return array
    data = dtypes.numpy_view(tensor.detach())
    counters.count("uploads")
    counters.count("uploaded_bytes", data.nbytes)
    copies: dict[str, np.ndarray] = {}

    def block(index: Any) -> np.ndarray:
        key = str(index)  # devices that hold the same block share one copy
        if key not in copies:
            copies[key] = _aligned_copy(
                data[index]
                if padded_shape == data.shape
                else _padded_block(data, index, padded_shape)
            )
        return copies[key]

    with jax.enable_x64(True):
        return jax.make_array_from_callback(padded_shape, jax_sharding, block)


def _aligned_copy(data: np.ndarray) -> np.ndarray:
    """A copy that a CPU device uses as its memory: jax would copy one that is not aligned again.

    By numpy, as torch's copy spreads over threads, for which the training loop needs the cores.
    """
    memory = np.empty(data.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
    np.copyto(copy, data)
    return copy


def _padded_block(data: np.ndarray, index: Any, padded_shape: tuple[int, ...]) -> np.ndarray:
    bounds = [s.indices(n)[:2] for s, n in zip(index, padded_shape)]
    block = data[tuple(slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, data.shape))]
    if not block.ndim:  # np.pad takes no array without dims
        return block
    return np.pad(block, [(0, (b - a) - have) for (a, b), have in zip(bounds, block.shape)])


def upload_rows(
    tensors: Sequence[torch.Tensor],
    jax_sharding: jax.sharding.NamedSharding,
    padded_shape: tuple[int, ...],
) -> jax.Array:
    """Host tensors of one shape as the rows of a device array, whose first dim is not split.

    Each device receives only its shard. Does not wait.
    """
    if abstract.run() is not None:
        return abstract.array(padded_shape, dtypes.to_jax(tensors[0].dtype), jax_sharding)
    rows = [dtypes.numpy_view(t.detach().contiguous()) for t in tensors]
    counters.count("uploads")
    counters.count("uploaded_bytes", sum(row.nbytes for row in rows))
    blocks: dict[str, np.ndarray] = {}

    def block(index: Any) -> np.ndarray:
        key = str(index)  # devices that hold the same block share one copy
        if key not in blocks:
            own = [_padded_block(row, index[1:], padded_shape[1:]) for row in rows]
            blocks[key] = np.stack(own)
        return blocks[key]

    with jax.enable_x64(True):
        return jax.make_array_from_callback(padded_shape, jax_sharding, block)


def stacked(
    arrays: Sequence[jax.Array], jax_sharding: jax.sharding.NamedSharding, shape: tuple[int, ...]
) -> jax.Array:
    """Device arrays as the rows of one array on the same devices. Does not wait.

    Args:
        arrays: the rows, of one shape.
        jax_sharding: of the result.
        shape: of the result.
    """
    if any(isinstance(array, AbstractArray) for array in arrays):
        return abstract.array(shape, arrays[0].dtype, jax_sharding)
    with jax.enable_x64(True):
        made: jax.Array = _stacking(jax_sharding)(arrays)
        return made


@functools.lru_cache(maxsize=256)
def _stacking(jax_sharding: jax.sharding.NamedSharding) -> Any:
    """The program that stacks arrays."""
    return jax.jit(jax.numpy.stack, out_shardings=jax_sharding)


def row(
    array: jax.Array, index: int, jax_sharding: jax.sharding.NamedSharding, shape: tuple[int, ...]
) -> jax.Array:
    """A row of a device array, as an array of its own. Does not wait.

    Args:
        array: the array, whose first dim is not split.
        index: of the row.
        jax_sharding: of the result.
        shape: of the result.
    """
    if isinstance(array, AbstractArray):
        return abstract.array(shape, array.dtype, jax_sharding)
    with jax.enable_x64(True):
        made: jax.Array = _row(jax_sharding)(array, index)
        return made


@functools.lru_cache(maxsize=256)
def _row(jax_sharding: jax.sharding.NamedSharding) -> Any:
    """The program that takes a row."""
    return jax.jit(
        lambda array, index: jax.lax.dynamic_index_in_dim(array, index, keepdims=False),
        out_shardings=jax_sharding,
    )


def from_blocks(
    blocks: dict[int, torch.Tensor],
    jax_sharding: jax.sharding.Sharding,
    padded_shape: tuple[int, ...],
) -> jax.Array:
    """A device array from one block of host data per local device. Does not wait.

    Args:
        blocks: by the device's position among all devices, the block, padding included.
        jax_sharding: the sharding of the array.
        padded_shape: the shape of the array.
    """
    if abstract.run() is not None:
        dtype = next(iter(blocks.values())).dtype
        return abstract.array(padded_shape, dtypes.to_jax(dtype), jax_sharding)
    with jax.enable_x64(True):
        # Copies: on the CPU, jax may use the memory of a numpy array, and the caller may write to
        # the block later.
        arrays = [
            jax.device_put(np.array(dtypes.numpy_view(block.detach())), all_devices()[device])
            for device, block in blocks.items()
        ]
        return jax.make_array_from_single_device_arrays(padded_shape, jax_sharding, arrays)


def from_process_part(
    tensor: torch.Tensor,
    jax_sharding: jax.sharding.Sharding,
    padded_shape: tuple[int, ...],
    part: ProcessPart,
) -> jax.Array:
    """A device array of which this process's host data is its part. Does not wait.

    Each of this process's devices receives its own block; the caller may write to the tensor
    afterwards.

    Args:
        tensor: the process's data.
        jax_sharding: the sharding of the array.
        padded_shape: the shape of the array.
        part: what the process holds of it.
    """
    data = dtypes.numpy_view(tensor.detach())
    counters.count("uploads")
    counters.count("uploaded_bytes", data.nbytes)
    with jax.enable_x64(True):
        arrays = []
        for bounds, holders in blocks_of(jax_sharding, padded_shape).items():
            local = part.local_bounds(bounds, data.shape)
            index = tuple(slice(start, stop) for start, stop in local)
            # A copy: on the CPU, jax may use the memory of a numpy array.
            block = np.array(_padded_block(data, index, tuple(b for _, b in local)), order="C")
            arrays += [jax.device_put(block, device) for device in holders]
        return jax.make_array_from_single_device_arrays(padded_shape, jax_sharding, arrays)


def blocks_of(
    jax_sharding: jax.sharding.Sharding, padded_shape: tuple[int, ...]
) -> dict[tuple[tuple[int, int], ...], list[jax.Device]]:
    """The blocks on this process's devices: the devices that hold each, by its bounds.

    Bounds are a start and a stop for each dim.
    """
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in jax_sharding.addressable_devices_indices_map(padded_shape).items():
        assert index is not None
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, padded_shape))
        holders.setdefault(bounds, []).append(device)
    return holders


def host_block(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of zeros, whose memory `put` may give to a device of the CPU.

    A large one has memory of its own, which the system gets back as soon as it is freed. (Of that
    of malloc, blocks that come and go leave half of a state's bytes unused.)
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _OWN_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, num_bytes, flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # one fault for 2 MB, and not one for 4 KB
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(tuple(shape))


def put(block: torch.Tensor, holders: Sequence[jax.Device]) -> list[jax.Array]:
    """Host data on each of the devices, as arrays of one device. Waits for the transfers.

    On the CPU, the arrays may use the block's memory: the caller must not write to it any more.
    """
    if abstract.run() is not None:
        return []
    data = dtypes.numpy_view(block)
    counters.count("uploads")
    counters.count("uploaded_bytes", data.nbytes * len(holders))
    with jax.enable_x64(True):
        arrays = [jax.device_put(data, device) for device in holders]
    for array in arrays:
        wait_for(array)
    return arrays


def put_together(
    blocks: Mapping[tuple[tuple[int, int], ...], torch.Tensor],
    jax_sharding: jax.sharding.Sharding,
    padded_shape: tuple[int, ...],
) -> jax.Array:
    """Host data on all of this process's devices at once, as one array. Waits for the transfers.

    On the CPU, the array may use the blocks' memory: the caller must not write to it any more.

    Args:
        blocks: by their bounds, as `blocks_of` has them.
        jax_sharding: of the array.
        padded_shape: of the array.
    """
    if abstract.run() is not None:
        dtype = next(iter(blocks.values())).dtype
        return abstract.array(padded_shape, dtypes.to_jax(dtype), jax_sharding)
    data = {bounds: dtypes.numpy_view(block) for bounds, block in blocks.items()}
    counters.count("uploads")
    counters.count("uploaded_bytes", sum(each.nbytes for each in data.values()))

    def block(index: Any) -> np.ndarray:
        return data[tuple(s.indices(n)[:2] for s, n in zip(index, padded_shape))]

    with jax.enable_x64(True):
        array = jax.make_array_from_callback(padded_shape, jax_sharding, block)
    wait_for(array)
    return array


def joined(
    arrays: Sequence[jax.Array],
    jax_sharding: jax.sharding.Sharding,
    padded_shape: tuple[int, ...],
    dtype: torch.dtype,
) -> jax.Array:
    """One array from those of this process's devices, without a copy."""
    if abstract.run() is not None:
        return abstract.array(padded_shape, dtypes.to_jax(dtype), jax_sharding)
    with jax.enable_x64(True):
        return jax.make_array_from_single_device_arrays(
            padded_shape, jax_sharding, arrays, dtype=dtypes.to_jax(dtype)
        )


def reshard(
    array: jax.Array,
    jax_sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
    padded_shape: tuple[int, ...],
) -> jax.Array:
    """The array with another sharding, cut to `shape` and padded to `padded_shape`.

    Does not wait.
    """
    if isinstance(array, AbstractArray):
        return abstract.array(padded_shape, array.dtype, jax_sharding)
    counters.count("resharded_bytes", array.nbytes)
    with jax.enable_x64(True):
        if 0 in shape:
            # If the order of the devices changes, jax moves the blocks of an empty array without
            # adapting their shape.
            return jax.make_array_from_callback(
                padded_shape,
                jax_sharding,
                lambda _: np.zeros(jax_sharding.shard_shape(padded_shape), array.dtype),
                dtype=array.dtype,
            )
        if array.shape == padded_shape:
            return jax.device_put(array, jax_sharding)
        if array.sharding.is_equivalent_to(jax_sharding, array.ndim):
            # Only dims that are not split differ: more or less room behind their elements.
            return _resized(array, padded_shape, jax_sharding)
        whole = jax.device_put(array, replicated(device_ids_of(array.sharding)))[
            tuple(slice(n) for n in shape)
        ]
        return jax.device_put(
            jax.numpy.pad(whole, [(0, p - n) for n, p in zip(shape, padded_shape)]), jax_sharding
        )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _resized(array: jax.Array, shape: tuple[int, ...], jax_sharding: Any) -> jax.Array:
    kept = tuple(min(n, p) for n, p in zip(array.shape, shape))
    array = jax.lax.slice(array, (0,) * array.ndim, kept)
    array = jax.numpy.pad(array, [(0, p - n) for n, p in zip(kept, shape)])
    return jax.lax.with_sharding_constraint(array, jax_sharding)


def download(array: jax.Array, shape: tuple[int, ...]) -> torch.Tensor:
    """The logical value as a CPU tensor that owns its memory. Waits for the device.

    Raises:
        PlanReadError: in a plan.
        ProcessError: the blocks lie in several processes, which do not all read now.
    """
    if isinstance(array, AbstractArray):
        abstract.refuse("a tensor's values")
    counters.count("host_reads")
    wait_for(array)
    if array.is_fully_addressable or array.is_fully_replicated:
        host = _assembled(array) if array.nbytes >= _KEPT_BYTES else np.asarray(array)
    else:
        holders: Any = array.sharding.device_set
        group = sorted({device.process_index for device in holders})
        watch.note_transfer(
            f"read of {array.dtype}{list(shape)}", source_lines.user_line(), tuple(group)
        )
        try:
            host = _multihost_utils.process_allgather(array, tiled=True)
        except FAILURES as error:
            raise watch.failure_of_others(error) or ProgramError(
                f"a tensor whose blocks lie in processes {group} must be gathered to be read; "
                f"that failed: {error}. Look at their output."
            ) from error
    if host.shape != shape:
        host = host[tuple(slice(n) for n in shape)]
    if not (host.flags.owndata and host.flags.writeable):
        host = np.array(host, copy=True, order="C")
    return dtypes.tensor_view(host)


def _assembled(array: jax.Array) -> np.ndarray:
    """The array in host memory, from its blocks.

    jax would keep what it assembles as long as the array lives: after a checkpoint, a copy of the
    whole model in host memory.
    """
    host = np.empty(array.shape, array.dtype)
    blocks = {str(shard.index): shard for shard in array.addressable_shards}  # without replicas
    for shard in blocks.values():
        host[shard.index] = np.asarray(shard.data)
    return host


def addressable(array: jax.Array) -> Sequence[jax.Shard]:
    """The shards on this process's devices, in the order of the global device ids.

    Raises:
        PlanReadError: in a plan.
    """
    if isinstance(array, AbstractArray):
        abstract.refuse("a tensor's shards")
    return sorted(array.addressable_shards, key=lambda s: s.device.id)
