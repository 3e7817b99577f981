"""Finds tensors that are updated or copied along with the rows of a stack: they may be stacked.

An optimizer updates the moments of a layer's parameter along with that parameter's gradient, which
is a row of a stack. So the moments of all layers may be the rows of a stack of their own.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_core.graph.repetition import result_of
from spmd_core.graph.stacks import Stack, UnstackEntry
from spmd_core.graph.values import OpResult, Spec, Value

# How many operations an operand is followed back to the row that it comes from, as a gradient is
# marked, clipped and cast; and how many updates of a tensor are looked at.
_MOST_STEPS = 16
# So many times as large as a row is what may lie along it.
_MOST_TIMES = 8

# For each leaf that is a row, its stack and its index.
Rows = Mapping[Value, tuple[Stack, int]]
# Values that a loop will compute, one in each iteration: for an operation and the position of its
# result, what has the iterations in common, which of them it is, and how many there are.
Iterations = Mapping[tuple[Value, int], tuple[Hashable, int, int]]


@dataclass(frozen=True)
class Candidate:
    """A tensor that may be a row of a stack.

    Attributes:
        value: the value as operations read it.
        leaf: the leaf that would become a row.
        form: what it has in common with the other rows.
        source: the leaf of which it is a copy; None for none.
    """

    value: Value
    leaf: Value
    form: Hashable
    source: Value | None = None


@dataclass(frozen=True)
class Group:
    """Leaves, one for each row of a stack along which they lie.

    Attributes:
        leaves: in the order of the rows.
        along: the stack, the operation whose results are its rows, or a loop's values.
    """

    leaves: Sequence[Value]
    along: Any


def groups_along(
    rows: Rows,
    iterations: Iterations,
    nodes: Sequence[Value],
    candidates: Iterable[Candidate],
) -> list[Group]:
    """The candidates that make up whole stacks.

    Args:
        rows: the rows that are known.
        iterations: the values that will be rows of what a loop computes.
        nodes: the operations of the cut.
        candidates: the tensors that may lie along these rows.
    """
    readers: dict[Value, list[Value]] = {}
    for node in nodes:
        for x in node.inputs:
            readers.setdefault(x, []).append(node)
    found: dict[Hashable, dict[int, Value]] = {}
    counts: dict[Hashable, tuple[Any, int]] = {}
    for candidate in candidates:
        place = _along(candidate, readers, rows, iterations)
        if place is None:
            continue
        repeated = 0
        key: Hashable = (place.along, place.use, candidate.form, repeated)
        while place.index in found.get(key, ()):
            repeated += 1
            key = (place.along, place.use, candidate.form, repeated)
        found.setdefault(key, {})[place.index] = candidate.leaf
        counts[key] = place.along, place.count
    return [
        Group([group[i] for i in range(len(group))], counts[key][0])
        for key, group in found.items()
        if len(group) == counts[key][1]
    ]


@dataclass(frozen=True)
class _Place:
    """Along which row a tensor lies.

    Attributes:
        along: the stack, the operation whose results are its rows, or a loop's values.
        index: of the row.
        count: the number of rows.
        use: how the tensor is used along with it.
    """

    along: Any
    index: int
    count: int
    use: Hashable = None


def _along(
    candidate: Candidate,
    readers: Mapping[Value, Sequence[Value]],
    rows: Rows,
    iterations: Iterations,
) -> _Place | None:
    """The row along with which a tensor is updated, or from which it is copied, if there is one."""
    if candidate.source is not None:
        if candidate.source not in rows:
            return None
        stack, index = rows[candidate.source]
        return _Place(stack, index, len(stack.owners), "copy")
    value, uses = candidate.value, []
    for _ in range(_MOST_STEPS):
        update = None
        for node in readers.get(value, ()):
            position, partners = _partners(node, value)
            uses.append((node.entry.name, position))
            for other in partners:
                place = _place(other, rows, iterations)
                if place is not None and not _is_much_larger(candidate.leaf, place.along):
                    return _Place(place.along, place.index, place.count, tuple(uses))
            if node.entry.replaces and update is None:
                update = node
        if update is None or len(update.entry.outs) > 1:
            return None
        value = update
    return None


def row_behind(
    value: Value, iterations: Iterations
) -> tuple[Hashable, int, int, tuple[str, ...]] | None:
    """The row of a stack from which a value of its shape is computed, as a clipped gradient is.

    Returns:
        What the rows have in common, which of them it is, how many there are, and the names of the
        operations from the value back to the row; None if it is computed from no row.
    """
    shape = value.spec.shape
    waiting: list[tuple[Value, tuple[str, ...]]] = [(value, ())]
    for value, names in waiting:  # it grows meanwhile
        place = _computed_row(value, iterations)
        if place is not None:
            return place.along, place.index, place.count, names
        node = value.parent or value
        if node.data is not None:
            continue
        operands: Sequence[Value] = node.inputs
        length, count = lists_of(node) if len(operands) > 1 else (0, 0)
        if length > 1:
            item = value.index % length if isinstance(value, OpResult) else 0
            operands = operands[item : length * count : length]
        behind = (*names, node.entry.name)
        waiting += [(x, behind) for x in operands if x.spec.shape == shape]
        del waiting[_MOST_STEPS:]
    return None


def _computed_row(value: Value, iterations: Iterations) -> _Place | None:
    """The row that a value is, of a stack that the cut computes or takes apart."""
    if (found := iterations.get(result_of(value))) is not None:
        return _Place(*found)
    node = value.parent
    if isinstance(value, OpResult) and node is not None and isinstance(node.entry, UnstackEntry):
        return _Place(node, value.index, len(node.entry.outs))
    return None


def _is_much_larger(leaf: Value, along: Any) -> bool:
    """Whether a tensor is none that lies along rows as small as these, such as counters of steps.

    To stack it may cost more than it saves. A moment in float64 is 4 times as large as a bfloat16.
    """
    row: Spec | None = along.row if isinstance(along, Stack) else None
    if isinstance(along, Value):
        row = along.entry.outs[0]
    return row is not None and leaf.spec.num_bytes > _MOST_TIMES * row.num_bytes


def _partners(node: Value, operand: Value) -> tuple[int, Sequence[Value]]:
    """The position of an operand among the arguments, and the operands that belong to it.

    An operation on lists, such as a fused optimizer's, goes over their tensors one by one.
    """
    position = list(node.inputs).index(operand)
    length, count = lists_of(node)
    if length < 2:
        return position, [x for i, x in enumerate(node.inputs) if i != position]
    place, index = divmod(position, length)
    return place, node.inputs[index : length * count : length]


def lists_of(node: Value) -> tuple[int, int]:
    """The length of the lists of tensors that an operation takes, and how many; 0 for none."""
    lists = [a for a in (node.entry.arguments or {}).values() if isinstance(a, (list, tuple))]
    lengths = [len(a) for a in lists if a and isinstance(a[0], Spec)]
    return (lengths[0] if lengths else 0), len(lengths)


def _place(value: Value, rows: Rows, iterations: Iterations) -> _Place | None:
    """The row that a value is computed from."""
    waiting, seen = [value], 0
    while waiting and seen < _MOST_STEPS:
        value = waiting.pop(0)
        seen += 1
        if value in rows:
            stack, index = rows[value]
            return _Place(stack, index, len(stack.owners))
        if (found := _computed_row(value, iterations)) is not None:
            return found
        waiting += (value.parent or value).inputs
    return None
