"""Finds the repeated parts of a recorded graph, and where cutting it costs least."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from spmd_core.graph.values import OpResult, Value

# The least number of operations between two cuts, as starting a program has a cost.
MIN_PIECE = 32


@dataclass(frozen=True)
class Repetition:
    """A run of operations in which each equals the one a period before.

    Attributes:
        start: the position of the run's first operation.
        end: the position after its last one.
        period: how many operations are repeated.
    """

    start: int
    end: int
    period: int


def longest(nodes: Sequence[Value]) -> Repetition | None:
    """The run that makes up most of the graph; None if it has fewer than four repetitions.

    The run need not begin with the graph, nor end with it: a loop has something before it, and its
    last round holds results that nothing will read. So the period is sought in the middle half of
    the graph, with the failure function of Knuth, Morris and Pratt (1977), in linear time.

    Args:
        nodes: the pending operations, in the order of recording.
    """
    entries = [node.entry for node in nodes]
    first, last = len(entries) // 4, 3 * len(entries) // 4
    middle = entries[first:last]
    period = _period(middle)
    if not middle or 2 * period > len(middle):
        return None
    while first and entries[first - 1] is entries[first - 1 + period]:
        first -= 1
    while last < len(entries) and entries[last] is entries[last - period]:
        last += 1
    return Repetition(first, last, period)


def _period(items: Sequence[object]) -> int:
    """The smallest distance at which every two items are the same object."""
    border = [0] * len(items)
    length = 0
    for position in range(1, len(items)):
        while length and items[position] is not items[length]:
            length = border[length - 1]
        if items[position] is items[length]:
            length += 1
        border[position] = length
    return len(items) - border[-1] if items else 0


def runs(items: Sequence[Hashable], least: int) -> list[Repetition]:
    """All runs of items in which a period is repeated, each with its smallest period.

    Each is as long as it can be; runs may overlap. Every period is tried, in quadratic time with a
    small factor: 10 ms for 5,000 items.

    Args:
        items: such as operations, as what makes them equal.
        least: the least number of repetitions, at least 2.

    Returns:
        The runs, those of smaller periods first.
    """
    numbers: dict[Hashable, int] = {}
    row = np.array([numbers.setdefault(x, len(numbers)) for x in items], np.int32)
    found: list[Repetition] = []
    for period in range(1, len(row) // least + 1):
        are_same = row[:-period] == row[period:]
        if np.count_nonzero(are_same) < (least - 1) * period:
            continue
        differ = np.flatnonzero(~are_same)
        ends = np.append(differ, len(row) - period)
        starts = np.concatenate([[0], differ + 1])
        for i in np.flatnonzero(ends - starts >= (least - 1) * period):
            run = Repetition(int(starts[i]), int(ends[i]) + period, period)
            if not any(_contains(shorter, run) for shorter in found):
                found.append(run)
    return found


def _contains(shorter: Repetition, run: Repetition) -> bool:
    """Whether a run is one of a smaller period."""
    is_inside = shorter.start <= run.start and run.end <= shorter.end
    return is_inside and run.period % shorter.period == 0


def has_steps(nodes: Sequence[Value], found: Repetition, states: Iterable[Value]) -> bool:
    """Whether the repetitions are steps of a loop, and not, say, the layers of one step.

    Steps update a state that they also read for another purpose, as they do with parameters. Sums
    over the microsteps of one step, such as gradients, are read for their update alone.

    Args:
        nodes: the pending operations.
        found: their repetition.
        states: the pending values of tensors that had a computed value before.
    """
    position_of = {node: i for i, node in enumerate(nodes)}
    readers = Counter(result_of(value) for node in nodes for value in node.inputs)
    for state in states:
        node, index = result_of(state)
        position = position_of[node]
        if not found.start + found.period <= position < found.end:
            continue
        earlier = nodes[position - found.period]
        if readers[earlier, index] > 1 and _depends(node, earlier, position_of):
            return True
    return False


def result_of(value: Value) -> tuple[Value, int]:
    """The operation of which a pending value is a result, and its position among the results."""
    return (
        (value.parent, value.index) if isinstance(value, OpResult) and value.parent else (value, 0)
    )


def _depends(node: Value, earlier: Value, position_of: dict[Value, int]) -> bool:
    """Whether an operation depends on an earlier one, through any operations between them."""
    bound = position_of[earlier]
    stack, seen = [node], {node}
    while stack:
        for value in stack.pop().inputs:
            source = result_of(value)[0]
            if source is earlier:
                return True
            if position_of.get(source, -1) > bound and source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def boundaries(nodes: Sequence[Value], found: Repetition) -> list[int]:
    """Where to cut the run: in each period, where the fewest bytes are live.

    In a training loop that is after the optimizer's last update. Short periods are cut together.

    Returns:
        Ascending positions; a piece ends before the operation at its position.
    """
    last_use: dict[Value, int] = {}
    for position, node in enumerate(nodes):
        for value in node.inputs:
            last_use[value] = position
    change = [0] * (len(nodes) + 1)
    position_of = {node: i for i, node in enumerate(nodes)}
    for value, last in last_use.items():
        made = position_of.get(result_of(value)[0])
        if made is not None:
            change[made + 1] += value.spec.num_bytes
            change[last + 1] -= value.spec.num_bytes
    passing = list(accumulate(change))
    # The last period may hold results that nobody has read yet.
    low = found.end - 2 * found.period
    best = min(range(low + 1, low + found.period + 1), key=passing.__getitem__)
    step = piece_length(found)
    top = best + (found.end - best) // step * step
    return list(reversed(range(top, found.start + found.period - 1, -step)))


def piece_length(found: Repetition) -> int:
    """How many operations lie between two cuts: one period, or several short ones."""
    return found.period * -(-MIN_PIECE // found.period)


def serials_between(nodes: Sequence[Value], found: Repetition) -> int:
    """How many operations are recorded between two cuts, including those that nothing needs."""
    last = nodes[found.end - 1].serial - nodes[found.end - 1 - found.period].serial
    return last * piece_length(found) // found.period
