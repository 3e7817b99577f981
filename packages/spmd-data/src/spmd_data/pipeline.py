"""The stages between a source of batches and the training loop, and the threads that run them.

A reader pulls batches from the source, transfer threads move them to the device, and the training
loop takes them in the source's order. Each batch occupies a slot, of which at most `prefetch`
exist, from when it is pulled until the loop takes it.

Invariants: whatever happens to a batch (end of the data, exception, close) reaches the `get()` for
that batch, so neither side waits forever. One thread at a time uses the source.
"""

import atexit
import inspect
import multiprocessing.connection
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from spmd_core.runtime import interrupts
from spmd_data.counters import Counters
from spmd_data.placement import Placed

interrupts.keep_whole(__file__)

_AT_END_S = 30.0
_AT_EXIT_S = 5.0
# How long to wait until a worker's death is noticed.
_WORKER_ENDS_S = 0.5


@dataclass(slots=True)
class Slot:
    """One batch on its way to the device.

    Attributes:
        number: how many batches the source has given, this one included.
        batch: on the host, then on the device.
        state: the result of `after_read` after the batch was read.
        is_ready: whether the training loop may take it.
        is_dropped: whether the loop does not get it.
        is_end: whether the source ended instead of yielding a batch.
        error: the exception that prevented the batch.
    """

    number: int
    batch: Any = None
    state: Any = None
    is_ready: bool = False
    is_dropped: bool = False
    is_end: bool = False
    error: BaseException | None = None


class Pipeline:
    """The batches of one iteration, on the device.

    Args:
        source: gives the batches on the host.
        prepare: checks a batch, in the source's order, given the batch and the result of
            `after_read`; returns the argument of `place`, or None for a batch to be left out.
        place: moves one to the device.
        after_read: called after each batch of the source and at its end, in the thread that reads;
            its result is kept with the batch.
        on_end: called when the source has ended, in the thread that reads.
        on_stop: called by `stop`, to end what `prepare` and `on_end` may wait for.
        prefetch: batches that may be ahead of the training loop. With 0 there are no threads: `get`
            reads and moves one batch.
        transfer_threads: threads that call `place`.
        counters: the times of the stages are added to it.
        reuses_memory: whether the source may write to a batch when it is asked for the next one.
            The reader then waits until each batch has been moved.
        stall_s: seconds after which `get` warns, once, that it still waits.
    """

    def __init__(
        self,
        source: Iterator[Any],
        prepare: Callable[[Any, Any], Any | None],
        place: Callable[[Any], Placed],
        *,
        after_read: Callable[[], Any],
        on_end: Callable[[], None] | None = None,
        on_stop: Callable[[], None] | None = None,
        prefetch: int,
        transfer_threads: int,
        counters: Counters,
        reuses_memory: bool,
        stall_s: float,
    ) -> None:
        self._source: Iterator[Any] | None = source
        self._prepare_batch, self._place_batch = prepare, place
        self._after_read, self._on_end, self._on_stop = after_read, on_end, on_stop
        self._prefetch, self._counters, self._stall_s = prefetch, counters, stall_s
        self._reuses_memory, self._num_read = reuses_memory, 0
        self._slots: deque[Slot] = deque()  # in the source's order
        self._unplaced: deque[Slot] = deque()  # those that no transfer thread has taken yet
        self._is_reading = prefetch > 0
        self._is_stopped = self._is_over = self._has_warned = False
        # The condition's lock must be reentrant (the default is): the garbage collector may call
        # stop() while this thread holds the lock.
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read_ahead, name="spmd-data-read", daemon=True),
            *(
                threading.Thread(
                    target=self._place_ahead, name=f"spmd-data-transfer-{number}", daemon=True
                )
                for number in range(transfer_threads)
            ),
        ][: (1 + transfer_threads) * self._is_reading]

    def start(self) -> None:
        """Starts the threads."""
        _running.add(self)
        for thread in self._threads:
            thread.start()

    def get(self) -> Slot:
        """Waits for the next batch that is not dropped, or for the end's slot.

        Raises:
            StopIteration: an earlier call has returned the end, or has raised.
            RuntimeError: the pipeline was stopped.
            BaseException: the exception of the source, or of the transfer, for this batch.
        """
        while True:
            slot = self._take()
            if slot.is_end or slot.error is not None:
                self._is_over = True
                self._finish()
            if slot.error is not None:
                # Not kept here, as its traceback holds the frames of the source.
                error, slot.error = slot.error, None
                raise error
            if slot.is_end:
                # The reader only has to end the workers of a DataLoader.
                self.join(_AT_END_S)
            if slot.is_end or not slot.is_dropped:
                return slot

    def num_ready(self) -> int:
        """The number of batches that `get` would return at once."""
        with self._changed:
            return sum(slot.is_ready for slot in self._slots)

    def stop(self) -> None:
        """Drops the waiting batches, and ends the threads after their current work.

        Does not wait.
        """
        if self._on_stop is not None:
            self._on_stop()
        with self._changed:
            self._is_stopped = True
            self._slots.clear()
            self._unplaced.clear()
            self._changed.notify_all()
        if not self._threads:
            self._release_source()

    @interrupts.waits
    def join(self, timeout_s: float) -> bool:
        """Waits until the threads have ended; returns False on a timeout."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _take(self) -> Slot:
        """Removes and returns the oldest slot when it is ready."""
        if not self._prefetch and not self._is_stopped and not self._is_over:
            self._step()
        with self._changed:
            if self._is_over:
                raise StopIteration
            if not self._wait(self._has_something, self._stall_s):
                self._warn(self._stall_s)
                self._wait(self._has_something)
            if self._is_stopped:
                raise _stopped_error()
            slot = self._slots.popleft()
            self._changed.notify_all()
            return slot

    def _step(self) -> None:
        """Reads and moves one batch, in this thread."""
        start = time.perf_counter()
        slot = self._read()
        took_s = time.perf_counter() - start
        if not slot.is_ready:
            self._place(slot)
            slot.is_ready = True
        self._slots.append(slot)
        if took_s > self._stall_s:
            self._warn(took_s)

    def _read_ahead(self) -> None:
        """Body of the reader: pulls batches while slots are free; returns at the end or a stop."""
        try:
            while self._wait_for_room():
                slot = self._read()
                with self._changed:
                    if self._is_stopped:
                        break
                    self._slots.append(slot)
                    if not slot.is_ready:
                        self._unplaced.append(slot)
                    self._changed.notify_all()
                if slot.is_end or (slot.is_ready and slot.error is not None):
                    break
                del slot  # or this frame would hold the batch while it waits for the next
        finally:
            with self._changed:
                self._is_reading = False
                self._changed.notify_all()
            self._release_source()

    def _place_ahead(self) -> None:
        """Body of a transfer thread: moves batches as they arrive; returns after the last one."""
        while True:
            with self._changed:
                self._wait(lambda: self._is_stopped or self._unplaced or not self._is_reading)
                if not self._unplaced:
                    return
                slot = self._unplaced.popleft()
            self._place(slot)
            with self._changed:
                slot.is_ready = True
                self._changed.notify_all()
            del slot

    @interrupts.waits
    def _read(self) -> Slot:
        """Pulls one batch. If the returned slot is ready, it has no batch to be moved."""
        assert self._source is not None
        start = time.perf_counter()
        slot = Slot(self._num_read)
        try:
            slot.batch = next(self._source)
            self._num_read = slot.number = slot.number + 1
        except StopIteration:
            slot.is_end = True
        except BaseException as error:  # SystemExit too, or the loop would wait forever
            _note_dead_worker(error, self._source)
            slot.error = error
        self._counters.add("read_s", time.perf_counter() - start)
        if slot.error is None:
            slot.state = self._try(slot, self._after_read)
        if slot.is_end and slot.error is None and self._on_end is not None:
            self._try(slot, self._on_end)
        if slot.error is None and not slot.is_end:
            host, slot.batch = slot.batch, None
            slot.batch = self._try(slot, lambda: self._prepare_batch(host, slot.state))
            slot.is_dropped = slot.batch is None
        slot.is_ready = slot.is_end or slot.is_dropped or slot.error is not None
        return slot

    def _place(self, slot: Slot) -> None:
        """Moves a slot's batch to the device."""
        start = time.perf_counter()
        prepared, slot.batch = slot.batch, None
        placed = self._try(slot, lambda: self._place_batch(prepared))
        if placed is not None:
            slot.batch = placed.batch
            self._counters.add("bytes", placed.num_bytes)
        self._counters.add("transfer_s", time.perf_counter() - start)

    def _try(self, slot: Slot, function: Callable[[], Any]) -> Any:
        """The function's result; None if it raised, in which case the slot gets the error."""
        try:
            return function()
        except StopIteration as error:  # would look like the end of the data
            slot.error = RuntimeError(
                "a batch could not be moved to the device: StopIteration was raised on the way"
            )
            slot.error.__cause__ = error
        except BaseException as error:
            slot.error = error
        return None

    def _wait_for_room(self) -> bool:
        """Waits until a slot is free; returns False once the pipeline is stopped."""
        start = time.perf_counter()
        with self._changed:
            self._wait(lambda: self._is_stopped or self._has_room())
            self._counters.add("room_s", time.perf_counter() - start)
            return not self._is_stopped

    def _has_room(self) -> bool:
        if self._reuses_memory and not all(slot.is_ready for slot in self._slots):
            return False
        return len(self._slots) < self._prefetch

    def _has_something(self) -> bool:
        return self._is_stopped or bool(self._slots and self._slots[0].is_ready)

    @interrupts.waits
    def _wait(self, condition: Callable[[], Any], timeout_s: float | None = None) -> bool:
        return bool(self._changed.wait_for(condition, timeout_s))

    def _warn(self, waited_s: float) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        stage = "transfer to the device" if self._slots else "reading from the wrapped loader"
        if not self._prefetch:
            stage = "reading from the wrapped loader"
        warnings.warn(
            f"a training loop should not wait long for a batch; got none within {waited_s:.1f} s, "
            f"in the stage of {stage}. Look at what that waits for; the loader's report() shows "
            "the time of each stage, and stall_warning_s sets the limit.",
            RuntimeWarning,
            stacklevel=_frames_to_the_loop(),
        )

    def _finish(self) -> None:
        """After the last batch: nothing more is read."""
        with self._changed:
            self._is_stopped = True
            self._slots.clear()
            self._unplaced.clear()
            self._changed.notify_all()
        if not self._threads:
            self._release_source()

    def _release_source(self) -> None:
        """Runs a generator's clean-up code and ends a DataLoader's workers now.

        The traceback of an exception may keep the source alive for long.
        """
        with self._changed:
            source, self._source = self._source, None
        if inspect.isgenerator(source):
            source.close()
        # A private name of torch's without a public one. Persistent workers live until the
        # DataLoader is collected.
        shut_down = getattr(source, "_shutdown_workers", None)
        if shut_down is not None and not getattr(source, "_persistent_workers", False):
            shut_down()


def _note_dead_worker(error: BaseException, source: Iterator[Any]) -> None:
    """Adds a note to the error of a lost connection: which worker of a DataLoader died.

    A worker keeps its batches in shared memory until they are fetched, through a socket of its own.
    """
    if not isinstance(error, OSError | EOFError):
        return
    workers = {worker.sentinel: worker for worker in getattr(source, "_workers", ())}
    for sentinel in multiprocessing.connection.wait([*workers], _WORKER_ENDS_S):
        worker = workers[sentinel]
        error.add_note(
            f"DataLoader worker (pid {worker.pid}) ended with exit code {worker.exitcode} before "
            "its batch was read. If that is -9, look whether the host's memory is exhausted."
        )


def _stopped_error() -> RuntimeError:
    return RuntimeError(
        "an iteration ends when its loader is closed or iterated again; got next() on one that has "
        "ended so. "
        "Use the newest iterator of the loader, or wrap the dataset in a second MpDeviceLoader."
    )


def _frames_to_the_loop() -> int:
    """The `stacklevel` of a warning that should name the line of the training loop."""
    return sum(frame.filename.startswith(_FOLDER) for frame in inspect.stack(0))


_FOLDER = __file__.rpartition("pipeline.py")[0]
# Stopped at exit: a thread that runs while Python shuts down may crash it.
# Guarded by: the GIL. Cleared by: never: freed with the iteration.
_running: "weakref.WeakSet[Pipeline]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for pipeline in list(_running):
        pipeline.stop()
    for pipeline in list(_running):
        pipeline.join(_AT_EXIT_S)
