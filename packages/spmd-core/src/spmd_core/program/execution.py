"""The cut: computes all pending tensors that are still referenced, in one program."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import jax
import torch

from spmd_core import counters
from spmd_core.config import config
from spmd_core.errors import ProcessError
from spmd_core.graph import recorders
from spmd_core.graph.recorders import lock
from spmd_core.graph.repetition import result_of
from spmd_core.graph.storage import Storage, take_pending
from spmd_core.graph.values import Value
from spmd_core.program import (
    absent_programs,
    automatic,
    growing_sizes,
    index_checks,
)
from spmd_core.program.absent_programs import AbsentProgram, Ready
from spmd_core.program.alike_draws import alike_draws
from spmd_core.program.cut_guard import this_thread
from spmd_core.program.leaves import (
    array_of,
    convert,
    device_placement,
    move,
    refuse_local,
)
from spmd_core.program.one_program import execute
from spmd_core.program.planning import collect
from spmd_core.program.program_graph import padded_shape
from spmd_core.program.refused_reads import refuse_inside, refuse_stand_in
from spmd_core.runtime import abstract, buffers, in_flight, interrupts

Result = TypeVar("Result")
# Each gives a context manager around the cut that ends a step, or None; they are exited even if the
# cut fails. Modules of upper layers register here to take part in every step.
# Guarded by: imports. Cleared by: never.
around_step: list[Callable[[], AbstractContextManager[None] | None]] = []


def cut(*, wait: bool = False, wanted: Storage | None = None) -> None:
    """Computes all pending tensors of this thread that are still referenced, in one program.

    Many tensors that are drawn alike, as the weights of a model, are drawn by another one, which
    runs once for each.

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
    if this_thread.in_place_of_cut is not None:
        this_thread.in_place_of_cut(wanted)
        return
    interrupts.protect()
    # Not where the thread is inside of an operation, which others must not see half done.
    compiles_apart = abstract.run() is None and automatic.search is None and not recorders.is_held()
    ready: Ready | None = {} if compiles_apart else None
    with lock, counters.timed(counters.Activity.PLANNING):
        absent = _start(wanted, ready)
        while absent and ready is not None:
            try:
                ready |= absent_programs.compile_all(absent)
            except BaseException as error:
                for one in absent:
                    growing_sizes.forget(one.planned.one_by_one or one.planned.key)
                if isinstance(error, Exception) and not isinstance(error, ProcessError):
                    _execute_apart(take_pending(), error, wanted)
                    break
                raise  # everything is pending
            absent = _start(wanted, ready, is_first=False)
    if wait:
        in_flight.programs.wait_all()
        index_checks.raise_if_found()


def _start(
    wanted: Storage | None, ready: Ready | None, *, is_first: bool = True
) -> list[AbsentProgram]:
    """Starts the programs of a cut.

    Args:
        wanted: see `cut`.
        ready: programs that were compiled for this cut; None: what is missing is compiled at once.
        is_first: whether nothing was compiled for this cut yet.

    Returns:
        The programs that are to be compiled first. If there are any, what is not computed by now is
        pending as before.
    """
    live = take_pending()
    guard = this_thread.cut_guard
    try:
        if live and guard is not None:
            guard.before_cut()
        now = automatic.ready(live, wanted)
    except BaseException:
        _request(live)
        raise
    live = now
    if not live:
        return []
    if is_first:
        _count_cut()
    absent: list[AbsentProgram] = []
    try:
        # A region of `steps.compile` has one program.
        for group in () if guard is not None else alike_draws(live):
            for storage in group:
                one = execute([storage], donates=False, grows=False, ready=ready)
                if one is not None:  # and so do the others of the group
                    absent.append(one)
                    break
        if not absent:
            one = execute(_missing(live), ready=ready)
            absent = [] if one is None else [one]
    except ProcessError:  # nothing was started, and smaller programs would not help
        _request(live)
        raise
    except Exception as error:
        _execute_apart(_missing(live), error, wanted)
    except BaseException:  # an interruption: everything stays pending
        _request(live)
        raise
    if absent:
        _request(_missing(live))
    return absent


def compute_apart(storages: list[Storage]) -> None:
    """Computes pending storages by programs of their own; all others stay pending.

    Call it under the graph lock. Does not wait.

    Raises:
        DeviceMemoryError, ProgramError: a program could not be compiled or run.
    """
    for group in alike_draws(storages):
        for storage in group:
            execute([storage], donates=False, grows=False)
    execute(_missing(storages), donates=False, grows=False)


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
    managers = [manager for make in around_step if (manager := make()) is not None]
    if not managers:
        return run()
    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        return run()


def _missing(live: list[Storage]) -> list[Storage]:
    """Those of these storages that are still pending."""
    return [storage for storage in live if storage.value.data is None]


def _execute_apart(live: list[Storage], error: Exception, wanted: Storage | None) -> None:
    """After the common program of these storages failed, runs one program for each group.

    Raises the error of the group that contains `wanted`; without `wanted`, that of the first group
    that fails.
    """
    groups = _groups(live)
    # A region of `steps.compile` has one program.
    if len(groups) == 1 or this_thread.cut_guard is not None:
        for storage in live:
            storage.fail()
        raise error
    counters.count("cuts_run_apart")
    raised = None
    waiting = list(groups)
    try:
        for group in groups:
            try:
                execute(group, donates=False)  # the others may read the same leaves
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
            f"The other tensors that were pending, {len(groups) - 1} group(s) of them, ran apart."
        )
        raise raised


def _groups(live: list[Storage]) -> list[list[Storage]]:
    """The storages in groups that share no pending operation, in the given order."""
    group_of: dict[Value, list[Storage]] = {}
    groups: list[list[Storage]] = []
    for storage in live:
        nodes, _ = collect([storage])
        merged = [storage]
        for node in nodes:
            other = group_of.get(node)
            if other is not None and other is not merged:
                groups = [g for g in groups if g is not other]
                other.extend(merged)
                for known, group in group_of.items():
                    if group is merged:
                        group_of[known] = other
                merged = other
            group_of[node] = merged
        groups = [*(g for g in groups if g is not merged), merged]
    return groups


def materialize(storage: Storage) -> Value:
    """The storage's value, computed by a cut if it is pending."""
    refuse_inside()
    with lock:
        is_pending = storage.value.data is None
        if is_pending:
            storage.request()
    if is_pending:
        cut(wanted=storage)
    with lock:
        if storage.value.data is None and this_thread.in_place_of_cut is None:
            storage.request()  # another thread has written to it meanwhile
            cut(wanted=storage)
        refuse_stand_in(storage.value)
        return storage.value


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
