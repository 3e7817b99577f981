"""Finds, compiles and starts the program of one cut, and stores its results."""

from typing import Any

import jax

from spmd_core import counters
from spmd_core.config import config
from spmd_core.errors import ProgramError
from spmd_core.graph.stacks import Row, StackStorage
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value, line_of
from spmd_core.program import (
    compile_cache,
    fingerprint,
    growing_sizes,
    index_checks,
    initial_state,
    planned_program,
    stacked_state,
    start,
    verification,
)
from spmd_core.program.compile_cache import Compilation, Key
from spmd_core.program.cut_guard import this_thread
from spmd_core.program.leaves import convert, marked_placement, move
from spmd_core.program.planned_program import PlannedProgram
from spmd_core.program.planning import CutPlan, plan
from spmd_core.program.program import Program
from spmd_core.program.refused_reads import refuse_stand_in
from spmd_core.runtime import abstract
from spmd_core.runtime.abstract import AbstractArray

# What was compiled without the lock for a cut, by the key of its plan.
Made = dict[Key, tuple[Compilation, growing_sizes.Bounded | None]]


def execute(
    live: list[Storage],
    *,
    donates: bool = True,
    made: Made | None = None,
    leaves_lock: bool = False,
    starts: bool = True,
) -> Compilation | None:
    """Starts the program that computes these storages, and stores its results.

    Args:
        live: the storages.
        donates: whether no other pending operation reads the same leaves, so that this program may
            take over their buffers.
        made: what was compiled for this cut without the lock; a compilation is added to it.
        leaves_lock: whether to return what is to be compiled, and to start nothing then.
        starts: whether to start a program that is there; if not, this only looks for it.

    Returns:
        The compilation to run before; None if the program was started.
    """
    guard, made = this_thread.cut_guard, {} if made is None else made
    is_captured = guard is not None and guard.after_start is not None
    planned = plan(
        live,
        label=_program_label(),
        donates=donates,
        is_captured=is_captured,
        returned=() if guard is None else guard.returned(),
    )
    leaves, targets, numbers = planned.leaves, planned.targets, planned.numbers
    read = [*leaves, *planned.state.sources, *planned.stacked.sources]
    _require_data(read)
    if guard is not None:
        guard.before_program(planned.key)
    floats, ints, complexes = start.by_kind(numbers)
    program: Program | PlannedProgram | None
    if abstract.run() is not None:
        program = planned_program.of(planned.key, lambda: planned.graph(), planned.name)
    else:
        program = compile_cache.cached(planned.key)
    key, bounded = planned.key, None
    compilation, known = made.get(planned.key, (None, None))
    try:
        if program is None:
            bounded = known if compilation is not None else _bounded(planned)
            if bounded is not None:
                key, targets = bounded.key, bounded.targets
                ints.append(bounded.number)
                program = compile_cache.cached(key)
        if abstract.run() is None and config.compare_processes_every_s is not None:
            fingerprint.note(key, program, (floats, ints, complexes))
        if program is None and compilation is not None:
            program = compilation.result()
        if program is None and leaves_lock:
            compilation = _compilation(planned, bounded)
            made[planned.key] = compilation, bounded
            return compilation
        if not starts:
            return None
        if program is None:
            program = planned.program() if bounded is None else bounded.program(planned.name)
    except BaseException:
        growing_sizes.forget(planned.key)
        raise
    if guard is not None:
        guard.after_program(planned.key)
    if planned.stacked.new:
        stacked_state.make(planned.stacked, dict(zip(leaves, targets)))
    if planned.state.inputs:
        initial_state.make(planned.state, leaves, targets, program.graph, program.record)
    arrays = [
        leaf.data if leaf.placement is target else convert(leaf, target)
        for leaf, target in zip(leaves, targets)
    ]
    lines = [line_of(planned.nodes[check.position]) for check in program.index_checks]
    results = start.start(program, read, arrays, (floats, ints, complexes), lines)
    checked = index_checks.stamp()
    is_verified = config.verify_programs and len(planned.key.device_ids) > 1
    if is_verified and isinstance(program, Program):
        verification.verify(program, (floats, ints, complexes), arrays, results)
    donated = planned.key.donated
    if donated:
        counters.count("donated_bytes", sum(leaves[i].spec.num_bytes for i in donated))
    _store(planned, program, results, checked)
    if guard is not None and guard.after_start is not None and isinstance(program, Program):
        guard.after_start(planned, program)
    return None


def _require_data(read: list[Value]) -> None:
    """Raises for leaves without data: stand-ins, and what a failed program took over."""
    for leaf in read:
        refuse_stand_in(leaf)
        if is_deleted(leaf):
            raise ProgramError(
                f"the data of a {leaf.spec!r} tensor was donated to a program that failed after "
                "its start, so it is lost with all that was computed from it. Load these tensors "
                "again, for instance from a checkpoint."
            )


def _store(
    planned: CutPlan,
    program: Program | PlannedProgram,
    results: list[Any],
    checked: tuple[int, Any] | None,
) -> None:
    """Makes a program's results the values of the storages.

    Args:
        planned: the plan.
        program: the program that was started.
        results: its results.
        checked: the stamp of its index checks.
    """
    for storage, array, placement in zip(planned.live, results, program.out_placements):
        if isinstance(storage, StackStorage):
            stacked_state.settle(storage, array, placement, checked)
        else:
            storage.value.settle(array, placement, None)
            commit(storage, storage.value)
    for storage, leaf in planned.state.held.items():
        commit(storage, leaf)
    if checked is not None:
        for storage in (*planned.live, *planned.state.held):
            storage.value.checked = checked


def _compilation(planned: CutPlan, bounded: growing_sizes.Bounded | None) -> Compilation:
    """The compilation of a cut's program, which runs without the lock."""
    if bounded is None:
        return Compilation.of(planned.key, planned.graph, planned.name)
    return Compilation.of(bounded.key, lambda: bounded.graph, bounded.name(planned.name))


def _program_label() -> str:
    """The prefix of the names of programs."""
    return "spmd" if this_thread.cut_guard is None else this_thread.cut_guard.label


def _bounded(planned: CutPlan) -> growing_sizes.Bounded | None:
    """The program for growing sizes that computes a cut; None if it needs its own program."""
    if (
        this_thread.cut_guard is not None
        or not config.bound_growing_sizes
        or config.verify_programs
    ):
        return None
    return growing_sizes.find_program(planned.key, planned.graph)


def commit(storage: Storage, value: Value) -> None:
    """Makes a leaf the storage's computed value, resharded if the mark has other devices."""
    sharding = storage.sharding
    placement = value.placement
    if (
        sharding is not None
        and placement.manual is None
        and placement.with_room(None) is not marked_placement(sharding)
    ):
        move(value, marked_placement(sharding))
    storage.write(value)


def is_deleted(value: Value) -> bool:
    """Whether the value's buffer was donated to a program that failed."""
    data = value.data.stack.value.data if value.data.__class__ is Row else value.data
    return isinstance(data, (jax.Array, AbstractArray)) and data.is_deleted()
