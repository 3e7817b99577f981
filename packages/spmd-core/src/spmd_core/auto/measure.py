"""Measures candidates: their programs run in turns on the devices, on copies of the step's inputs.

A model of costs is not exact enough to tell the best few candidates apart: they often differ by
less than a hundredth in what is modelled, and by a tenth in time.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import torch

from spmd_core import dtypes
from spmd_core.auto.looped_step import Looped, LoopedStep
from spmd_core.auto.marked_graph import Shardings, marked
from spmd_core.auto.recorded_step import RecordedStep
from spmd_core.auto.step_graph import updated
from spmd_core.auto.tried import Tried
from spmd_core.errors import AutoShardingError, DeviceMemoryError
from spmd_core.graph.placement import Placement
from spmd_core.graph.recorders import lock
from spmd_core.graph.stacks import row_sharding
from spmd_core.graph.values import Spec, Value
from spmd_core.program import leaves, start
from spmd_core.program.compilation import build
from spmd_core.program.initial_state import Beginning
from spmd_core.program.leaves import row_placement
from spmd_core.program.program import Program
from spmd_core.program.program_graph import Leaf, stored_shape
from spmd_core.runtime import agreement, buffers, devices, in_flight
from spmd_core.runtime.constants import Constant, arrays_of

# Each turn begins with a run that is not measured: its memory and its caches are new.
_RUNS = 3
# After how many turns a candidate that takes more than so many times as long as the best one runs
# no more; the others run so many turns at most.
_TURNS, _CLOSE = 12, ((1, 1.5), (4, 1.08), (8, 1.04))
# After four turns none begins that much later.
_MOST_S = 60
# Times that differ by no more, relatively, are the same: they were seen in another order where the
# programs ran in processes of their own.
_CLOSE_AS_MEASURED = 1.02
# The threads of a CPU device spin for a while after their work, on the cores of the next program.
_SETTLE_S = 0.1


def measured(
    recorded: RecordedStep,
    tried: Sequence[Tried],
    *,
    made: Mapping[Shardings, Program],
    memory: int | None,
    report: Callable[[str], None],
) -> list[Tried]:
    """The candidates with the seconds that their programs take, the fastest one first.

    Among those that are as fast, by what can be measured, the compiled figures decide.

    Only those that were compiled and fit are run. Devices have room for the inputs of one program
    beside those of the user. Under several processes a collective call: all of them run the
    programs, and the times of process 0 decide. Waits for the devices.

    Args:
        recorded: the step.
        tried: the candidates.
        made: programs that are compiled already; under several processes not used, as all must
            compile alike.
        memory: the bytes of a device; None for no limit.
        report: called with what is being done.

    Raises:
        AutoShardingError: none of the programs ran.
    """
    finalists = [
        i
        for i, x in enumerate(tried)
        if x.program is not None and (memory is None or x.program.peak_bytes <= memory)
    ]
    programs: dict[int, Program] = {}
    loops = LoopedStep(recorded.graph, runs_loops=recorded.markable.has_loops)
    forms = {i: loops.as_run(marked(recorded.graph, tried[i].shardings)) for i in finalists}
    refusals: dict[int, str] = {}
    for number, i in enumerate(finalists, 1):
        program = made.get(tried[i].shardings) if agreement.client() is None else None
        if program is None:
            report(f"compiling candidate {number} of {len(finalists)} to run it")
            try:
                program = build(forms[i].graph, f"auto_{number}", names=lambda: recorded.names)
            except DeviceMemoryError as error:
                refusals[i] = str(error)
                continue
        programs[i] = program
    times: dict[int, list[float]] = {i: [] for i in programs}
    own: dict[int, float] = {}
    kept, begun = [*programs], time.monotonic()
    for turn in range(_TURNS):
        if turn and len(kept) < 2:
            break
        report(f"running {len(programs)} candidates, turn {turn + 1} of at most {_TURNS}")
        order = list(programs)  # in both orders, as a program leaves caches to the next one
        for i in order if turn % 2 else reversed(order):
            try:
                times[i] += _turn(programs[i], recorded, forms[i])
            except DeviceMemoryError as error:
                refusals[i] = str(error)
                del programs[i]
        own |= {i: statistics.median(times[i]) for i in programs}
        far = next(most for turns, most in reversed(_CLOSE) if turn + 1 >= turns)
        kept = [i for i in programs if own[i] <= far * min(own.values())]
        if turn >= 3 and time.monotonic() - begun > _MOST_S:
            kept = []
        kept = json.loads(agreement.of_process_0("candidates that run again", json.dumps(kept)))
        programs = {i: programs[i] for i in kept if i in programs}
    own = {i: own[i] for i in own if i not in refusals}
    agreed = json.loads(agreement.of_process_0("times of candidates", json.dumps([*own.items()])))
    seconds: dict[int, float] = dict(agreed)
    if not seconds:
        raise AutoShardingError(
            "to be measured, a candidate must fit the devices beside what is there; got "
            f"{len(finalists)} candidates, and none does: {next(iter(refusals.values()), '')}. "
            'Write objective="time", which runs nothing.'
        )
    found = [
        replace(x, measured_s=seconds.get(i), refusal=refusals.get(i, x.refusal))
        for i, x in enumerate(tried)
    ]
    most = _CLOSE_AS_MEASURED * min(seconds.values())
    return sorted(found, key=lambda x: _rank(x, most))


def _rank(one: Tried, most: float) -> tuple[int, float]:
    """By what a candidate is compared; those without a time stay in the order that they have.

    Args:
        one: the candidate.
        most: the seconds up to which candidates are as fast as the fastest one.
    """
    if one.measured_s is None:
        return 2, 0.0
    return (0, one.seconds or 0.0) if one.measured_s <= most else (1, one.measured_s)


def _turn(program: Program, recorded: RecordedStep, form: Looped) -> list[float]:
    """The seconds of some runs of a program, which updates copies of the step's inputs.

    CPU seconds where devices are emulated: they share cores, also with other programs.

    Args:
        program: the program.
        recorded: the step.
        form: the step as the program computes it.
    """
    clock = time.process_time if devices.platform() == "cpu" else time.perf_counter
    graph, numbers = program.graph, start.by_kind(recorded.numbers)
    lines = [str(graph.nodes[check.position].origin) for check in program.index_checks]
    replaced = updated(graph)

    def copy(i: int) -> jax.Array:
        leaf, values = graph.leaves[i], [recorded.inputs[k] for k in form.rows[i]]
        if len(values) == 1:
            return _copy(values[0], values[0].spec, leaf.placement)
        return _stack(values, leaf)

    with lock:
        arrays = [copy(i) for i in range(len(graph.leaves))]
    jax.block_until_ready(arrays)
    time.sleep(_SETTLE_S)
    found = []
    for _ in range(1 + _RUNS):
        before = clock()
        with lock:
            results = start.start(program, [], arrays, numbers, lines)
            in_flight.programs.wait_all()
        jax.block_until_ready(results)
        found.append(clock() - before)
        with lock:
            for i in graph.donated:
                arrays[i] = results[replaced[i]] if i in replaced else copy(i)
        jax.block_until_ready(arrays)
        del results
    return found[1:]


def _stack(rows: Sequence[Value], leaf: Leaf) -> jax.Array:
    """Copies of a step's inputs as the stack that a program reads."""
    placement, sharding = leaf.placement, leaf.placement.device_sharding
    mark = None if placement.sharding is None else row_sharding(placement.sharding)
    of_row = row_placement(placement, mark)
    copies = [_copy(row, row.spec, of_row) for row in rows]
    return buffers.stacked(copies, sharding, stored_shape(leaf.spec, placement))


def _copy(value: Value, spec: Spec, target: Placement) -> jax.Array:
    """A copy of a step's input as a program needs it, which may take over the copy's memory.

    Args:
        value: the input; what the step will have made by then, and has no data, is zeros.
        spec: of the copy; another dtype than the value's for a converted one.
        target: where the copy lies.
    """
    shape, sharding = stored_shape(spec, target), target.device_sharding
    data = value.data
    if isinstance(data, Beginning) and data.source is not None:
        return _copy(data.source, spec, target)
    if data is None or isinstance(data, Beginning):
        number = None if data is None else data.number
        zero = torch.zeros((), dtype=spec.dtype)
        constant = Constant(zero if number is None else number, shape, sharding)
        return arrays_of([constant])[0]
    if isinstance(data, torch.Tensor):
        return buffers.upload_and_wait(data.to(spec.dtype), sharding, shape)
    whole = buffers.reshard(leaves.array_of(value), sharding, spec.shape, shape)
    return buffers.copied(whole, (dtypes.to_jax(spec.dtype),), sharding)
