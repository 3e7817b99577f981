"""Runs one program of a cut: plans it, finds or compiles it, starts it, and stores its results."""

from spmd_core import counters
from spmd_core.config import config
from spmd_core.graph.stacks import StackStorage, any_made
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value
from spmd_core.program import (
    compile_cache,
    fingerprint,
    growing_sizes,
    index_checks,
    initial_state,
    layer_stacks,
    planned_program,
    stacked_state,
    start,
    verification,
)
from spmd_core.program.absent_programs import AbsentProgram, Found, Ready
from spmd_core.program.cut_guard import this_thread
from spmd_core.program.leaves import convert, marked_placement, move
from spmd_core.program.lost import refuse_lost
from spmd_core.program.planned_program import PlannedProgram
from spmd_core.program.planning import CutPlan, plan
from spmd_core.program.program import Program
from spmd_core.program.refused_reads import refuse_stand_in
from spmd_core.runtime import abstract


def execute(
    live: list[Storage], *, donates: bool = True, grows: bool = True, ready: Ready | None = None
) -> AbsentProgram | None:
    """Starts the program that computes these storages, if any, and stores its results.

    Args:
        live: the storages.
        donates: whether no other pending operation reads the same leaves, so that this program may
            take over their buffers.
        grows: whether its sizes may be some of many that share a program.
        ready: programs that were compiled for this cut; None: what is missing is compiled at once.

    Returns:
        The program, if it is to be compiled first. Then nothing has changed.
    """
    if not live:
        return None
    guard = this_thread.cut_guard
    planned = plan(
        live,
        label=_program_label(),
        donates=donates,
        call=None if guard is None else guard.call(),
        grown=_bounded if grows else None,
    )
    live = planned.live
    read = [*planned.leaves, *planned.state.sources, *planned.stacked.sources]
    for leaf in read:
        refuse_stand_in(leaf)
        refuse_lost(leaf)
    if guard is not None:
        guard.before_program(planned.key)
    packed = start.by_kind(planned.numbers)
    found = _find_program(planned, packed, grows, ready)
    if isinstance(found, AbsentProgram):
        return found
    program, bounded = found
    if guard is not None:
        guard.after_program(planned.key)
    leaves, targets = planned.leaves, planned.targets if bounded is None else bounded.targets
    if any_made():
        stacked_state.take_out(leaves)
    if planned.stacked.new:
        stacked_state.make(planned.stacked, dict(zip(leaves, targets)))
        layer_stacks.note_made(planned.stacked.new.values())
    if planned.state.inputs:
        initial_state.make(planned.state, leaves, targets, program.graph, program.record)
    arrays = [
        leaf.data if leaf.placement is target else convert(leaf, target)
        for leaf, target in zip(leaves, targets)
    ]
    lines = [planned.line(check.position) for check in program.index_checks]
    results = start.start(program, read, arrays, packed, lines)
    checked = index_checks.stamp()
    is_verified = config.verify_programs and len(planned.key.device_ids) > 1
    if is_verified and isinstance(program, Program):
        verification.verify(program, packed, arrays, results)
    donated = planned.key.donated
    if donated:
        counters.count("donated_bytes", sum(leaves[i].spec.num_bytes for i in donated))
    for storage, array, placement in zip(live, results, program.out_placements):
        if isinstance(storage, StackStorage):
            stacked_state.settle(storage, array, placement, checked)
        else:
            storage.value.settle(array, placement, None)
            _commit(storage, storage.value)
    for storage, leaf in planned.state.held.items():
        _commit(storage, leaf)
    if checked is not None:
        for storage in (*live, *planned.state.held):
            storage.value.checked = checked
    if guard is not None and guard.after_start is not None and isinstance(program, Program):
        guard.after_start(planned, program)
    return None


def _find_program(
    planned: CutPlan, packed: start.Numbers, grows: bool, ready: Ready | None
) -> Found | AbsentProgram:
    """The program of a cut, from the cache or newly compiled; that which is to be compiled first.

    Args:
        planned: the cut's plan.
        packed: its numbers; one for growing sizes is added.
        grows, ready: as for `execute`.
    """
    key, bounded = planned.key, None
    known = None if ready is None else ready.get(key)
    if known is not None:
        if known[1] is not None:
            packed[1].append(known[1].number)
        return known
    program: Program | PlannedProgram | None
    if abstract.run() is not None:
        program = planned_program.of(key, lambda: planned.graph(), planned.name)
    else:
        program = compile_cache.cached(key)
    try:
        if program is None:
            if planned.one_by_one is not None:
                bounded = planned.bounded
            elif grows:
                bounded = _bounded(planned)
            if bounded is not None:
                key = bounded.key
                packed[1].append(bounded.number)
                program = compile_cache.cached(key)
        if abstract.run() is None and config.compare_processes_every_s is not None:
            fingerprint.note(key, program, packed)
        if program is None and planned.one_by_one is not None and bounded is None:
            growing_sizes.note_folded(planned.one_by_one, planned.key)
        if program is None and ready is not None:
            return AbsentProgram(planned, bounded)
        if program is None:
            program = planned.program() if bounded is None else bounded.program(planned.name)
    except BaseException:
        growing_sizes.forget(planned.one_by_one or planned.key)
        raise
    return program, bounded


def _program_label() -> str:
    """The prefix of the names of programs."""
    return "spmd" if this_thread.cut_guard is None else this_thread.cut_guard.label


def _bounded(planned: CutPlan) -> growing_sizes.Bounded | None:
    """The program for growing sizes that computes a cut; None if it needs its own program."""
    if (
        this_thread.cut_guard is not None
        or not config.bound_growing_sizes
        or config.verify_programs
        or planned.rewrite is not None
    ):
        return None
    return growing_sizes.find_program(planned.key, planned.graph)


def _commit(storage: Storage, value: Value) -> None:
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
