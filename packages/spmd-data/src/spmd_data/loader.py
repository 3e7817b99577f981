"""`MpDeviceLoader`: iterates over host batches and yields them on the device, in the same order.

One background thread prefetches, except from a loader with a `state_dict`.

Invariant: whatever happens in the thread (end of the data, exception, close) reaches the consumer's
`next()`, so neither side waits forever.
"""

import inspect
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch

import spmd_core as spmd
from spmd_core import DataError
from spmd_data.placement import InputSharding, Placement, UnevenBatch, is_spmd_device

_JOIN_TIMEOUT_S = 30.0


class MpDeviceLoader:
    """Wraps an iterable of batches and yields them on the device, sharded, prefetching the next.

    One batch is one step: `spmd.sync()` sends everything recorded for a batch to the device before
    the next batch is yielded, and after the last one. It does not wait for the device. The training
    loop needs no sync of its own.

    Each `iter()` restarts the wrapped loader and ends the thread of the previous iteration. Leaving
    the loop early also ends its thread; it does not sync.

    A loader with a `state_dict` (torchdata's stateful loaders, and those of trainers) reports its
    position, and its user asks for the position between two batches. Such a loader is read in the
    caller's thread when a batch is requested, never ahead, so its state is that of the current
    batch.

    Args:
        loader: iterable of batches. A batch is a tensor, or tuples, lists, dicts, named tuples and
            dataclasses of tensors, nested in any way. Values that are not tensors pass through.
            Under several processes each one loads its own part: see `ShardingSpec.minibatch`.
        device: target device of the tensors. On "cpu" nothing is sharded or synced, so the same
            loop runs in eager torch.
        input_sharding: one `ShardingSpec` for every tensor, or a dict with one (or None) for each
            key of a dict batch; keys that the batch lacks are ignored. A tensor with fewer dims
            than the spec uses the spec's first entries, so 1-D labels beside 4-D images are split
            like the images' batch dim. A tensor with more dims is not split along the extra ones.
        prefetch: number of batches that may wait on the device, at least 1. Has no effect on a
            loader with a `state_dict`.
        batches_per_execution: number of batches whose steps are sent to the device as one program,
            at least 1.
        uneven_batch: what to do with a batch in which the size of a sharded dim is not divisible by
            its number of shards: an `UnevenBatch` or its value.

    Raises:
        DataError: an argument breaks one of the rules above. (An exception of the wrapped loader or
            of the transfer is raised by the `next()` whose batch it prevented, with its own
            traceback.)

    Example:
        >>> from torch.utils.data import DataLoader
        >>> for x in MpDeviceLoader(DataLoader(torch.arange(6.0), batch_size=3), "cpu"):
        ...     print(x.sum())
        tensor(3.)
        tensor(12.)
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str,
        *,
        input_sharding: InputSharding = None,
        prefetch: int = 2,
        batches_per_execution: int = 1,
        uneven_batch: UnevenBatch | str = UnevenBatch.KEEP,
    ) -> None:
        self._loader = loader
        self._placement = Placement(
            torch.device(device), input_sharding, _checked_policy(uneven_batch)
        )
        self._prefetch = _checked_count("prefetch", prefetch)
        self._batches_per_execution = _checked_count("batches_per_execution", batches_per_execution)
        self._running: _InStep | tuple[_Channel, threading.Thread] | None = None

    def __len__(self) -> int:
        """Number of batches of the wrapped loader, including any that `uneven_batch` drops."""
        # A loader without a length raises TypeError, as len() should.
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self.close()
        # In this thread: a shuffling DataLoader draws its seed from torch's generator, and the
        # order of the draws must not depend on timing.
        source = iter(self._loader)
        num_unsynced = (
            self._batches_per_execution if is_spmd_device(self._placement.device) else None
        )
        if hasattr(self._loader, "state_dict"):
            self._running = _InStep(source, self._placement)
            return _DeviceBatches(self._running, num_unsynced)
        channel = _Channel(self._prefetch)
        thread = threading.Thread(
            target=_transfer,
            args=(source, self._placement, channel),
            name="spmd-data-transfer",
            daemon=True,
        )
        self._running = channel, thread
        thread.start()
        return _DeviceBatches(channel, num_unsynced)

    def close(self) -> None:
        """Ends the running iteration, if any: waits for its thread, drops prefetched batches.

        The thread stops between two batches. A RuntimeWarning is issued if the wrapped loader does
        not return its next batch within 30 s.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        if isinstance(running, _InStep):
            running.close()
            return
        channel, thread = running
        channel.close()
        thread.join(_JOIN_TIMEOUT_S)
        if thread.is_alive():
            warnings.warn(
                "a loader should return its next batch in reasonable time; got none within "
                f"{_JOIN_TIMEOUT_S:g} s of closing the iteration. "
                "Its thread ends with that batch; look at what the wrapped loader waits for.",
                RuntimeWarning,
                stacklevel=2,
            )

    def __enter__(self) -> "MpDeviceLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _DeviceBatches(Iterator[Any]):
    """The consumer's end of one iteration.

    Only the consumer's loop references this object (the thread and the loader reference the
    source), so leaving the loop collects the object, which ends the thread.
    """

    def __init__(self, source: "_Channel | _InStep", batches_per_execution: int | None) -> None:
        self._source = source
        # None: the device is eager, there is nothing to sync.
        self._batches_per_execution = batches_per_execution
        self._num_unsynced = 0
        weakref.finalize(self, source.close)

    def __next__(self) -> Any:
        # Sync before waiting for data, so that the device does not idle meanwhile.
        if self._num_unsynced == self._batches_per_execution:
            self._sync()
        try:
            batch = self._source.get()
        except StopIteration:
            if self._num_unsynced and self._batches_per_execution is not None:
                self._sync()
            raise
        self._num_unsynced += 1
        return batch

    def _sync(self) -> None:
        self._num_unsynced = 0
        # A `StepTrace` around the step has already synced at its end.
        if not spmd.profiler.take_step_mark():
            spmd.sync()


class _Channel:
    """A bounded queue from the thread to the consumer; also signals end, exception and close."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._batches: deque[Any] = deque()
        self._has_ended = False
        self._is_closed = False
        self._error: BaseException | None = None
        # The condition's lock must be reentrant (the default is): the garbage collector may call
        # close() while this thread holds the lock.
        self._changed = threading.Condition()

    def put(self, batch: Any) -> bool:
        """Waits for room and appends the batch; returns False once the channel is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._batches) < self._capacity)
            if self._is_closed:
                return False
            self._batches.append(batch)
            self._changed.notify_all()
            return True

    def end(self, error: BaseException | None) -> None:
        """Signals that no batch follows; `error` is the cause, None for an exhausted loader."""
        with self._changed:
            self._has_ended, self._error = True, error
            self._changed.notify_all()

    def get(self) -> Any:
        """Waits for the next batch.

        After the last batch, raises the thread's exception once, then StopIteration. RuntimeError
        after a close.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_ended or self._batches)
            if self._is_closed:
                raise _closed_error()
            if self._batches:
                batch = self._batches.popleft()
                self._changed.notify_all()
                return batch
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Drops the waiting batches and makes `put` and `get` return at once."""
        with self._changed:
            self._is_closed = True
            self._batches.clear()
            self._changed.notify_all()


class _InStep:
    """The batches of a loader that is read one batch per request, without prefetching."""

    def __init__(self, source: Iterator[Any], placement: Placement) -> None:
        self._source, self._batches = source, _placed(source, placement)
        self._is_closed = False

    def get(self) -> Any:
        """Returns the next batch; raises what the loader raises, and StopIteration at its end."""
        if self._is_closed:
            raise _closed_error()
        return next(self._batches)

    def close(self) -> None:
        """Ends the iteration and closes a generator, so that its clean-up code runs now."""
        self._is_closed = True
        self._batches.close()
        if inspect.isgenerator(self._source):
            self._source.close()


def _closed_error() -> RuntimeError:
    return RuntimeError(
        "an iteration ends when its loader is closed or iterated again; got next() on one that has "
        "ended so. "
        "Use the newest iterator of the loader, or wrap the dataset in a second MpDeviceLoader."
    )


def _placed(source: Iterator[Any], placement: Placement) -> Generator[Any, None, None]:
    """Yields the batches of `source` on the device, without those that the placement drops."""
    for batch in source:
        try:
            placed = placement.place(batch)
        except StopIteration as error:  # would look like the end of the data
            raise RuntimeError(
                "a batch could not be moved to the device: StopIteration was raised on the way"
            ) from error
        if placed is not None or batch is None:
            yield placed


def _transfer(source: Iterator[Any], placement: Placement, channel: _Channel) -> None:
    """Body of the background thread: moves batches from `source` to `channel`, in order.

    Returns at the end of the data, after an exception (which goes to the channel) or a close.
    """
    error: BaseException | None = None
    try:
        for batch in _placed(source, placement):
            if not channel.put(batch):
                break
    except BaseException as raised:  # SystemExit too, or the consumer would wait forever
        error = raised
    finally:
        try:
            if inspect.isgenerator(source):
                source.close()  # runs the clean-up code now, not at garbage collection
        except BaseException as raised:
            error = error or raised
        channel.end(error)


def _checked_count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(
            f"{name} must be a whole number of batches, at least 1; got {value!r}. "
            f"Pass for instance {name}=2."
        )
    return value


def _checked_policy(value: UnevenBatch | str) -> UnevenBatch:
    try:
        return UnevenBatch(value)
    except ValueError:
        choices = ", ".join(repr(policy.value) for policy in UnevenBatch)
        raise DataError(
            f"uneven_batch must be one of {choices}; got {value!r}. Pass one of them."
        ) from None
