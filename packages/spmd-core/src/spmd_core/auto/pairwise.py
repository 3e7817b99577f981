"""The choices of least cost, where single choices and pairs of choices have costs.

Elements with at most two neighbours are eliminated first: for each choice of its neighbours an
element's best choice is known, so its cost becomes one of the neighbours, or of their pair. This is
exact, and takes nearly all elements of a step. What is left is a mixed integer program: products of
choices are variables of their own, constrained by their marginals (the local polytope), and HiGHS
solves it (Huangfu and Hall, 2018). Limits on sums, as of memory, do not pass through an
elimination: where the best choices without limits break them, the program has all elements.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

_MOST_NEIGHBOURS = 2  # of an element that is eliminated
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
class _Eliminated:
    """An element that was eliminated: its costs, by the choices of its neighbours."""

    element: int
    neighbours: tuple[int, ...]
    costs: np.ndarray  # its own dim first, then those of the neighbours


def _without_limits(
    own: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]
) -> list[int] | None:
    costs = [np.array(x) for x in own]
    # For each element its neighbours, with the costs of both: its own choice is the first dim.
    around: list[dict[int, np.ndarray]] = [{} for _ in own]
    for (a, b), x in pairs.items():
        around[a][b], around[b][a] = x, x.T
    gone: list[_Eliminated] = []
    left = set(range(len(own)))
    # Those with fewest neighbours come first, and equals in their order.
    queue = [(len(x), element) for element, x in enumerate(around) if len(x) <= _MOST_NEIGHBOURS]
    heapq.heapify(queue)
    while queue:
        count, element = heapq.heappop(queue)
        if element not in left or len(around[element]) != count:
            continue
        left.remove(element)
        neighbours = tuple(sorted(around[element]))
        table = costs[element].reshape(-1, *(1 for _ in neighbours))
        for i, other in enumerate(neighbours):
            shape = [-1, 1, 1][: len(neighbours) + 1]
            shape[1 + i] = len(costs[other])
            table = table + around[element][other].reshape(shape)
            del around[other][element]
        gone.append(_Eliminated(element, neighbours, table))
        best = table.min(0)
        if len(neighbours) == 1:
            costs[neighbours[0]] += best
        elif neighbours:
            a, b = neighbours
            around[a][b] = around[a].get(b, 0) + best
            around[b][a] = around[a][b].T
        for other in neighbours:
            if len(around[other]) <= _MOST_NEIGHBOURS:
                heapq.heappush(queue, (len(around[other]), other))
    chosen = [0] * len(own)
    if left:
        core = sorted(left)
        number = {element: i for i, element in enumerate(core)}
        inner = {
            (number[a], number[b]): x for a in core for b, x in sorted(around[a].items()) if a < b
        }
        found = _solved([costs[element] for element in core], inner, ())
        if found is None:
            return None
        for element, choice in zip(core, found):
            chosen[element] = choice
    for one in reversed(gone):
        costs_of = np.moveaxis(one.costs, 0, -1)
        for other in one.neighbours:
            costs_of = costs_of[chosen[other]]
        chosen[one.element] = int(np.argmin(costs_of))
    return chosen


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
