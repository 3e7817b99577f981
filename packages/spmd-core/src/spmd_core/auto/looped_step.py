"""A step whose equal layers are loops over stacks of their parameters.

Where the program that a candidate is compiled for will have loops (`scan_model`, or
`config.fold_layers`), the candidate has them, so that its memory and its time are those of that
program. And a long step is propagated faster so: its layers are the same operations with the same
shardings, and the optimizer updates all layers' parameters of one kind at once.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spmd_core.auto.step_graph import updated
from spmd_core.graph.stacks import stack_entry, stacked_spec, unstack_entry
from spmd_core.program import folding, ir
from spmd_core.program.leaves import stack_placement
from spmd_core.program.list_items import Items
from spmd_core.program.passes.folded_layers import are_small, with_loops
from spmd_core.program.program_graph import Leaf, Node, Output, RecordedGraph

# Leaves that become the rows of a stack, in order.
_Rows = tuple[int, ...]


@dataclass(frozen=True)
class Looped:
    """A step's graph, in which some inputs may be stacks of the step's inputs.

    Attributes:
        graph: the graph.
        rows: for each of its inputs the positions of the step's inputs that it holds: one, or the
            rows of a stack.
    """

    graph: RecordedGraph
    rows: tuple[_Rows, ...]


class LoopedStep:
    """Gives the forms of one step, as candidates mark it, with layers as loops over stacks.

    What may lie in stacks is found once.

    Args:
        recorded: the step before any candidate marks it.
        runs_loops: whether its layers run as loops, and were recorded one by one (`scan_model`).
    """

    def __init__(self, recorded: RecordedGraph, *, runs_loops: bool = False) -> None:
        self._recorded, self._runs_loops = recorded, runs_loops

    @functools.cached_property
    def _found(self) -> list[_Rows]:
        anywhere = self._recorded.leaves[0].placement
        leaves = tuple(replace(leaf, placement=anywhere) for leaf in self._recorded.leaves)
        return _stacks(replace(self._recorded, leaves=leaves))

    def of(self, marked: RecordedGraph) -> Looped:
        """The step with layers as loops, which reads and returns parameters and state as stacks.

        Args:
            marked: the step, with the placements and marks of a candidate.

        Returns:
            The same graph if it has no layers that may become loops.
        """
        stacks = self._found
        if not all(_are_placed_alike(marked, rows) for rows in stacks):
            stacks = _stacks(marked)  # of fewer layers
        return _with_stacks(marked, stacks) if stacks else _as_it_is(marked)

    def as_run(self, marked: RecordedGraph) -> Looped:
        """The step with loops if its program will have them once its tensors are marked so."""
        has_loops = self._runs_loops or folding.folds_placed(marked.leaves)
        return self.of(marked) if has_loops else _as_it_is(marked)


def _as_it_is(marked: RecordedGraph) -> Looped:
    rows = tuple((i,) for i in range(len(marked.leaves)))
    return Looped(marked, rows)


def _are_placed_alike(recorded: RecordedGraph, rows: Sequence[int]) -> bool:
    return len({id(recorded.leaves[i].placement) for i in rows}) == 1


def _stacks(recorded: RecordedGraph) -> list[_Rows]:
    """The leaves that are to lie in stacks: what loops read, and what is updated along with it."""
    graph = ir.Graph.of(recorded)
    donated = set(recorded.donated)

    def number(value: ir.Ref) -> int:
        return value.producer.number if isinstance(value.producer, ir.Input) else -1

    def are_alike(rows: Sequence[int]) -> bool:
        first, *others = rows
        leaf = recorded.leaves[first]
        return (
            len({*rows}) == len(rows)
            and _are_placed_alike(recorded, rows)
            and all(
                recorded.leaves[i].spec.logical is leaf.spec.logical
                and (i in donated) == (first in donated)
                for i in others
            )
        )

    def may_be_stacked(values: tuple[ir.Ref, ...]) -> bool:
        rows = [number(x) for x in values]
        return are_small(values) or (min(rows) >= 0 and are_alike(rows))

    found: list[_Rows] = []
    taken: set[int] = set()

    def add(rows: Sequence[int]) -> None:
        if min(rows) >= 0 and taken.isdisjoint(rows) and are_alike(rows):
            found.append(tuple(rows))
            taken.update(rows)

    for values in with_loops(graph, may_be_stacked).stacked:
        add([number(x) for x in values])
    items = Items()
    of_leaf = {  # the item of an optimizer's lists that reads a parameter
        number(item.operands[0]): tuple(number(_counted(x)) for x in item.operands)
        for op in graph.ops
        if op.entry.traits.by_item
        for item in items.of(op)
    }
    for rows in list(found):
        shape = recorded.leaves[rows[0]].spec.shape
        for state in zip(*(of_leaf.get(i, ()) for i in rows)):
            if min(state) >= 0 and recorded.leaves[state[0]].spec.shape in (shape, ()):
                add(state)
    return found


def _counted(value: ir.Ref) -> ir.Ref:
    """What a number is counted up from, as the steps of an optimizer are before it reads them.

    Unless the counters lie in stacks as well, each layer's parameters are updated apart.
    """
    while value.op is not None and not value.spec.shape and len(value.op.operands) == 1:
        (value,) = value.op.operands
    return value


def _with_stacks(recorded: RecordedGraph, stacks: Sequence[_Rows]) -> Looped:
    """The graph with stacks in place of these leaves, and of the results that replace them."""
    num_rows = sum(map(len, stacks))
    in_stacks = {i for rows in stacks for i in rows}
    alone = [i for i in range(len(recorded.leaves)) if i not in in_stacks]
    leaves = [recorded.leaves[i] for i in alone]
    numbers = {-i - 1: -position - 1 for position, i in enumerate(alone)}
    nodes: list[Node] = []
    for rows in stacks:
        row = recorded.leaves[rows[0]]
        numbers |= {-i - 1: sum(len(n.entry.outs) for n in nodes) + k for k, i in enumerate(rows)}
        nodes.append(Node(unstack_entry(row.spec, len(rows)), (-len(leaves) - 1,)))
        stack = stacked_spec(row.spec, len(rows))
        leaves.append(Leaf(stack, stack_placement(row.placement), row.origin, row.owner))

    def now(number: int) -> int:
        return number + num_rows if number >= 0 else numbers[number]

    nodes += [replace(node, inputs=tuple(map(now, node.inputs))) for node in recorded.nodes]
    count = sum(len(node.entry.outs) for node in nodes)
    replaced = updated(recorded)
    outputs: dict[int, Output] = {
        i: replace(output, value=now(output.value)) for i, output in enumerate(recorded.outputs)
    }
    of_stacks: list[Output] = []
    for rows in stacks:
        if any(i not in replaced for i in rows):
            continue
        results = [outputs.pop(replaced[i]) for i in rows]
        spec, placement = results[0].spec, results[0].placement
        nodes.append(Node(stack_entry(spec, len(rows)), tuple(x.value for x in results)))
        stacked = None if placement is None else stack_placement(placement)
        made = stacked_spec(spec, len(rows))
        of_stacks.append(Output(count, made, stacked, results[0].owner))
        count += 1
    donated = set(recorded.donated)
    all_rows = (*((i,) for i in alone), *stacks)
    graph = replace(
        recorded,
        leaves=tuple(leaves),
        nodes=tuple(nodes),
        outputs=(*outputs.values(), *of_stacks),
        donated=tuple(position for position, rows in enumerate(all_rows) if rows[0] in donated),
        fold_layers=True,
    )
    return Looped(graph, all_rows)
