"""The cut: computes all pending tensors that are still referenced, in one program."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import torch

from spmd_core import counters
from spmd_core.config import config
from spmd_core.errors import ProcessError
from spmd_core.graph import recorders
from spmd_core.graph.recorders import lock
from spmd_core.graph.repetition import result_of
from spmd_core.graph.storage import Storage, take_failed, take_pending
from spmd_core.graph.values import Value
from spmd_core.program import compile_cache, growing_sizes, index_checks
from spmd_core.program.compile_cache import Compilation
from spmd_core.program.cut_guard import this_thread
from spmd_core.program.cut_program import Made, execute, is_deleted
from spmd_core.program.leaves import (
    array_of,
    convert,
    device_placement,
    move,
    refuse_local,
)
from spmd_core.program.planning import groups
from spmd_core.program.program_graph import padded_shape
from spmd_core.program.refused_reads import refuse_inside, refuse_stand_in
from spmd_core.runtime import abstract, buffers, in_flight, interrupts, watch

Result = TypeVar("Result")
# How often a cut compiles without the lock before it keeps the others out.
_MOST_WITHOUT_LOCK = 4
# Context managers around the cut that ends a step; they are exited even if the cut fails. Modules
# of upper layers register here to take part in every step.
# Guarded by: imports. Cleared by: never.
around_step: list[Callable[[], AbstractContextManager[None]]] = []


def cut(*, wait: bool = False, wanted: Storage | None = None) -> None:
    """Computes all pending tensors of this thread that are still referenced, in one program.

    Pending tensors of threads that have ended are computed, too, and so are the values that all of
    these depend on, whichever thread recorded them. Does not wait for the devices unless `wait` is
    true.

    If the program fails, tensors that share no pending operation are computed by separate programs,
    so that a failure affects only the tensors that it concerns. These stay pending, with every
    write that was made to them: later cuts leave them out, and reading one tries again.

    Args:
        wait: whether to wait until the devices are done.
        wanted: a storage that is about to be read. If given, only a failure of its own program
            raises.

    Raises:
        DeviceMemoryError, ProgramError: a program could not be compiled or run.
        IndexRangeError: with `wait`, a program under `config.check_indices` found an index outside
            its dim.
        ProcessError: another process failed, or does not start the same program.
    """
    refuse_inside()
    interrupts.protect()
    attempts = _Attempts()
    try:
        while True:
            leaves_lock = attempts.number < _MOST_WITHOUT_LOCK and _can_leave_lock()
            with lock, counters.timed(counters.Activity.PLANNING):
                missing = _cut(wanted, attempts, leaves_lock=leaves_lock)
            if not missing:
                break
            compile_cache.run(missing)
    except BaseException:
        attempts.forget_sizes()
        raise
    finally:
        attempts.clear()
    if wait:
        in_flight.programs.wait_all()
        index_checks.raise_if_found()


@dataclass
class _Attempts:
    """What a cut has tried so far. Between two attempts, other threads may change what is pending.

    Attributes:
        number: the number of attempts.
        made: what was compiled, by the key of the plan.
        failed: the pending values whose common program failed, by storage, and its error.
    """

    number: int = 0
    made: Made = field(default_factory=dict)
    failed: tuple[dict[Storage, Value], Exception] | None = None

    def error_of(self, live: list[Storage]) -> Exception | None:
        """Why the common program of these storages failed; None if it was not tried."""
        if self.failed is None or self.failed[0] != {s: s.value for s in live}:
            return None
        return self.failed[1]

    def forget_sizes(self) -> None:
        """After an interruption: no other size is compared with those that were not compiled."""
        with lock:
            for key in self.made:
                growing_sizes.forget(key)

    def clear(self) -> None:
        """Drops the errors, which refer to frames that refer to them."""
        self.failed = None
        for compilation, _ in self.made.values():
            compilation.forget_error()


def _can_leave_lock() -> bool:
    """Whether a cut may let other threads go on while it compiles.

    Not if this thread holds the lock, for instance in the middle of an operation that reads a value
    on the host. Processes start their programs in one order, which no second thread may change.
    """
    is_owned: bool = lock._is_owned()  # type: ignore[attr-defined]
    return not is_owned and abstract.run() is None and watch.watch is None


def _cut(wanted: Storage | None, attempts: _Attempts, *, leaves_lock: bool) -> list[Compilation]:
    """Starts the program of this thread's pending tensors, unless it is to be compiled before.

    Args:
        wanted: as for `cut`.
        attempts: what was tried so far.
        leaves_lock: whether to return what is to be compiled. If not, it is compiled here.

    Returns:
        What is to be compiled, at the same time. Everything is pending then.
    """
    live = take_pending()
    try:
        if live and this_thread.cut_guard is not None:
            this_thread.cut_guard.before_cut()
    except BaseException:
        _request(live)
        raise
    if not live:
        return []
    if not attempts.number:
        _count_cut()
    attempts.number += 1
    error = attempts.error_of(live)
    try:
        if error is None:
            others = leaves_lock and threading.active_count() > 1
            missing = execute(live, made=attempts.made, leaves_lock=others)
            if missing is not None:
                _request(live)
            return [] if missing is None else [missing]
    except ProcessError:  # nothing was started, and smaller programs would not help
        _request(live)
        raise
    except Exception as found:
        error = found
    except BaseException:  # an interruption: everything stays pending
        _request(live)
        raise
    try:
        assert error is not None
        return _execute_apart(live, error, wanted, attempts, leaves_lock=leaves_lock)
    finally:
        del error  # its traceback refers to this frame


def cut_pieces(live: list[Storage], nodes: list[Value], positions: list[int], period: int) -> None:
    """Computes the first pending operations, which repeat themselves, one repetition at a time.

    All repetitions have the same operations, so that they share one program. Does not wait.

    Args:
        live: the pending storages.
        nodes: all operations that they need, in the order of recording.
        positions: where each repetition ends, ascending; operations after the last one stay
            pending.
        period: the number of operations after which they repeat.

    Raises:
        DeviceMemoryError, ProgramError: a program could not be compiled or run. All repetitions
        that did not run are still pending.
    """
    position_of = {node: i for i, node in enumerate(nodes)}
    last_use: dict[Value, int] = {}
    for i, node in enumerate(nodes):
        for value in node.inputs:
            last_use[value] = i
    holder = {s.value: s for s in live}
    # Intermediate loop state is sharded like the final state that the same operation computes.
    alike: dict[tuple[int, int, Any], Storage] = {}
    for s in live:
        node, index = result_of(s.value)
        alike[position_of[node] % period, index, node.entry] = s
    passing: list[list[Storage]] = [[] for _ in positions]
    for value in {**last_use, **dict.fromkeys(holder)}:
        node, index = result_of(value)
        made = position_of.get(node)
        if made is None or made >= positions[-1]:
            continue
        piece = bisect_right(positions, made)
        if value in holder:
            passing[piece].append(holder[value])
        elif last_use[value] >= positions[piece]:
            state = Storage(value, value.spec)
            like = alike.get((made % period, index, node.entry))
            if like is not None:
                state.sharding, state.committed = like.sharding, like.committed
            passing[piece].append(state)
    for storages in passing:
        if storages:
            _count_cut()
            counters.count("automatic_cuts")
            with counters.timed(counters.Activity.PLANNING):
                # A later repetition may read the same leaves.
                execute(
                    sorted(storages, key=lambda s: position_of[result_of(s.value)[0]]),
                    donates=False,
                )
            storages.clear()


def roll_back() -> int:
    """Drops pending writes whose programs failed in this thread.

    The tensors then have the values that they had after the last cut. This is for code that catches
    an error and continues, for instance with a smaller batch after memory ran out. Without this
    call the writes stay pending, and whatever reads them fails again. New tensors, which have no
    earlier value, stay pending. Does not wait.

    Returns:
        The number of tensors that have an earlier value again.
    """
    with lock:
        count = 0
        for storage in take_failed():
            before = storage.committed
            if before is None or is_deleted(before):
                storage.fail()
            else:
                storage.write(before)
                count += 1
        return count


def _count_cut() -> None:
    counters.count("cuts")
    recorders.current().num_cuts += 1


def _request(live: list[Storage]) -> None:
    for storage in live:
        storage.request()


def end_step(*, wait: bool = False) -> None:
    """The cut that ends a step: `cut` inside the context managers of `around_step`."""
    in_step(lambda: cut(wait=wait))


def in_step(run: Callable[[], Result]) -> Result:
    """What `run()` returns, which starts a step's program, inside those of `around_step`."""
    counters.count("steps")
    with ExitStack() as stack:
        for enter in around_step:
            stack.enter_context(enter())
        return run()


def _execute_apart(
    live: list[Storage],
    error: Exception,
    wanted: Storage | None,
    attempts: _Attempts,
    *,
    leaves_lock: bool,
) -> list[Compilation]:
    """After the common program of these storages failed, runs one program for each group.

    Raises the error of the group that contains `wanted`; without `wanted`, that of the first group
    that fails.

    Args:
        live: the storages.
        error: why their common program failed.
        wanted, attempts, leaves_lock: as for `_cut`.

    Returns:
        What is to be compiled before. Nothing was started then.
    """
    found = groups(live)
    # A region of `steps.compile` has one program.
    if len(found) == 1 or this_thread.cut_guard is not None:
        for storage in live:
            storage.fail()
        raise error
    missing = _missing(found, attempts.made) if leaves_lock else []
    if missing:
        attempts.failed = {s: s.value for s in live}, error
        _request(live)
        return missing
    counters.count("cuts_run_apart")
    raised = None
    waiting = list(found)
    try:
        for group in found:
            try:
                # The others may read the same leaves.
                execute(group, donates=False, made=attempts.made)
            except Exception as again:
                for storage in group:
                    storage.fail()
                if wanted in group or (wanted is None and raised is None):
                    raised = again
            waiting.remove(group)
    except BaseException:
        _request([storage for group in waiting for storage in group])
        raise
    if raised is not None:
        raised.add_note(
            f"The other tensors that were pending, {len(found) - 1} group(s) of them, ran apart."
        )
        raise raised
    return []


def _missing(found: list[list[Storage]], made: Made) -> list[Compilation]:
    """What is to be compiled before each of these groups can run."""
    missing = []
    try:
        for group in found:
            with suppress(Exception):  # it is raised again when the group runs
                missing.append(
                    execute(group, donates=False, made=made, leaves_lock=True, starts=False)
                )
    except BaseException:
        _request([storage for group in found for storage in group])
        raise
    return [each for each in missing if each is not None]


def materialize(storage: Storage) -> Value:
    """The storage's value, computed by a cut if it is pending."""
    refuse_inside()
    while True:
        leaves_lock = _can_leave_lock()
        with lock:
            if storage.value.data is None:
                storage.request()
                if not leaves_lock:
                    cut(wanted=storage)
            if storage.value.data is not None:
                refuse_stand_in(storage.value)
                return storage.value
        cut(wanted=storage)  # again if another thread has written it meanwhile


def to_host(storage: Storage) -> torch.Tensor:
    """The storage's values, without padding, as a new CPU tensor.

    Cuts if they are pending, and waits for the device.

    Raises:
        IndexRangeError: a program under `config.check_indices` found an index outside its dim.
    """
    value = materialize(storage)
    if value.placement.jax_sharding is None:
        return value.data.clone()
    refuse_local(value)
    host = buffers.download(array_of(value), value.spec.shape)
    raise_if_wrong(value)
    return host


def raise_if_wrong(value: Value) -> None:
    """Raises for indices outside their dim, of programs up to the one that made a computed value.

    Raises:
        IndexRangeError: a program under `config.check_indices` found one.
    """
    index_checks.raise_if_found(*getattr(value, "checked", (0, None)))


def upload(storage: Storage) -> None:
    """Starts the transfer of data that is still on the host; does nothing for other data.

    Other threads may record meanwhile.
    """
    value = storage.value
    if value.data is None or value.placement.jax_sharding is not None:
        return
    refuse_stand_in(value)
    host, placement = value.data, value.placement
    target = device_placement(placement.sharding)
    array = buffers.upload(host, target.device_sharding, padded_shape(value.spec, target.sharding))
    with lock:
        # Meanwhile, another thread may have marked the value again, or a program uploaded it.
        if value.placement is placement:
            value.data, value.placement = array, target


def place(storage: Storage) -> jax.Array:
    """The storage's device array; starts the upload if the data is still on the host."""
    value = materialize(storage)
    if value.placement.jax_sharding is None:
        with lock:
            convert(value, device_placement(value.placement.sharding))
    refuse_local(value)
    if value.placement.room is not None:
        with lock:
            move(value, value.placement.with_room(None))
    return array_of(value)


@contextmanager
def verify() -> Iterator[None]:
    """Inside the block, every program over several devices is compared with itself on one device.

    A difference beyond rounding raises `VerificationError`, which names the first operation that
    differs, its layouts and its source line. The tensors stay pending, as after any program that
    failed. Indices are checked, too (`config.check_indices`). Pending tensors are computed at the
    end of the block. This is for programs that are suspected to be wrong, and for tests: it takes
    the memory of all tensors on one device and a second compilation, and waits for each program. A
    program with a manual region is left out, with a warning.

    Example:
        >>> import torch, spmd_core as spmd
        >>> with spmd.debugging.verify():
        ...     total = torch.ones(3, device="xla").sum().item()
        >>> total
        3.0
    """
    names = ("verify_programs", "check_indices", "record_source_lines")
    before = {name: getattr(config, name) for name in names}
    for name in names:
        setattr(config, name, True)
    try:
        yield
        cut(wait=True)
    finally:
        for name, value in before.items():
            setattr(config, name, value)
