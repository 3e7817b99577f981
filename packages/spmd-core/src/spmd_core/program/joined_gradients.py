"""Finds the gradients that a program adds up, as it does to accumulate them, for one reduction."""

from collections.abc import Iterator, Mapping

from spmd_core.graph.values import Spec
from spmd_core.program.gradient_plans import (
    MARK,
    MARK_SUM,
    UNCHANGED,
    Gradient,
    is_plain_addition,
    uses,
)
from spmd_core.program.program_graph import Graph, Node


class Joins:
    """Finds the gradients that a program adds up, each used for nothing else.

    Attributes:
        marks, ends: as `Plans.joined` and `Plans.ends`.
        replaced: the numbers of the values before the ends.
    """

    def __init__(self, graph: Graph, gradients: Mapping[int, Gradient]) -> None:
        self._gradients = gradients
        self._uses = uses(graph)
        # By the number of a value: the marks that it adds up, the values before it, and its spec.
        self._values: dict[int, tuple[int, ...]] = {}
        self._before: dict[int, tuple[int, ...]] = {}
        self._specs: dict[int, Spec] = {}
        self.marks: dict[int, tuple[int, ...]] = {}
        ends: dict[int, int] = {}
        number = 0
        for position, node in enumerate(graph.nodes):
            marks = self._marks_of(position, node)
            if marks:
                self._values[number], self._before[number] = marks, node.inputs
                self._specs[number] = node.entry.spec
                if len(node.inputs) > 1:
                    self.marks[position], ends[number] = marks, position
                    for before in self._all_before(number):
                        ends.pop(before, None)
            number += len(node.entry.outs)
        self.ends = frozenset(ends.values())
        self.replaced = {before for end in ends for before in self._all_before(end)}

    def _marks_of(self, position: int, node: Node) -> tuple[int, ...]:
        """The marks whose gradients the operation's result adds up; empty for any other value."""
        entry = node.entry
        if position in self._gradients and entry.name in (MARK, MARK_SUM):
            return (position,)
        if not all(n in self._values and self._uses[n] == 1 for n in node.inputs):
            return ()
        marks = tuple(mark for number in node.inputs for mark in self._values[number])
        if not marks:
            return ()
        if is_plain_addition(entry):
            reductions = {self._gradients[mark].reduction for mark in marks}
            return marks if len(reductions) == 1 else ()
        passes_on = entry.name in (*UNCHANGED, MARK) and entry.spec == self._specs[node.inputs[0]]
        return marks if passes_on else ()

    def _all_before(self, number: int) -> Iterator[int]:
        for before in self._before[number]:
            if before in self._values:
                yield before
                yield from self._all_before(before)
