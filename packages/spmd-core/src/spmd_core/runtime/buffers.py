"""Moves data between host and device memory, and limits the number of programs in flight."""

import functools
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

from spmd_core import counters, dtypes, releases, source_lines
from spmd_core.config import config
from spmd_core.errors import ProgramError
from spmd_core.runtime import abstract, interrupts, watch
from spmd_core.runtime.abstract import AbstractArray
from spmd_core.runtime.devices import all_devices, platform
from spmd_core.runtime.jax_sharding import device_ids_of, replicated
from spmd_core.sharding.process_parts import ProcessPart

# Of arrays that are smaller, jax may keep a copy in host memory (see `_assembled`).
_KEPT_BYTES = 1 << 20
# The prefix of XLA's CPU errors for a program of which an operand, or a part, has failed.
_PASSED_ON = "Error dispatching computation: "
# jax 0.10.0 also says of which event an error is.
_PREFIXES = re.compile(rf"^(?:[A-Z_]+: |Buffer Definition Event: |{_PASSED_ON})+")
# What jax raises for a program that has failed. It is a ValueError if a process with which the
# program exchanges data is gone.
FAILURES = (jax.errors.JaxRuntimeError, ValueError)
# jax's error of a program -> the error to raise
Explain = Callable[[Exception], Exception]
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
    with jax.enable_x64(True):
        if padded_shape == data.shape:
            if jax_sharding.is_fully_addressable and jax_sharding.is_fully_replicated:
                return jax.device_put(data, jax_sharding)
            return jax.make_array_from_callback(data.shape, jax_sharding, lambda index: data[index])
        return jax.make_array_from_callback(
            padded_shape, jax_sharding, lambda index: _padded_block(data, index, padded_shape)
        )


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
    return np.pad(block, [(0, (b - a) - have) for (a, b), have in zip(bounds, block.shape)])


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


def wait_for(array: jax.Array) -> None:
    """Blocks until the array is computed.

    Raises:
        DeviceMemoryError, ProgramError: its program failed, or one that it depends on; as the first
            program that fails says of itself, if that is still known.
    """
    if isinstance(array, AbstractArray):
        return
    try:
        with counters.timed(counters.Part.WAITING):
            array.block_until_ready()
    except FAILURES as error:
        raise watch.failure_of_others(error) or in_flight.explained(error) from error


def _cause(error: Exception) -> str:
    """The part of an error's text that the errors of dependent programs repeat."""
    return _PREFIXES.sub("", str(error)).rstrip(". ")


def _cause_of(failure: Exception) -> str | None:
    """The cause of an error that explains jax's."""
    return _cause(failure.__cause__) if isinstance(failure.__cause__, Exception) else None


def of_unknown_program(error: Exception) -> ProgramError:
    """The error of a program that has failed and is no longer known."""
    return ProgramError(
        f"a program that was started without waiting failed on the device: {error}. "
        "Its results are lost; call spmd.sync(wait=True) after each step to find which."
    )


@dataclass(eq=False)
class _Started:
    """A program in flight.

    Attributes:
        token: its token.
        explain: jax's error, if the program fails -> the error to raise.
        thread: the one that started it.
    """

    token: jax.Array
    explain: Explain
    thread: threading.Thread = field(default_factory=threading.current_thread)

    @property
    def is_told_here(self) -> bool:
        """Whether a failure is raised in this thread."""
        return self.thread is threading.current_thread() or not self.thread.is_alive()


class InFlight:
    """Limits the number of programs in flight, by waiting for the oldest one.

    A failure that one thread meets while it waits is raised in the thread that started the program.

    Each program has an additional result, its token, which is never donated: the program has ended
    when its token is computed.

    Attributes:
        has_started: whether this process has started any program.
    """

    def __init__(self) -> None:
        self._queue: deque[_Started] = deque()
        # Failures that other threads have met.
        self._untold: list[tuple[_Started, Exception]] = []
        # The newest failures, with what they were explained by.
        self._failures: deque[tuple[str, Explain]] = deque(maxlen=8)
        self.has_started = False

    def add(self, token: jax.Array, explain: Explain) -> None:
        """Adds a started program; waits while too many programs are in flight.

        Args:
            token: its token.
            explain: jax's error, if the program fails later -> the error to raise.

        Raises:
            DeviceMemoryError, ProgramError: the program for which it waits has failed.
        """
        self.has_started = True
        limit = config.max_in_flight_cpu if platform() == "cpu" else config.max_in_flight
        self._queue.append(_Started(token, explain))
        while len(self._queue) > limit:
            self._wait_for_oldest()
        self._raise_untold()

    @interrupts.waits
    def wait_all(self) -> None:
        """Blocks until all started programs have ended.

        Raises:
            DeviceMemoryError, ProgramError: one of them has failed.
        """
        while self._queue:
            self._wait_for_oldest()
        self._raise_untold()

    def _wait_for_oldest(self) -> None:
        started = self._oldest()
        if started is None:
            return
        try:
            with counters.timed(counters.Part.WAITING):
                started.token.block_until_ready()
        except FAILURES as error:
            is_first = self._remove(started)
            failure = watch.failure_of_others(error) or self._explained_by(started.explain, error)
            failure.__cause__ = error
            if is_first:
                self._untold.append((started, failure))
            self._raise_untold()
        self._remove(started)

    def _oldest(self) -> _Started | None:
        """The oldest program, which stays, as other threads may wait for it, too."""
        try:
            return self._queue[0]
        except IndexError:  # another thread took the last one
            return None

    def _remove(self, started: _Started) -> bool:
        """Takes a program out of the queue; returns False if another thread did."""
        try:
            self._queue.remove(started)
        except ValueError:
            return False
        return True

    def _raise_untold(self) -> None:
        for told in [*self._untold]:
            if told[0].is_told_here:
                self._untold.remove(told)
                raise told[1]

    def explained(self, error: Exception) -> Exception:
        """The error for an array: that of the first program that failed for the same cause."""
        return self._explained_by_another(error) or of_unknown_program(error)

    def explained_at_start(self, error: Exception, own: Explain) -> Exception:
        """The error to raise for a program that cannot start, possibly as an earlier one failed.

        Args:
            error: jax's.
            own: explains the failure if it is the program's own.
        """
        found = self._explained_by_another(error) if _PASSED_ON in str(error) else None
        return found or own(error)

    def _explained_by_another(self, error: Exception) -> Exception | None:
        """The error of the first program that failed for the same cause; None without one."""
        cause = _cause(error)
        self._untold[:] = [u for u in self._untold if _cause_of(u[1]) != cause]
        found = self._take_failed(cause)
        known = next((x for other, x in reversed(self._failures) if other == cause), None)
        # What is passed on twice comes from a program that has failed before.
        if found is not None and (known is None or str(found[0]).count(_PASSED_ON) < 2):
            own, explain = found
            return self._explained_by(explain, own)
        return None if known is None else known(error)

    def _take_failed(self, cause: str) -> tuple[Exception, Explain] | None:
        """Removes the programs that failed for a cause; returns the first, with its error.

        Later ones count as depending on it. Waits for all programs.
        """
        first, others = None, []
        try:
            while (started := self._oldest()) is not None:
                try:
                    started.token.block_until_ready()
                except FAILURES as error:
                    if _cause(error) != cause:
                        others.append(started)
                    elif first is None:
                        first = error, started.explain
                self._remove(started)
        finally:  # of an interruption, too
            self._queue.extendleft(reversed(others))
        return first

    def _explained_by(self, explain: Explain, error: Exception) -> Exception:
        self._failures.append((_cause(error), explain))
        self._take_failed(_cause(error))  # what depends on it
        return explain(error)


# Guarded by: the graph lock to add; a wait takes tokens without a lock.
# Cleared by: in_flight.wait_all().
in_flight = InFlight()
