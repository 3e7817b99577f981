"""Plans a cut: the program for pending storages, its inputs, and the buffers it is donated."""

import functools
import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_core import source_lines
from spmd_core.config import config
from spmd_core.graph.placement import Placement
from spmd_core.graph.repetition import result_of
from spmd_core.graph.stacks import Row, Stack, StackEntry, StackStorage
from spmd_core.graph.storage import Storage, failed, pending_elsewhere
from spmd_core.graph.values import Value, line_of, origin_of
from spmd_core.program import (
    automatic,
    compile_cache,
    folding,
    initial_state,
    layer_stacks,
    small_state,
    stacked_state,
)
from spmd_core.program.growing_program import Bounded
from spmd_core.program.leaves import marked_placement, target_placement
from spmd_core.program.program import Program
from spmd_core.program.program_devices import marks_of, program_devices
from spmd_core.program.program_graph import Leaf, Node, Output, RecordedGraph
from spmd_core.program.small_state import CapturedCall
from spmd_core.program.stacked_groups import Iterations
from spmd_core.program.value_numbers import number, numbered
from spmd_core.runtime import collection
from spmd_core.runtime.jax_sharding import replicated

_by_serial = operator.attrgetter("serial")
# How often a program is planned again: what is updated along with rows is only found once they are
# rows. A plan without all of them is right as well, and runs slower.
_MOST_SEARCHES = 4


@dataclass
class CutPlan:
    """The program that a cut will run, and its inputs.

    Making a plan changes nothing; `debugging` shows plans that are never run.

    Attributes:
        key: the program's key.
        live: the storages that receive the results, in the order of the results. Among them are
            those of other threads whose values these results depend on.
        nodes: the recorded operations, in the order of recording, between those that take stacks
            apart and those that make them.
        recorded: these alone.
        iterations: the values that loops will compute (`config.fold_layers`), as far as known.
        node_inputs: for each node, the value numbers of its inputs (see `program_graph.Node`).
        leaves: the program's inputs.
        targets: the placement that each leaf must have on the program's devices.
        numbers: the Python numbers that are inputs of the program, in the order of the nodes.
        state: what begins in this cut. Its leaves have no arrays yet.
        stacked: the stacks among its inputs and results. New ones have no arrays yet.
        label: the prefix of the program's name.
        rewrite: gives the graph the shardings of `key.found`; None without.
        positions: of such a graph: the position in `nodes` of what each operation is, or marks.
        one_by_one: of a cut whose layers may become loops: the key with which a program for growing
            sizes was sought, which has layers one by one; None if none was.
        bounded: that program, if there is one.
    """

    key: compile_cache.Key
    live: list[Storage]
    nodes: list[Value]
    recorded: list[Value]
    iterations: Iterations
    node_inputs: list[list[int]]
    leaves: list[Value]
    targets: tuple[Placement, ...]
    numbers: list[Any]
    state: initial_state.State
    stacked: stacked_state.StackedState
    label: str
    rewrite: Callable[[RecordedGraph], RecordedGraph] | None = None
    positions: Sequence[int] = ()
    one_by_one: compile_cache.Key | None = None
    bounded: Bounded | None = None

    def graph(self) -> RecordedGraph:
        """The graph to lower; only needed if the program is not in the cache."""
        key = self.key
        origins = key.origins or (None,) * len(self.nodes)
        # In errors, a stack has the name of its first row.
        first = {stack.value: stack.owners[0] for stack, _ in self.stacked.rows.values()}
        graph = RecordedGraph(
            tuple(
                Leaf(leaf.spec, target, origin_of(leaf), leaf.owner or first.get(leaf))
                for leaf, target in zip(self.leaves, self.targets)
            ),
            tuple(
                Node(node.entry, tuple(inputs), origin)
                for node, inputs, origin in zip(self.nodes, self.node_inputs, origins)
            ),
            tuple(
                Output(number, s.spec, placement, weakref.ref(_named(s)))
                for s, (number, _, placement) in zip(self.live, key.outputs)
            ),
            key.donated,
            key.device_ids,
            key.options,
            key.checks_indices,
            key.fold_layers,
        )
        return graph if self.rewrite is None else self.rewrite(graph)

    def line(self, position: int) -> str:
        """The user's line of the operation at that position of the graph (`line_of`)."""
        return line_of(self.nodes[position if self.rewrite is None else self.positions[position]])

    @property
    def name(self) -> str:
        """The program's name."""
        return f"{self.label}_{len(self.nodes)}ops_{len(self.leaves)}in"

    def program(self) -> Program:
        """The program, from the cache or newly compiled."""
        return compile_cache.get(self.key, self.graph, self.name)


@collection.paused()  # what a plan makes lives as long as the plan
def plan(
    live: list[Storage],
    *,
    label: str = "spmd",
    donates: bool = True,
    call: CapturedCall | None = None,
    grown: Callable[[CutPlan], Bounded | None] | None = None,
    one_by_one: bool = False,
) -> CutPlan:
    """The program that computes these pending storages.

    Args:
        live: the storages.
        label: the prefix of the program's name.
        donates: whether leaves may be donated to this program: no other pending operation reads
            them.
        call: of a captured step: the program may run again on the same constants, which are then
            not donated. It does not name the lines of its operations, which are recorded for
            errors. None for any other cut.
        grown: the program for growing sizes that computes a planned cut, if it is a new one and
            there is such a program; it remembers the cut. None: no such program is sought.
        one_by_one: whether layers stay one by one, whatever `config.fold_layers` says.
    """

    def planned(groups: Sequence[Sequence[Value]] = (), **form: bool) -> CutPlan:
        form = {"is_folded": not one_by_one, **form}
        return _plan(live, groups, label=label, donates=donates, call=call, **form)

    groups: list[Sequence[Value]] = []

    def complete(made: CutPlan) -> CutPlan:
        groups.clear()
        folds = made.key.fold_layers and not one_by_one
        searches = _MOST_SEARCHES if folds else min(len(made.stacked.rows), 1)
        for _ in range(searches):
            if compile_cache.has(made.key):
                break
            more = _more_groups(made, groups, () if call is None else call.apart)
            if not more and _iterations(made.recorded, folds=folds) == made.iterations:
                break
            groups.extend(more)
            made = planned(groups, stacks_small=not folds)
        return made

    made = automatic.searched(planned, complete, functools.partial(planned, is_folded=False))
    if made.rewrite is not None:
        return made
    asked, folds = None, made.key.fold_layers and not one_by_one
    if folds and grown is not None and not compile_cache.has(made.key):
        # Programs for growing sizes have no loops.
        apart = planned(is_folded=False) if made.stacked.rows or made.stacked.results else made
        asked = apart.one_by_one = apart.key
        apart.bounded = grown(apart)
        if apart.bounded is not None:
            return apart
    if folds and call is not None:
        made = planned(stacks_small=False)
    made = complete(made)
    if folds and call is not None:
        made = planned(groups)
    made.one_by_one = asked
    return made


def _iterations(recorded: Sequence[Value], *, folds: bool) -> Iterations:
    """The values that loops will compute, as far as known; none if no layers become loops."""
    return layer_stacks.iterations(recorded) if folds else {}


def _more_groups(
    made: CutPlan, groups: Sequence[Sequence[Value]], apart: Collection[Storage]
) -> list[Sequence[Value]]:
    """Further leaves of a new program that may become the rows of stacks.

    Args:
        made: the program's plan.
        groups: those with which it was planned.
        apart: storages that stay as they are.
    """
    found: list[Sequence[Value]] = []
    if made.stacked.rows:
        found += stacked_state.more_groups(
            made.live, made.nodes, made.stacked, made.iterations, apart
        )
    if made.key.fold_layers:
        found += layer_stacks.groups(
            made.key,
            made.graph,
            made.leaves,
            made.nodes,
            made.recorded,
            stacked_state.can_be_stacked,
        )
    return [group for group in found if group not in groups]


def _plan(
    live: list[Storage],
    groups: Sequence[Sequence[Value]],
    *,
    label: str,
    donates: bool,
    call: CapturedCall | None,
    is_folded: bool = True,
    stacks_small: bool = True,
) -> CutPlan:
    """`plan`, with leaves that may become the rows of stacks (`stacked_state.find`).

    Args:
        groups: these leaves.
        label, donates, call: as for `plan`.
        is_folded: whether layers lie in stacks; those for which operations ask do in any case.
        stacks_small: whether a captured step's small state does.
    """
    # Not in the order of their first writes: state that begins in this cut was written earlier than
    # it is in later ones.
    live = sorted(live, key=_position)
    nodes, leaves = collect(live)
    elsewhere = pending_elsewhere()
    if elsewhere:
        mine, needed = set(live), set(nodes)
        elsewhere = [s for s in elsewhere if s not in mine]
        live = [*live, *(s for s in elsewhere if (s.value.parent or s.value) in needed)]
        elsewhere = [s for s in elsewhere if (s.value.parent or s.value) not in needed]
    state = initial_state.find_state(live, nodes, () if call is None else call.returned)
    if state.inputs:
        live = [s for s in live if s not in state.held]
        nodes, leaves = collect(live, state.inputs)
    recorded = nodes
    folds = folding.folds_layers(leaves)
    iterations = _iterations(recorded, folds=folds and is_folded)
    if call is not None:
        small_state.take_out(live, leaves, call)
        if stacks_small:
            own = program_devices(marks_of(live, nodes, leaves), leaves)
            taken = {leaf for group in groups for leaf in group}
            groups = [*groups, *small_state.groups(live, nodes, leaves, call, own, taken)]
    stacked = stacked_state.StackedState()
    if is_folded or any(node.entry.__class__ is StackEntry for node in nodes):
        stacked = stacked_state.find(
            live, nodes, leaves, state, groups, iterations, call, stacks_small=stacks_small
        )
    rows: dict[Value, int] = {}
    if stacked.rows or stacked.results:
        live, nodes, leaves, rows = _with_stacks(stacked, live, nodes, leaves)
    number_of = {leaf: -i - 1 for i, leaf in enumerate(leaves)} | rows
    number_of |= {v: number_of[leaf] for v, leaf in state.inputs.items() if leaf in number_of}
    structure, node_inputs, numbers = numbered(nodes, number_of)
    device_ids = program_devices(marks_of(live, nodes, leaves), leaves)
    targets = tuple(target_placement(leaf.placement, device_ids) for leaf in leaves)
    out_placements = [
        _output_placement(s, _value_before(s, state, stacked), device_ids) for s in live
    ]
    # verify() runs a program twice on the same inputs, so nothing is donated.
    kept = set(state.held.values())
    if call is not None:
        wholes = {stack.value for stack, _ in stacked.rows.values()}
        nobodys = (x for x in leaves if x.owner is None or x.owner() is None)
        kept |= {leaf for leaf in nobodys if leaf not in wholes}
    donated = (
        _donated(live, leaves, targets, out_placements, elsewhere, kept, stacked)
        if donates and not config.verify_programs
        else {}
    )
    # jax assigns the donated buffers, in order, to the results of equal shape and dtype, in order.
    # If a buffer were assigned to another result than the one that replaces its value, it would be
    # overwritten while it is still read, so that XLA would have to copy it.
    order = list(dict.fromkeys([*donated.values(), *range(len(live))]))
    live, out_placements = [live[i] for i in order], [out_placements[i] for i in order]
    out_numbers = [number(s.value, number_of) for s in live]
    has_lines = source_lines.is_used() if call is None else call.has_lines
    key = compile_cache.Key(
        structure,
        tuple((leaf.spec.logical, target) for leaf, target in zip(leaves, targets)),
        tuple(zip(out_numbers, (s.spec.logical for s in live), out_placements)),
        tuple(donated),
        device_ids,
        _origins(nodes) if has_lines else (),
        tuple(sorted(config.compiler_options.items())),
        config.check_indices,
        folds,
    )
    inputs = (node_inputs, leaves, targets, numbers, state, stacked)
    return CutPlan(key, live, nodes, recorded, iterations, *inputs, label)


def _value_before(
    storage: Storage, state: initial_state.State, stacked: stacked_state.StackedState
) -> Value | None:
    """The value that a result replaces; None if there is none."""
    if storage.__class__ is StackStorage:
        return stacked.value_before(storage)
    return storage.committed or state.first.get(storage)


def _with_stacks(
    stacked: stacked_state.StackedState,
    live: list[Storage],
    nodes: list[Value],
    leaves: list[Value],
) -> tuple[list[Storage], list[Value], list[Value], dict[Value, int]]:
    """The results, operations and inputs of a cut with whole stacks in place of their rows.

    Returns:
        These, and the value number of each row that is read.
    """
    unstacked = stacked.unstacked(leaves)
    first: dict[Stack, int] = {}
    count = 0
    for stack in unstacked:
        first[stack] = count
        count += len(stack.owners)
    rows = {row: first[stack] + i for row, (stack, i) in stacked.rows.items() if stack in first}
    nodes = [*unstacked.values(), *nodes, *(result.value for result in stacked.results)]
    joined = {s for result in stacked.results for s in result.rows}
    live = [*(s for s in live if s not in joined), *stacked.results]
    return live, nodes, [*dict.fromkeys(map(stacked.stack_of, leaves))], rows


def _named(storage: Storage) -> Storage:
    """The storage after which a result is named in errors."""
    return storage.rows[0] if isinstance(storage, StackStorage) else storage


def _position(storage: Storage) -> tuple[int, int]:
    """Where a pending value is in the order of recording."""
    node, index = result_of(storage.value)
    return node.serial, index


def collect(
    live: list[Storage], inputs: Mapping[Value, Value] | None = None
) -> tuple[list[Value], list[Value]]:
    """The pending operations that the storages need, and the leaves that these read.

    Nodes are in the order of recording, leaves in the order of first use.

    Args:
        live: the storages.
        inputs: pending values that are not computed, each with the leaf that is read for it.
    """
    inputs = inputs or {}
    nodes: list[Value] = []
    seen: set[Value] = set()
    stack = [s.value for s in live]
    while stack:
        value = stack.pop()
        if value in seen or value.data is not None or value in inputs:
            continue
        seen.add(value)
        if value.parent is not None:
            stack.append(value.parent)
        else:
            nodes.append(value)
            stack.extend(value.inputs)
    nodes.sort(key=_by_serial)
    read = (inputs.get(x, x) for node in nodes for x in node.inputs)
    return nodes, list(dict.fromkeys(x for x in read if x.data is not None))


def _origins(nodes: list[Value]) -> tuple[source_lines.Origin | None, ...]:
    origins = tuple(origin_of(node) for node in nodes)
    return origins if any(origins) else ()


def _output_placement(
    storage: Storage, before: Value | None, device_ids: tuple[int, ...]
) -> Placement | None:
    """The placement of the storage's new value; None if the partitioner chooses.

    Args:
        storage: the storage.
        before: the value that is updated; None if there is none.
        device_ids: the program's devices.
    """
    if storage.sharding is not None:
        return target_placement(marked_placement(storage.sharding), device_ids)
    if before is not None:
        # An unmarked tensor that is updated in place keeps its placement, so that the next step has
        # the same program, and can donate the buffer.
        return (
            target_placement(before.placement, device_ids)
            if before.placement.sharding is None
            else None
        )
    if isinstance(storage, StackStorage):  # no device may split the first dim
        return Placement.of(replicated(device_ids), None)
    return None


def _donated(
    live: list[Storage],
    leaves: list[Value],
    targets: tuple[Placement, ...],
    out_placements: list[Placement | None],
    elsewhere: list[Storage],
    kept: set[Value],
    stacked: stacked_state.StackedState,
) -> dict[int, int]:
    """The leaves to donate: those whose last reader is this program, with the result for each.

    That result is the one that replaces the leaf's value, or else another one of the same shape,
    dtype and placement.

    Args:
        live: the storages that the program computes.
        leaves: the leaves that it reads.
        targets: the placement of each leaf.
        out_placements: the placement of each result; None if the partitioner chooses.
        elsewhere: the storages that other threads' cuts compute, which may read the same leaves.
        kept: leaves that stay.
        stacked: the stacks among them.

    Returns:
        The position of the result, by the position of the leaf.
    """
    free = {
        s: (s.spec.shape, s.spec.dtype, placement)
        for s, placement in zip(live, out_placements)
        if placement is not None
    }
    number = {s: i for i, s in enumerate(live)}
    # A tensor whose program failed is computed again when it is read.
    readers = [*failed(), *elsewhere]
    if readers:
        kept = kept | set(collect(readers)[1])
    owner_of: dict[Value, Storage] = {}
    if stacked.rows:
        kept = {*kept, *map(stacked.stack_of, kept)}
        kept |= {x.data.stack.value for x in kept if x.data.__class__ is Row}
        kept |= stacked.held()
        replaced = stacked.results.items()
        owner_of = {stack.value: result for result, stack in replaced if stack is not None}
    donated: dict[int, int] = {}
    others: list[tuple[int, Any]] = []
    for position, (leaf, target) in enumerate(zip(leaves, targets)):
        owner = leaf.owner() if leaf.owner is not None else owner_of.get(leaf)
        if (owner is not None and owner.value is leaf) or leaf in kept:
            continue
        layout = (leaf.spec.shape, leaf.spec.dtype, target)
        if owner is not None and free.get(owner) == layout:
            donated[position] = number[owner]
            del free[owner]
        else:
            others.append((position, layout))
    if others and free:
        by_layout: dict[Any, list[int]] = {}
        for s, layout in free.items():
            by_layout.setdefault(layout, []).append(number[s])
        for position, layout in others:
            if by_layout.get(layout):
                donated[position] = by_layout[layout].pop(0)
    return dict(sorted(donated.items()))
