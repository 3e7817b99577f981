"""Shardings of a program that was searched with layers one by one, for its plan with stacks.

A search reads a program as it was recorded. Where equal layers become loops, the program that runs
has stacks of their parameters as inputs and results. Its recorded operations are the same.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from spmd_core.auto.marked_graph import Read, Shardings
from spmd_core.graph.stacks import stacked_sharding
from spmd_core.graph.values import Value
from spmd_core.program.planning import CutPlan
from spmd_core.sharding.sharding import Sharding


def of_same_program(found: Shardings, searched: CutPlan, planned: CutPlan) -> Shardings:
    """The shardings of a plan, from those of another plan of the same program.

    Args:
        found: the shardings of the plan that was searched.
        searched: that plan.
        planned: the plan that runs. More of its inputs may lie in stacks. Where rows of a stack
            have different shardings, the stack has the first one's.
    """
    before, after = _Positions.of(searched), _Positions.of(planned)
    known = dict(zip(before.leaves, found.leaves, strict=True))
    of_rows = {row: x for rows, x in known.items() if len(rows) == 1 for row in rows}

    def sharding(rows: tuple[Hashable, ...]) -> Sharding:
        if rows in known:
            return known[rows]
        row = of_rows[rows[0]]
        return stacked_sharding(row) if row.ndim else row  # a stack of numbers lies whole

    def tensor(position: int) -> int:
        return after.tensors[before.values[position]]

    def node(position: int) -> int:
        return after.nodes[before.keys[position]]

    in_loops = [((node(place[0]), *place[1:]), x, is_one) for place, x, is_one in found.in_loops]
    unmarked = {before.leaves[i] for i in found.unmarked}
    return replace(
        found,
        leaves=tuple(map(sharding, after.leaves)),
        marks=tuple(sorted((tensor(t), x) for t, x in found.marks)),
        gradients=frozenset(map(tensor, found.gradients)),
        in_loops=tuple(sorted(in_loops)),
        reads=tuple(
            Read(tuple(sorted((node(place), i) for place, i in read.uses)), read.sharding)
            for read in found.reads
        ),
        summed_over=tuple(sorted((tensor(t), axes) for t, axes in found.summed_over)),
        unmarked=frozenset(i for i, rows in enumerate(after.leaves) if rows in unmarked),
    )


@dataclass(frozen=True)
class _Positions:
    """What the inputs, operations and values of a plan are, whichever of them lie in stacks.

    Attributes:
        leaves: for each input what it holds: itself, or the rows of a stack.
        keys: for each operation what it is.
        nodes: the position of each operation.
        values: for the position of each value that an operation computes, among all values, that
            operation and the number of the result.
        tensors: the reverse: the positions of these.
    """

    leaves: list[tuple[Hashable, ...]]
    keys: list[Hashable]
    nodes: dict[Hashable, int]
    values: dict[int, Hashable]
    tensors: dict[Hashable, int]

    @staticmethod
    def of(planned: CutPlan) -> "_Positions":
        # The leaves of state that begins are made with a plan, its first values are not.
        begun = {leaf: value for value, leaf in planned.state.inputs.items()}
        rows: dict[Value, dict[int, Hashable]] = {}
        for leaf, (stack, i) in planned.stacked.rows.items():
            rows.setdefault(stack.value, {})[i] = begun.get(leaf, leaf)
        held = {
            leaf: tuple(x for _, x in sorted(rows[leaf].items()))
            if leaf in rows
            else (begun.get(leaf, leaf),)
            for leaf in planned.leaves
        }
        recorded = set(planned.recorded)
        keys: list[Hashable] = []
        for node in planned.nodes:
            if node in recorded:
                keys.append(node)
            else:  # it takes a stack apart, or makes one
                inputs = (held.get(x, x) for x in node.inputs)
                keys.append((node.entry.name, *inputs))
        count = len(planned.leaves)
        values: dict[int, Hashable] = {}
        for key, node in zip(keys, planned.nodes):
            for i in range(len(node.entry.outs)):
                values[count + i] = (key, i)
            count += len(node.entry.outs)
        return _Positions(
            list(held.values()),
            keys,
            {key: i for i, key in enumerate(keys)},
            values,
            {value: position for position, value in values.items()},
        )
