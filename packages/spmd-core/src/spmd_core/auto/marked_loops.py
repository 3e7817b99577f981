"""Marks of tensors inside of loops' bodies, where a search splits them."""

from collections.abc import Mapping, Sequence

from spmd_core.auto.step_graph import Place
from spmd_core.graph.subgraphs import ControlEntry, Subgraph
from spmd_core.graph.values import Entry, Spec
from spmd_core.marks.constraints import mark_entry
from spmd_core.program.mark_names import MARK, MARK_SHARDING
from spmd_core.sharding.sharding import Sharding
from spmd_core.source_lines import Origin

# Where a value is, its sharding, and whether it is a gradient of a parameter.
InLoop = tuple[Place, Sharding, bool]


def mark(spec: Spec, sharding: Sharding, *, summed_over: tuple[int, ...] | None = None) -> Entry:
    """The operation that marks a value.

    Args:
        spec, sharding: of the value.
        summed_over: of a gradient, which is summed over the devices by then, the axes over which it
            is; () if they follow from how the inputs are split. None if it is no gradient.
    """
    if summed_over is None:
        return mark_entry(spec, sharding, MARK_SHARDING)
    return mark_entry(spec, sharding, MARK, summed_over=summed_over)


def by_loop(marks: Sequence[InLoop]) -> Mapping[int, list[InLoop]]:
    """The marks by the first part of their places, without it."""
    found: dict[int, list[InLoop]] = {}
    for place, sharding, is_gradient in marks:
        found.setdefault(place[0], []).append((place[1:], sharding, is_gradient))
    return found


def with_marks(entry: Entry, marks: Sequence[InLoop]) -> Entry:
    """A loop with marks in its body; the operation itself without any.

    Args:
        entry: the operation.
        marks: their places are value numbers of the body, those of loops in it behind the number
            of the loop's node there.
    """
    if not marks:
        return entry
    assert isinstance(entry, ControlEntry)
    (body,) = entry.subgraphs
    of_values = {x[0][0]: x for x in marks if len(x[0]) == 1}
    inner = by_loop([x for x in marks if len(x[0]) > 1])
    nodes: list[tuple[Entry, tuple[int, ...]]] = []
    origins: list[Origin | None] = []
    number: dict[int, int] = {}
    count = 0

    def follow(value: int, spec: Spec, new: int) -> None:
        """Notes the new number of a value, and marks it."""
        nonlocal count
        number[value] = new
        if value in of_values:
            _, sharding, is_gradient = of_values[value]
            nodes.append((mark(spec, sharding, summed_over=() if is_gradient else None), (new,)))
            origins.append(None)
            number[value] = count
            count += 1

    for i, spec in enumerate(body.parameters):
        follow(-i - 1, spec, -i - 1)
    before = 0
    for i, (own, inputs) in enumerate(body.nodes):
        nodes.append((with_marks(own, inner.get(i, ())), tuple(number[n] for n in inputs)))
        origins.append(body.origins[i] if body.origins else None)
        first = count
        count += len(own.outs)
        for k, spec in enumerate(own.outs):
            follow(before + k, spec, first + k)
        before += len(own.outs)
    outputs = tuple(number[n] for n in body.outputs)
    kept = tuple(origins) if body.origins else ()
    return entry.with_subgraphs((Subgraph(body.parameters, tuple(nodes), outputs, kept),))
