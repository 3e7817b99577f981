"""`RepeatedEntry`: a run of operations that a graph repeats, as a loop."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from spmd_core.graph.subgraphs import ControlEntry, Subgraph
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops.kernels import control

REPEAT = "spmd::repeat"


class RepeatedEntry(ControlEntry):
    """A loop that a pass makes of operations that follow each other in periods.

    Its operands are the first carry; stacks, of which each iteration reads a row; and what all
    iterations read. Its results are the last carry, and stacks of results of all iterations. Each
    of its scalar inputs is an array with one element for each row.

    Attributes:
        key: entries of equal keys do the same.
        positions: of each operation of its body, the position of the recorded operation that the
            first iteration stems from.
    """

    __slots__ = ("positions",)
    positions: tuple[int, ...]

    @staticmethod
    def of(
        body: Subgraph,
        key: Hashable,
        positions: Sequence[int],
        *,
        num_carry: int,
        rows: tuple[tuple[int, int], ...],
        length: int,
        reverse: bool,
        number_kinds: tuple[type, ...],
    ) -> "RepeatedEntry":
        """The loop.

        Args:
            body: an iteration: (carry, a row of each stack, others) -> (carry, what is stacked).
            key: of the operations in the body.
            positions: the attribute.
            num_carry: the number of carried values.
            rows: for each stack, (a, b): the iteration that makes row i of the results reads row
                a + b * i.
            length: the number of iterations.
            reverse: whether the first iteration makes the last row.
            number_kinds: the types of the scalar inputs of an iteration.
        """
        outs = _outs(body, num_carry, length)
        made = RepeatedEntry(
            REPEAT,
            control.repeat(num_carry, rows, len(number_kinds), length, reverse=reverse),
            (body,),
            outs,
            steps=length,
            stacked=range(num_carry, num_carry + len(rows)),
            stacks=range(num_carry, len(outs)),
        )
        made.number_kinds = number_kinds
        made.positions = tuple(positions)
        made.key = REPEAT, key, num_carry, rows, length, reverse
        return made


def _outs(body: Subgraph, num_carry: int, length: int) -> tuple[Spec, ...]:
    specs: list[Any] = [spec for entry, _ in body.nodes for spec in entry.outs]
    made = [
        (specs[number] if number >= 0 else body.parameters[-number - 1]) for number in body.outputs
    ]
    return (
        *(spec.logical for spec in made[:num_carry]),
        *(Spec.contiguous((length, *spec.shape), spec.dtype) for spec in made[num_carry:]),
    )


def loops(ops: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """The loops among operations: their iterations, and the operations of an iteration."""
    made = ((op.entry, op.bodies) for op in ops if isinstance(op.entry, RepeatedEntry))
    return tuple((entry.steps or 0, len(bodies[0].ops)) for entry, bodies in made)


def identity_of(entry: Entry) -> Hashable:
    """What is equal for two operations that do the same."""
    return entry.key if isinstance(entry, RepeatedEntry) else entry
