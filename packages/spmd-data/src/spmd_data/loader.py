"""`MpDeviceLoader`: iterates over host batches and yields them on the device, in the same order.

The parts: `sources` knows the position in the wrapped loader, `pipeline` runs the stages in
threads, `placement` moves one batch, `counters` measures the stages.
"""

import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

import spmd_core as spmd
from spmd_core.arguments import checked, require_kind, require_number
from spmd_core.errors import DataError
from spmd_core.marks import process_data
from spmd_core.runtime import interrupts
from spmd_data import counters
from spmd_data.matching import InputSharding, may_give_parts
from spmd_data.pipeline import Pipeline
from spmd_data.placement import BatchPlacement, UnevenBatch, as_target, is_spmd_device
from spmd_data.sources import Source, require_batches, source_of

interrupts.keep_whole(__file__)

_JOIN_TIMEOUT_S = 30.0
MOST_THREADS, MOST_BATCHES = 256, 2**20  # each thread and each batch takes memory


class ScalarWriter(Protocol):
    """An object that writes scalars, such as TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class MpDeviceLoader:
    """Wraps an iterable of batches and yields them on the device, sharded, prefetching the next.

    One batch is one step: `spmd.sync()` sends everything recorded for a batch to the device before
    the next batch is yielded, and after the last one. It does not wait for the device. The training
    loop needs no sync of its own.

    A thread reads the wrapped loader, and others copy its batches from host memory straight to the
    shards. Each `iter()` restarts the wrapped loader and ends the threads of the previous
    iteration. Leaving the loop early also ends them, and a DataLoader's workers; it does not sync.

    `state_dict()` is the position of the training loop, not that of the threads: after
    `load_state_dict`, the next iteration begins with the next batch. A program that asks the
    *wrapped* loader for its state between two batches, as some trainers do, needs `prefetch=0`: the
    wrapped loader is then read in the caller's thread when a batch is requested, never ahead.

    Args:
        loader: iterable of batches. A batch is a tensor, or tuples, lists, dicts, named tuples and
            dataclasses of tensors, nested in any way. Arrays of numpy become tensors. Other values
            pass through. An epoch has at least one batch. Under several processes each one loads
            its own part: see `ShardingSpec.minibatch`.
        device: target device of the tensors. On "cpu" nothing is sharded or synced, so the same
            loop runs in eager torch.
        input_sharding: see `InputSharding`: one `ShardingSpec` for every tensor, a structure like
            the batch's, or a function of path and tensor.
        prefetch: number of batches that may be ahead of the training loop, in host memory or on the
            device; 0 for none, and no threads.
        transfer_threads: threads that move batches to the device. More than one helps if one copy
            does not saturate the connection; then `prefetch` should be larger, too, and `loader`
            must not write to a batch that it has yielded. (With one thread it may: unless it is a
            DataLoader with worker processes, it is asked for the next batch only after the last one
            was copied.)
        batches_per_execution: number of batches whose steps are sent to the device as one program,
            at least 1.
        uneven_batch: what to do with a batch in which the size of a sharded dim is not divisible by
            its number of shards: an `UnevenBatch` or its value.
        stall_warning_s: after how many seconds of waiting for a batch to warn, once in an
            iteration.

    Raises:
        TypeError: `loader` is nothing that gives batches, or `device` is no device.
        DeviceMismatchError: `device` names none, or one that holds no values here.
        DataError: an argument breaks one of the rules above; by `next()`, if an epoch gave no
            batch, such as the second one over a generator, or `uneven_batch` dropped all. (An
            exception of the wrapped loader or of the transfer is raised by the `next()` whose batch
            it prevented, with its own traceback. If a worker process of a DataLoader is killed,
            torch raises in the main thread, which may be in the step; or reading the worker's last
            batch fails with an OSError, whose note names the worker.)

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = MpDeviceLoader(DataLoader(torch.arange(6.0), batch_size=3), "cpu")
        >>> for x in loader:
        ...     print(x.sum(), loader.state_dict()["batches"])
        tensor(3.) 1
        tensor(12.) 2
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str,
        *,
        input_sharding: InputSharding = None,
        prefetch: int = 2,
        transfer_threads: int = 1,
        batches_per_execution: int = 1,
        uneven_batch: UnevenBatch | str = UnevenBatch.KEEP,
        stall_warning_s: float = 60.0,
    ) -> None:
        require_batches(loader)
        self._loader = loader
        rows = getattr(loader, "batch_size", None)
        self._placement = BatchPlacement(
            as_target("device", device),
            input_sharding,
            _checked_policy(uneven_batch),
            full_rows=rows if isinstance(rows, int) else None,
        )
        self._prefetch = _checked_count("prefetch", prefetch, least=0)
        self._transfer_threads = _checked_count(
            "transfer_threads", transfer_threads, most=MOST_THREADS
        )
        self._batches_per_execution = _checked_count("batches_per_execution", batches_per_execution)
        if not require_number("stall_warning_s", stall_warning_s) > 0:
            raise DataError(
                "stall_warning_s must be a number of seconds, more than 0; got "
                f"{stall_warning_s!r}. Pass float('inf') for no warning."
            )
        self._stall_s = min(stall_warning_s, threading.TIMEOUT_MAX)
        self._source = source_of(loader, is_read_ahead=self._prefetch > 0)
        self._counters = counters.Counters()
        self._logged: dict[str, float] | None = None
        self._pipeline: Pipeline | None = None
        self._position: _Position | None = None

    def __len__(self) -> int:
        """Number of batches of the wrapped loader, including any that `uneven_batch` drops."""
        # A loader without a length raises TypeError, as len() should.
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self.close()
        is_spmd = is_spmd_device(self._placement.device)
        # In this thread: a shuffling DataLoader draws its seed from torch's generator, and the
        # order of the draws must not depend on timing.
        batches, state = self._source.begin()
        self._position = _Position(self._source, state)
        # Loops over whole batches are not counted: one process may have some that others lack.
        compares = is_spmd and may_give_parts(self._placement.input_sharding)
        stream = process_data.Stream.of_loop() if compares else process_data.CALLS
        self._pipeline = Pipeline(
            batches,
            lambda batch, noted: self._placement.prepare(
                batch, partial(self._source.row_mask, state, noted), stream
            ),
            self._placement.place,
            after_read=self._source.after_read,
            on_end=stream.end if compares else None,
            on_stop=stream.abandon if compares else None,
            prefetch=self._prefetch,
            transfer_threads=self._transfer_threads,
            counters=self._counters,
            reuses_memory=self._transfer_threads == 1 and not _makes_each_anew(self._loader),
            stall_s=self._stall_s,
        )
        num_unsynced = self._batches_per_execution if is_spmd else None
        device_batches = _DeviceBatches(
            self._pipeline, self._position, self._counters, num_unsynced
        )
        self._pipeline.start()
        return device_batches

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that the training loop got last. Does not wait.

        After the last batch it is the end of the epoch, from which an iteration yields nothing;
        once the loop has ended, it is the beginning of the next epoch, to which a sampler such as
        `ShardedSampler` is then set.

        Returns:
            `format`, `kind` (see the module `sources`), `epoch`; `batches` and `samples` of this
            epoch that the loop got (samples over all processes; None where they are not known);
            `source`: what must be equal on resume, or the state of a wrapped loader that has one.
        """
        return self._source.state() if self._position is None else self._position.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration begin after the batches that `state` counts.

        With a sampler such as `ShardedSampler`, the number of processes may have changed. A torch
        DataLoader over a map-style dataset skips indices; other iterables are read, and their
        batches dropped, with a warning. Ends the running iteration.

        Raises:
            DataError: `state` is of another kind of loader, or of another dataset, seed or batch
                size.
        """
        require_kind("state", state, Mapping, write="what state_dict() returned")
        self.close()
        self._position = None
        self._source.load(state)

    def counters(self) -> dict[str, float]:
        """Sums over all iterations so far: see `spmd_data.counters.Counters`. Does not wait."""
        return self._counters.values()

    @checked(step=0)
    def log(self, writer: ScalarWriter, step: int) -> None:
        """Writes means per batch since the last call as scalars `input/...`. Does not wait.

        They are `read_ms`, `transfer_ms`, `wait_ms`, `step_ms`, `wait_share`, `queue_depth` and
        `megabytes`.
        """
        now = self.counters()
        if not hasattr(writer, "add_scalar"):
            raise TypeError(
                "writer has add_scalar(tag, value, step), as TensorBoard's SummaryWriter; "
                f"got {writer!r}, of type {type(writer).__name__}. Write such an object."
            )
        for name, value in counters.means(now, self._logged).items():
            writer.add_scalar(f"input/{name}", value, step)
        self._logged = now

    def report(self) -> str:
        """A table of the stages' times, and whether the input is the bottleneck. Does not wait."""
        return counters.report(
            self.counters(), prefetch=self._prefetch, transfer_threads=self._transfer_threads
        )

    def close(self) -> None:
        """Ends the running iteration, if any: waits for its threads, drops prefetched batches.

        A thread stops between two batches. A RuntimeWarning is issued if the wrapped loader does
        not return its next batch within 30 s.
        """
        if self._pipeline is None:
            return
        pipeline, self._pipeline = self._pipeline, None
        pipeline.stop()
        if not pipeline.join(_JOIN_TIMEOUT_S):
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


class _Position:
    """The training loop's position in an iteration."""

    def __init__(self, source: Source, state: dict[str, Any]) -> None:
        self._source, self._begin = source, state
        self._last: tuple[int, Any] | None = None
        self._has_ended = False

    def advance(self, number: int, noted: Any) -> None:
        """Records that the loop got the batch of this number."""
        self._last = number, noted

    def refuse_empty(self, num_dropped: int) -> None:
        """See `Source.refuse_empty`; does nothing if the loop got a batch."""
        if self._last is None:
            self._source.refuse_empty(self._begin, num_dropped)

    def end(self) -> None:
        """Records that the loop has got every batch of the epoch."""
        self._has_ended = True
        self._source.end_epoch()

    def state(self) -> dict[str, Any]:
        if self._has_ended:
            return self._source.state()
        if self._last is None:
            return self._source.at_beginning(self._begin)
        return self._source.advanced(self._begin, *self._last)


class _DeviceBatches(Iterator[Any]):
    """The consumer's end of one iteration.

    Only the consumer's loop references this object (the threads and the loader reference the
    pipeline), so leaving the loop collects the object, which ends the threads.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        position: _Position,
        sums: counters.Counters,
        batches_per_execution: int | None,
    ) -> None:
        self._pipeline, self._position, self._sums = pipeline, position, sums
        # None: the device is eager, there is nothing to sync.
        self._batches_per_execution = batches_per_execution
        self._num_unsynced = 0
        self._given_at_s: float | None = None
        weakref.finalize(self, pipeline.stop)

    def __next__(self) -> Any:
        # Sync before waiting for data, so that the device does not idle meanwhile.
        if self._num_unsynced == self._batches_per_execution:
            self._sync()
        asked_s = time.perf_counter()
        is_first = self._given_at_s is None
        if self._given_at_s is not None:
            self._sums.add("step_s", asked_s - self._given_at_s)
            self._sums.add("ready", self._pipeline.num_ready())
            self._sums.add("requests", 1)
        try:
            slot = self._pipeline.get()
        finally:
            self._given_at_s = time.perf_counter()
            waited_s = self._given_at_s - asked_s
            self._sums.add("first_wait_s" if is_first else "wait_s", waited_s)
        if slot.is_end:
            self._position.refuse_empty(slot.number)
            if self._num_unsynced and self._batches_per_execution is not None:
                self._sync()
            self._position.end()
            raise StopIteration
        self._position.advance(slot.number, slot.state)
        self._sums.add("batches", 1)
        self._num_unsynced += 1
        return slot.batch

    def _sync(self) -> None:
        self._num_unsynced = 0
        # A `StepTrace` around the step has already synced at its end.
        if not spmd.debugging.profiler.take_step_mark():
            spmd.sync()


def _makes_each_anew(loader: Iterable[Any]) -> bool:
    """Whether no batch of a loader reuses the memory of an earlier one."""
    # A batch of a worker process comes in shared memory of its own.
    return isinstance(loader, DataLoader) and loader.num_workers > 0


def _checked_count(name: str, value: int, *, least: int = 1, most: int = MOST_BATCHES) -> int:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not least <= value <= most:
        what = "threads" if name == "transfer_threads" else "batches"
        limit = f"at most {most}" if is_int and value > most else f"at least {least}"
        raise DataError(
            f"{name} must be a whole number of {what}, {limit}; got {value!r}. "
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
