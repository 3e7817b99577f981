"""The choices of least cost, where single choices and pairs of choices have costs.

Elements are eliminated, those with the smallest tables first: for each choice of its neighbours an
element's best choice is known, so its cost becomes one of the neighbours together (Bertele and
Brioschi, "Nonserial Dynamic Programming", 1972). This is exact. Where a table would become too
large, only elements with at most two neighbours are eliminated, and what is left is a mixed integer
program: products of choices are variables of their own, constrained by their marginals (the local
polytope), and HiGHS solves it (Huangfu and Hall, 2018). Limits on sums, as of memory, do not pass
through an elimination: where the best choices without limits break them, the program has all
elements.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

_MOST_ENTRIES = 1 << 18  # of the table of an element and its neighbours
_MOST_NEIGHBOURS = 2  # of an element that is eliminated where tables become larger
_GAP = 1e-3
_MOST_NODES = 500  # of branch and bound; a limit of time would make results differ


@dataclass(frozen=True)
class Limit:
    """What a sum over all elements must not exceed.

    Attributes:
        of: for each element what each of its choices adds.
        most: the most that the sum may be.
    """

    of: Sequence[np.ndarray]
    most: float

    def holds(self, chosen: Sequence[int]) -> bool:
        """Whether choices keep it."""
        return sum(float(x[c]) for x, c in zip(self.of, chosen)) <= self.most


def least(
    own: Sequence[np.ndarray],
    between: Mapping[tuple[int, int], np.ndarray],
    limits: Sequence[Limit] = (),
) -> list[int] | None:
    """The number of each element's choice; None if none is found that keeps the limits.

    Args:
        own: for each element the cost of each choice, at least one.
        between: for pairs of elements, the smaller number first, the cost of each pair of choices.
        limits: sums that must not be exceeded.
    """
    pairs = {pair: x for pair, x in sorted(between.items()) if x.any()}
    found = _without_limits(own, pairs)
    if found is None or not all(limit.holds(found) for limit in limits):
        return _solved(own, pairs, limits)
    return found


@dataclass
class _Table:
    """Costs by the choices of some elements.

    Attributes:
        elements: the elements, ascending.
        costs: a dim for each.
    """

    elements: tuple[int, ...]
    costs: np.ndarray

    def over(self, elements: Sequence[int]) -> np.ndarray:
        """The costs, with a dim for each of these elements, of size 1 for those that it lacks."""
        shape = [1] * len(elements)
        for element, size in zip(self.elements, self.costs.shape):
            shape[elements.index(element)] = size
        return self.costs.reshape(shape)


def _without_limits(
    own: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]
) -> list[int] | None:
    sizes = [len(x) for x in own]
    order, core = _order(sizes, pairs)
    tables: list[list[_Table]] = [[_Table((i,), x)] for i, x in enumerate(own)]
    place = {element: i for i, element in enumerate(order)}

    def add(table: _Table) -> None:
        """To the element that is eliminated first; without one to any."""
        first = min(table.elements, key=lambda x: place.get(x, len(order)))
        tables[first].append(table)

    for pair, x in pairs.items():
        add(_Table(pair, x))
    gone: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    for element in order:
        found = tables[element]
        around = sorted({x for table in found for x in table.elements} - {element})
        elements = (element, *around)
        costs = np.zeros([sizes[x] for x in elements])
        for table in found:
            costs = costs + _transposed(table, element).over(elements)
        gone.append((element, tuple(around), costs))
        if around:
            add(_Table(tuple(around), costs.min(0)))
    chosen = [0] * len(own)
    if core:
        found_core = _core(core, sizes, tables)
        if found_core is None:
            return None
        for element, choice in zip(core, found_core):
            chosen[element] = choice
    for element, neighbours, costs in reversed(gone):
        row = costs[(slice(None), *(chosen[x] for x in neighbours))]
        chosen[element] = int(np.argmin(row))
    return chosen


def _transposed(table: _Table, first: int) -> _Table:
    """The table with the dim of one of its elements in front."""
    i = table.elements.index(first)
    if not i:
        return table
    rest = (*table.elements[:i], *table.elements[i + 1 :])
    others = (x for x in range(table.costs.ndim) if x != i)
    return _Table((first, *rest), table.costs.transpose((i, *others)))


def _core(
    core: Sequence[int], sizes: Sequence[int], tables: Sequence[Sequence[_Table]]
) -> list[int] | None:
    """The choices of the elements that are not eliminated."""
    number = {element: i for i, element in enumerate(core)}
    own = [np.zeros(sizes[element]) for element in core]
    pairs: dict[tuple[int, int], np.ndarray] = {}
    for table in (table for element in core for table in tables[element]):
        at = tuple(number[x] for x in table.elements)
        if len(at) == 1:
            own[at[0]] += table.costs
        else:
            a, b = at
            pairs[a, b] = pairs.get((a, b), 0) + table.costs
    return _solved(own, dict(sorted(pairs.items())), ())


def _order(
    sizes: Sequence[int], pairs: Mapping[tuple[int, int], np.ndarray]
) -> tuple[list[int], list[int]]:
    """The elements to eliminate, in order, and those that are left.

    The next one is that whose table is smallest; equals come in their order. Where tables would
    become too large, only elements with at most two neighbours are eliminated.
    """
    for most_entries, most_neighbours in ((_MOST_ENTRIES, len(sizes)), (None, _MOST_NEIGHBOURS)):
        around: list[set[int]] = [set() for _ in sizes]
        for a, b in pairs:
            around[a].add(b)
            around[b].add(a)

        def entries(element: int, around: list[set[int]] = around) -> int:
            return sizes[element] * math.prod(sizes[x] for x in around[element])

        queue = [(entries(x), x) for x in range(len(sizes)) if len(around[x]) <= most_neighbours]
        heapq.heapify(queue)
        order: list[int] = []
        left = set(range(len(sizes)))
        while queue:
            count, element = heapq.heappop(queue)
            is_known = element in left and len(around[element]) <= most_neighbours
            if not is_known or entries(element) != count:
                continue
            if most_entries is not None and count > most_entries:
                break
            left.remove(element)
            order.append(element)
            for x in around[element]:
                around[x] |= around[element]
                around[x] -= {x, element}
            for x in around[element]:
                if len(around[x]) <= most_neighbours:
                    heapq.heappush(queue, (entries(x), x))
        if not left or most_entries is None:
            break
    return order, sorted(left)


def _solved(
    own: Sequence[np.ndarray],
    pairs: Mapping[tuple[int, int], np.ndarray],
    limits: Sequence[Limit],
) -> list[int] | None:
    """The choices by a mixed integer program."""
    first = np.cumsum([0, *(len(x) for x in own)])
    num_choices = int(first[-1])
    objective = np.concatenate([*own, *(x.reshape(-1) for x in pairs.values())])
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # rows, columns, values
    low: list[np.ndarray] = [np.ones(len(own))]
    entries.append(
        (
            np.repeat(np.arange(len(own)), [len(x) for x in own]),
            np.arange(num_choices),
            np.ones(num_choices),
        )
    )
    row, column = len(own), num_choices
    for (a, b), x in pairs.items():
        num_a, num_b = x.shape
        cells = column + np.arange(x.size)
        for rows, element, count in (
            (np.repeat(np.arange(num_a), num_b), a, num_a),
            (np.tile(np.arange(num_b), num_a), b, num_b),
        ):
            entries.append((row + rows, cells, np.ones(x.size)))
            entries.append(
                (row + np.arange(count), first[element] + np.arange(count), -np.ones(count))
            )
            low.append(np.zeros(count))
            row += count
        column += x.size
    high = [*low]
    for limit in limits:
        sizes = np.concatenate(limit.of) / limit.most
        (used,) = np.nonzero(sizes)
        entries.append((np.full(len(used), row), used, sizes[used]))
        low.append(np.array([-np.inf]))
        high.append(np.ones(1))
        row += 1
    rows, columns, values = (np.concatenate(x) for x in zip(*entries))
    matrix = sparse.csr_array((values, (rows, columns)), shape=(row, column))
    found = optimize.milp(
        objective / (float(objective.max()) or 1.0),
        integrality=np.r_[np.ones(num_choices), np.zeros(column - num_choices)],
        bounds=optimize.Bounds(0, 1),
        constraints=optimize.LinearConstraint(matrix, np.concatenate(low), np.concatenate(high)),
        options={"mip_rel_gap": _GAP, "node_limit": _MOST_NODES, "presolve": True},
    )
    if found.x is None:
        return None
    return [int(np.argmax(found.x[first[i] : first[i + 1]])) for i in range(len(own))]
