"""Finds marked sums that a program adds up, so that one reduction serves all of them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.ir import Graph, Op, Ref
from spmd_core.program.mark_names import MARK, MARK_SUM, is_plain_addition
from spmd_core.program.partial_sums import Sum
from spmd_core.program.reductions import Reduction


@dataclass(frozen=True, eq=False)
class Total:
    """An addition of values, at least one of which is a `Sum` or a `Total`.

    Attributes:
        op: the addition.
        terms: its operands; a `Ref` is a value that needs no reduction.
    """

    op: Op
    terms: "tuple[Sum | Total | Ref, ...]"


@dataclass(frozen=True, eq=False)
class Gradient:
    """A gradient that is reduced in a manual region.

    Attributes:
        found: the sum, or the addition of sums, that it is.
        reduction: how it is reduced.
    """

    found: Sum | Total
    reduction: Reduction


def sums(found: Sum | Total | Ref) -> Iterator[Sum]:
    """The sums in a gradient, in order."""
    if isinstance(found, Sum):
        yield found
    elif isinstance(found, Total):
        for term in found.terms:
            yield from sums(term)


def uses(graph: Graph) -> Counter[Ref]:
    """The number of uses of each value of a graph, as an operand or as a result of the program."""
    found = Counter(operand for op in graph.ops for operand in op.operands)
    found.update(graph.outputs)
    return found


class Joins:
    """Finds the gradients that a program adds up, and uses for nothing else.

    Attributes:
        marks: for each addition, the marks of all gradients that it adds up, directly or by way of
            earlier additions, in the order of recording.
        ends: the additions after which the total is reduced.
    """

    def __init__(self, graph: Graph, gradients: Mapping[Op, Gradient]) -> None:
        self._gradients = gradients
        self._uses = uses(graph)
        # For each value, the marks of the gradients that it adds up.
        self._values: dict[Ref, tuple[Op, ...]] = {}
        self.marks: dict[Op, tuple[Op, ...]] = {}
        self.ends: set[Op] = set()
        for op in graph.ops:
            marks = self._marks_of(op)
            if marks:
                self._values[Ref(op)] = marks
                if len(op.operands) > 1:
                    self.marks[op] = marks
                    self.ends.add(op)
                    self.ends -= {*self._before(op)}

    def _marks_of(self, op: Op) -> tuple[Op, ...]:
        """The marks of the gradients that an operation adds up; empty for any other operation."""
        entry = op.entry
        if op in self._gradients and entry.name in (MARK, MARK_SUM):
            return (op,)
        if not all(x in self._values and self._uses[x] == 1 for x in op.operands):
            return ()
        marks = tuple(mark for x in op.operands for mark in self._values[x])
        if not marks:
            return ()
        if is_plain_addition(entry):
            reductions = {self._gradients[mark].reduction for mark in marks}
            return marks if len(reductions) == 1 else ()
        is_marked = entry.summed_over is not None and entry.name != MARK
        source = None if is_marked else op.source_of_elements(Elements.RESHAPED)
        return marks if source is not None and source.spec == entry.spec else ()

    def _before(self, op: Op) -> Iterator[Op]:
        """The additions whose results it adds up."""
        for x in op.operands:
            if x.op in self.marks:
                yield x.op
            elif x in self._values and x.op is not None:
                yield from self._before(x.op)
