"""Decides among candidates by Shardy's propagation, and among the best ones by compilation."""

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from spmd_core.auto.axis_names import axis_names
from spmd_core.auto.candidates import Candidate, Kind, candidates
from spmd_core.auto.compiled import compiled
from spmd_core.auto.costs import CostModel
from spmd_core.auto.expected import are_twins, expected_s, may_be_better
from spmd_core.auto.groups import Groups
from spmd_core.auto.looped_step import LoopedStep
from spmd_core.auto.machine import Machine
from spmd_core.auto.marked_graph import marked, shardings
from spmd_core.auto.propagated import MLIRError, propagated, seconds
from spmd_core.auto.recorded_step import Markable
from spmd_core.auto.solve import sent
from spmd_core.auto.step_graph import StepGraph
from spmd_core.auto.tried import Progress, Tried, best_of, hidden_work, program_seconds
from spmd_core.errors import AutoShardingError, DeviceMemoryError
from spmd_core.graph.storage import Storage
from spmd_core.planner.topology import Topology
from spmd_core.program import ir
from spmd_core.program.lower import lower
from spmd_core.program.program import Program
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.program.target import Target
from spmd_core.runtime import abstract, devices
from spmd_core.sharding.mesh import Mesh

# The part of a device's memory for which the first candidates are made: the model is not exact.
_MARGIN = 0.9
# Candidates whose collectives are read after Shardy's propagation: at most so many, with so many
# operations and inputs in all, as lowering and propagation take about a millisecond for each; where
# equal layers are loops, about a fifteenth of it.
_MOST_PROPAGATED, _MOST_OPERATIONS, _MOST_IN_LOOPS = 10, 10_000, 150_000
# But of a program that is not longer than that so many: the best one, FSDP, and data parallelism.
_LEAST_PROPAGATED = 3
# Of these the first are the best ones of so many meshes: the model hardly tells these apart.
_MESHES = 3
# In a longer program for TPUs, whose layers compute again in the backward, equal layers are
# propagated as loops, which move the same, in a part of the time. Otherwise forward and backward
# share what they gather, which loops do not.
_MOST_UNFOLDED = 2_500
# Collectives whose times differ by so much, relatively, are the same.
_SAME = 0.01
# So many candidates are measured with and without marks of results, where propagation is the same.
_BOTH_FORMS = 2
# Candidates that take so much longer than the best one, after propagation or else by the model, are
# not compiled: a compilation takes minutes, and what XLA does afterwards changes times by less. The
# model also counts traffic of memory that the roofline of a whole program hides.
_WORTH = 1.5
# In the place of candidates that are not compiled, as what was compiled before is better, come
# those whose time after propagation is within so much of the least.
_NEAR = 1.02
# How often the search begins again with less memory, as no compiled candidate fits.
_MOST_ROUNDS = 5


def decide(
    groups: Groups,
    topology: Topology,
    *,
    mesh: Mesh | None,
    memory: int | None,
    most: int,
    objective: str,
    names: Mapping[Storage, str],
    markable: Markable | None = None,
    report: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
) -> list[Tried]:
    """The candidates, the best one first; the others that were compiled, then the rest.

    Args:
        groups: the step.
        topology: the devices to compile for.
        mesh: the mesh; None to choose one.
        memory: the bytes of a device; None for no limit.
        most: how many candidates to compile at a time; 0 to decide by the model alone.
        objective: "time" or "memory"; "measured" is decided afterwards, and here as "time".
        names: the names of tensors, for errors.
        markable: the tensors inside of the step that may be marked; None for all.
        report: called with what is being done.
        progress: gets what is found, as it is found.

    Raises:
        AutoShardingError: no program fits, or marks contradict each other.
    """
    machine = Machine.of(topology.devices)
    inputs = inputs_of(groups, names)
    limit = None if memory is None else memory * _MARGIN
    too_small = 0.0  # a limit for which the model has no candidate
    progress = progress or Progress()
    runs_loops = markable is not None and markable.has_loops
    loops = LoopedStep(groups.step.recorded, runs_loops=runs_loops)
    propagation = _Propagation(groups, machine, loops)
    tried = progress.tried
    for number in range(_MOST_ROUNDS):
        found = candidates(groups, machine, inputs, mesh=mesh, memory=limit)
        made = [
            Tried(x, shardings(groups, x.solution, _mesh(groups, x, mesh), markable)) for x in found
        ]
        known = {x.candidate for x in tried}
        made = [x for x in made if x.candidate not in known]
        if objective == "memory" or number:  # where nothing has fitted, time does not matter
            made.sort(key=lambda x: (x.candidate.solution.bytes, x.candidate.solution.seconds))
        progress.made = made
        if made and not most:
            return made
        if not number:
            made = progress.made = _by_propagation(propagation, made, topology, report)
        chosen = made[:most] if number else _to_compile(made, most, objective)
        left = [x for x in made if x not in chosen]
        form, count = propagation.needed_form, most
        if objective == "measured":
            chosen, form = _in_both_forms(propagation, chosen, topology), lambda one: one
            count = len(chosen)
        progress.made = [*chosen, *left]

        def is_wanted(one: Tried) -> bool:
            best = best_of(tried, memory, objective) if objective == "time" else None
            return may_be_better(one, best)

        rest = (names, report, progress, is_wanted, form, loops)
        _compile(groups, chosen, count, topology, machine, *rest)
        compiled_ones = {x.candidate for x in tried}
        left = [*(x for x in chosen if x.candidate not in compiled_ones), *left]
        best = best_of(tried, memory, objective)
        if best is not None:
            others = sorted(
                (x for x in tried if x is not best), key=lambda x: x.seconds or float("inf")
            )
            return [best, *others, *left]
        assert memory is not None and limit is not None
        if found:
            limit = max((limit + too_small) / 2, min(0.8 * limit, _tighter(tried, memory)))
        else:
            too_small = limit
            limit *= 1.5
    raise AutoShardingError(_nothing_fits(groups, tried, topology, memory))


def inputs_of(groups: Groups, names: Mapping[Storage, str]) -> list[int]:
    """The leaves that are neither state nor a named tensor: they come anew with each step."""
    found = []
    for i, leaf in enumerate(groups.step.recorded.leaves):
        owner = None if leaf.owner is None else leaf.owner()
        if i not in groups.step.updated and (owner is None or owner not in names):
            found.append(i)
    return found


def _mesh(groups: Groups, candidate: Candidate, mesh: Mesh | None) -> Mesh:
    if mesh is not None:
        return mesh
    size = 1
    for n in candidate.mesh_shape:
        size *= n
    return Mesh(range(size), candidate.mesh_shape, axis_names(groups, candidate))


def _diverse(made: Sequence[Tried], most: int, *, meshes: int = 1) -> list[Tried]:
    """The best candidates, the best one of each other kind, and then the next best.

    First of all the best one, with those of other meshes, and that whose program is expected to be
    the best. Of each kind over the fewest axes, as one would write it by hand, and then over more.
    Of twins the first one.

    Args:
        made: the candidates, the best one first.
        most: how many there shall be at most.
        meshes: of how many meshes the best one comes first; the order of axes makes no other mesh.
    """
    chosen: list[Tried] = []

    def add(one: Tried | None) -> None:
        if one is not None and not any(x is one or are_twins(x, one) for x in chosen):
            chosen.append(one)

    of_meshes: dict[tuple[int, ...], Tried] = {}
    for one in made:
        of_meshes.setdefault(tuple(sorted(one.candidate.mesh_shape)), one)
    for one in [*of_meshes.values()][:meshes]:
        add(one)
    expected = [x for x in made if x.expected_s is not None]
    add(min(expected, key=lambda x: x.expected_s or 0.0, default=None))
    for num_axes in (0, 2):
        for kind in (Kind.FSDP, Kind.DATA, Kind.TENSOR, Kind.FREE, Kind.REPLICATED, Kind.SHARDED):
            of_kind = [
                x
                for x in made
                if x.candidate.kind is kind and len(x.candidate.mesh_shape) >= num_axes
            ]
            add(min(of_kind, key=lambda x: len(x.candidate.mesh_shape), default=None))
    for one in made:
        add(one)
    return chosen[:most]


def _to_compile(made: Sequence[Tried], most: int, objective: str) -> list[Tried]:
    """The candidates to compile, in this order, until so many were: for the time maybe more.

    Those are near to the least propagated time, and take the places of others that turn out not to
    be worth it.
    """
    if objective != "time":
        return _diverse(made, most)
    worth = _worth_compiling(made)
    diverse = _diverse(worth, len(worth))
    times = [x.propagated_s for x in diverse if x.propagated_s is not None]
    near = _NEAR * min(times, default=0.0)
    others = [x for x in diverse[most:] if x.propagated_s is not None and x.propagated_s <= near]
    return [*diverse[:most], *others]


def _worth_compiling(made: Sequence[Tried]) -> list[Tried]:
    """Those that may turn out to be the best by the compiler.

    Of those that were propagated, if there are any: the model alone is kinder to candidates.
    """
    known = [x for x in made if x.propagated_s is not None] or list(made)
    times = {x.candidate: x.propagated_s or x.candidate.solution.seconds for x in known}
    most = _WORTH * min(times.values(), default=0.0)
    return [x for x in known if times[x.candidate] <= most]


@contextmanager
def _planned_on(topology: Topology) -> Iterator[None]:
    """Inside, programs are lowered and compiled for these devices, and nothing runs."""
    if abstract.run() is not None:
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="spmd-auto-"))
    run = abstract.Run(folder, lambda program, leaves: None, lambda: None)
    try:
        with abstract.planning(topology.devices, run):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Propagation:
    """Propagates the shardings of one step's candidates. Use it inside `_planned_on`.

    Args:
        groups: the step.
        machine: the devices.
        loops: makes loops of the step's layers.
    """

    def __init__(self, groups: Groups, machine: Machine, loops: LoopedStep) -> None:
        self._groups, self._machine, self._loops = groups, machine, loops
        self._recorded = groups.step.recorded

    @property
    def num_operations(self) -> int:
        """The number of operations and inputs that were recorded."""
        return len(self._recorded.nodes) + len(self._recorded.leaves)

    @functools.cached_property
    def has_loops(self) -> bool:
        """Whether equal layers are propagated as loops, also where they run one by one."""
        return _has_loops(self._groups.step)

    def of(self, one: Tried, name: str) -> Tried:
        """A candidate with what it sends by a program of this name. Raises MLIRError.

        Where its layers will run as loops, they are loops here: each loop gathers the weights of a
        layer anew, which layers one by one gather once for forward and backward.
        """
        whole = marked(self._recorded, one.shardings)
        form = self._loops.of if self.has_loops else self._loops.as_run
        graph = ir.Graph.of(form(whole).graph)
        moved = propagated(lower(graph, Target.of(graph), name), self._machine)
        took = seconds(moved, self._machine)
        return replace(
            one,
            propagated_s=one.candidate.solution.work_s + took,
            expected_s=expected_s(self._groups, one, self._machine, took),
            sent=sum(x.bytes for x in moved),
            kept_bytes=sum(x.kept for x in moved),
        )

    def needed_form(self, one: Tried) -> Tried:
        """A candidate, without marks of results where Shardy's collectives are the same without.

        Where less is sent without them, devices may compute the same.
        """
        bare = one.shardings.without_results()
        if one.propagated_s is None or bare == one.shardings:
            return one
        try:
            without = self.of(replace(one, shardings=bare), "auto_bare")
        except MLIRError:  # then the marks are needed
            return one
        work_s = one.candidate.solution.work_s
        took, whole = (without.propagated_s or 0.0) - work_s, one.propagated_s - work_s
        return without if abs(took - whole) <= _SAME * whole else one


def _by_propagation(
    propagation: _Propagation,
    made: Sequence[Tried],
    topology: Topology,
    report: Callable[[str], None],
) -> list[Tried]:
    """The candidates in a better order: first those that Shardy has propagated, by their times."""
    found: list[Tried] = []
    with _planned_on(topology):
        most = _most_propagated(propagation.num_operations, in_loops=propagation.has_loops)
        chosen = _diverse(made, most, meshes=max(1, min(_MESHES, most - 2)))
        for i, one in enumerate(chosen, 1):
            report(f"propagating candidate {i} of {len(chosen)}: mesh {one.shardings.mesh_text}")
            try:
                found.append(propagation.of(one, f"auto_{i}"))
            except MLIRError as error:
                report(f"Shardy refuses candidate {i}: {str(error).splitlines()[0]}")
    found.sort(key=lambda x: (x.propagated_s, x.bytes))
    known = {x.candidate for x in found}
    return [*found, *(x for x in made if x.candidate not in known)]


def _most_propagated(num_operations: int, *, in_loops: bool) -> int:
    """How many candidates of a program with so many operations and inputs are propagated.

    Candidates that are not propagated have the model's figures alone, which are lower than those
    of compiled programs, so that one that is propagated alone would not be compared with anything.
    """
    budget = _MOST_IN_LOOPS if in_loops else _MOST_OPERATIONS
    if num_operations > budget:
        return 0
    most = min(_MOST_PROPAGATED, budget // num_operations)
    return max(_LEAST_PROPAGATED, most)


def _in_both_forms(
    propagation: _Propagation, chosen: Sequence[Tried], topology: Topology
) -> list[Tried]:
    """These candidates in the forms that they need, and then some with all marks.

    Those are the first that need no marks of results: the compiler orders and joins operations in
    another way with them, which only measuring tells apart.
    """
    with _planned_on(topology):
        found = [propagation.needed_form(x) for x in chosen]
    return [*found, *[x for x, form in zip(chosen, found) if x is not form][:_BOTH_FORMS]]


def _has_loops(step: StepGraph) -> bool:
    """Whether equal layers are propagated as loops."""
    is_long = len(step.recorded.nodes) > _MOST_UNFOLDED and devices.platform() == "tpu"
    return is_long and step.recomputes


def _compile(
    groups: Groups,
    chosen: list[Tried],
    most: int,
    topology: Topology,
    machine: Machine,
    names: Mapping[Storage, str],
    report: Callable[[str], None],
    progress: Progress,
    is_wanted: Callable[[Tried], bool],
    form: Callable[[Tried], Tried],
    loops: LoopedStep,
) -> None:
    """Adds up to `most` candidates with the figures of their programs to those that were tried.

    Before each compilation `is_wanted` says whether it is worth it after those that have ended,
    and `form` gives what to compile, which takes the candidate's place in `chosen`.

    With loops where the programs that run will have them, and else layer by layer: as loops, GPT-2
    1.5B compiles in a third of the time for TPUs, but the order of its candidates differs, as what
    XLA moves in a loop is other by 5 to 8% of a step's time.
    """
    recorded, programs = groups.step.recorded, progress.programs
    made: dict[int, Tried] = {}
    before, started = list(progress.tried), 0

    def starting(i: int) -> None:
        nonlocal started
        started += 1
        one = chosen[i]
        chosen[i] = form(one)
        progress.made = [chosen[i] if x is one else x for x in progress.made]
        mesh = chosen[i].shardings.mesh_text
        report(f"compiling candidate {started} of {min(most, len(chosen))}: mesh {mesh}")

    def wanted(i: int) -> bool:
        return started < most and is_wanted(chosen[i])

    def keep(i: int, program: Program) -> None:
        assert programs is not None
        programs[chosen[i].shardings] = program

    def graph(i: int) -> RecordedGraph:
        return loops.as_run(marked(recorded, chosen[i].shardings)).graph

    graphs = [functools.partial(graph, i) for i in range(len(chosen))]
    taken = None if programs is None else keep
    with (
        _planned_on(topology),
        closing(
            compiled(graphs, topology, names=names, wanted=wanted, starting=starting, keep=taken)
        ) as all_found,
    ):
        for i, found in all_found:
            one = chosen[i]
            if isinstance(found, DeviceMemoryError):
                made[i] = replace(one, refusal=str(found))
            else:
                took = program_seconds(found, machine, hidden_work(one.candidate.solution, machine))
                bytes_sent = one.sent
                if one.propagated_s is None:
                    ids = one.shardings.mesh.ids
                    model = CostModel(groups, one.candidate.mesh_shape, machine, ids)
                    bytes_sent = sent(model, one.candidate.solution.choices)
                made[i] = replace(one, program=found, seconds=took, sent=bytes_sent)
            # In the order of the candidates, whichever was compiled first.
            progress.tried[:] = [*before, *(made[i] for i in sorted(made))]


def _tighter(tried: Sequence[Tried], memory: int) -> float:
    """The modelled bytes at which a program should fit, by how far the model was off."""
    ratios = [
        x.program.peak_bytes / x.candidate.solution.bytes
        for x in tried
        if x.program is not None and x.candidate.solution.bytes
    ]
    return memory * _MARGIN / max(ratios, default=1.0)


def _nothing_fits(
    groups: Groups, tried: Sequence[Tried], topology: Topology, memory: int | None
) -> str:
    assert memory is not None
    state = sum(x.num_bytes for x in groups.step.tensors if x.leaf is not None)
    least = [x.program.peak_bytes for x in tried if x.program is not None]
    smallest = (
        f"the least that a compiled candidate takes is {min(least):,}"
        if least
        else (
            "no candidate was small enough for the compiler"
            if tried
            else "the model found no candidate at all"
        )
    )
    count = len(topology.devices)
    more = max(count * 2, -(-2 * state // memory))
    return (
        f"a sharding must fit the {memory:,} bytes of a device; {smallest}, on {count} devices, "
        f"for a step whose inputs and state are {state:,} bytes in all. Take more devices (about "
        f"{more:,}), recompute activations (checkpoint_module), or make the batch smaller."
    )
