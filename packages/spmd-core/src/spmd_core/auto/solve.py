"""The best choice of one mesh axis after the other, by integer programs.

For each axis, each tie chooses a class or none; pairs of ties have costs. With products of choices
as variables of their own, constrained by their marginals (the local polytope), that is a mixed
integer program, which HiGHS solves (Huangfu and Hall, 2018). Axes take turns until none changes its
choice, as the best choice of one depends on those of the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

from spmd_core.auto.costs import NONE, Choice, CostModel

_MOST_SWEEPS = 3
_GAP = 1e-3
_MOST_NODES = 500  # of branch and bound; a limit of time would make results differ


@dataclass(frozen=True)
class Solution:
    """Choices for all axes.

    Attributes:
        choices: for each axis, for each tie the class that it splits, or NONE.
        seconds: the modelled time of a step.
        work_s: the part of it without collectives: FLOPs, and reading and writing memory.
        bytes: the modelled memory of a device.
        order: for each tie the axes, in the order in which those that split one dim split it.
    """

    choices: tuple[tuple[int, ...], ...]
    seconds: float
    work_s: float
    bytes: float
    order: tuple[tuple[int, ...], ...]


def solve(
    model: CostModel,
    *,
    memory: float | None = None,
    allowed: Sequence[Mapping[int, Sequence[int]]] = (),
) -> Solution | None:
    """The choices of least modelled time whose memory fits; None if none is found.

    Args:
        model: the costs.
        memory: the bytes of a device; None for no limit.
        allowed: for each axis, for some ties the classes that it may choose.
    """
    num_axes = len(model.mesh_shape)
    choices: list[Choice] = [[NONE] * model.num_ties for _ in range(num_axes)]
    for sweep in range(_MOST_SWEEPS):
        before = [list(c) for c in choices]
        for axis in range(num_axes):
            # While later axes have not chosen, they split nothing: what they may save is unknown.
            rest = int(np.prod(model.mesh_shape[axis + 1 :], dtype=np.int64)) if not sweep else 1
            limit = None if memory is None else memory * rest
            found = _axis(model, axis, choices, limit, allowed[axis] if allowed else {})
            if found is None:
                return None
            choices[axis] = found
        if choices == before or num_axes == 1:
            break
    seconds, work = evaluate(model, choices), work_of(model, choices)
    order = _order(model, choices)
    return Solution(tuple(map(tuple, choices)), seconds, work, memory_of(model, choices), order)


def _order(model: CostModel, choices: Sequence[Choice]) -> tuple[tuple[int, ...], ...]:
    """For each tie the axes, those first along which most readers and writers are split as it is.

    An axis over which a tensor is gathered before it is read, as parameters are in FSDP, splits the
    blocks of the axes that stay: a gather of blocks that are further apart would permute them.
    """
    groups = model.groups
    axes = range(len(choices))
    if len(axes) == 1:
        return ((0,),) * model.num_ties
    alike = [[0] * len(axes) for _ in range(model.num_ties)]
    for i, times in model.operations:
        operation = groups.step.operations[i]
        own = groups.of_operation[i]
        for t, dims in operation.dims:
            group = groups.of_tensor[t]
            if group == own or not dims:
                continue
            tie = groups.tie[group]
            for axis, choice in enumerate(choices):
                factor = next(
                    (
                        f
                        for f in operation.factors
                        if groups.factor_class[i, f] == choice[groups.tie[own]]
                    ),
                    None,
                )
                need = next((d for d, x in enumerate(dims) if x[:1] == (factor,)), None)
                held = None if choice[tie] == NONE else groups.dim_of(t, choice[tie])
                alike[tie][axis] += times * (held is not None and need == held)
    return tuple(tuple(sorted(axes, key=lambda a: -of[a])) for of in alike)


def evaluate(model: CostModel, choices: Sequence[Sequence[int]]) -> float:
    """The modelled seconds of all axes' choices."""
    lists = [list(c) for c in choices]
    total = 0.0
    for axis in range(len(lists)):
        costs = model.axis_costs(axis, lists)
        total += costs.total(lists[axis])
        if axis:  # the work is in each axis's costs, and counts once
            total -= work_of(model, lists)
    return total


def sent(model: CostModel, choices: Sequence[Sequence[int]]) -> float:
    """The bytes that a device sends in collectives, by the model."""
    counting = CostModel(model.groups, model.mesh_shape, model.machine.counting_bytes(), model.ids)
    return evaluate(counting, choices)


def work_of(model: CostModel, choices: Sequence[Sequence[int]]) -> float:
    """The modelled seconds in which a device computes its part of all operations."""
    lists = [list(c) for c in choices]
    options = model.options(0, lists)
    work = 0.0
    for i, times in model.operations:
        operation = model.groups.step.operations[i]
        tie = model.groups.tie[model.groups.of_operation[i]]
        seconds, _ = model.plain_work(i, operation, 0, lists, options[tie])
        work += times * float(seconds[options[tie].index(lists[0][tie])])
    return work


def memory_of(model: CostModel, choices: Sequence[Sequence[int]]) -> float:
    """The modelled bytes of a device at its peak."""
    lists = [list(c) for c in choices]
    options = model.options(0, lists)
    return max(
        sum(float(row[options[tie].index(lists[0][tie])]) for tie, row in enumerate(rows))
        for rows in model.memory_rows(0, lists)
    )


def _axis(
    model: CostModel,
    axis: int,
    choices: Sequence[Choice],
    memory: float | None,
    allowed: Mapping[int, Sequence[int]],
) -> Choice | None:
    """The best choice of one axis, given the others."""
    costs = model.axis_costs(axis, choices)
    first = np.cumsum([0, *(len(x) for x in costs.options)])
    num_choices = int(first[-1])
    # Pairs between which nothing ever moves need no variables.
    pairs = [(a, b, x) for (a, b), x in sorted(costs.between.items()) if x.any()]
    start, at = [], num_choices
    for _, _, x in pairs:
        start.append(at)
        at += x.size
    objective = np.concatenate([*costs.own, *(x.reshape(-1) for _, _, x in pairs)])
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    low: list[float] = []
    high: list[float] = []

    def row(entries: list[tuple[int, float]], least: float, most: float) -> None:
        for column, value in entries:
            rows.append(len(low))
            columns.append(column)
            values.append(value)
        low.append(least)
        high.append(most)

    for tie, options in enumerate(costs.options):
        row([(int(first[tie]) + i, 1.0) for i in range(len(options))], 1, 1)
    for (a, b, x), base in zip(pairs, start):
        for i in range(x.shape[0]):
            cells = [(base + i * x.shape[1] + j, 1.0) for j in range(x.shape[1])]
            row([*cells, (int(first[a]) + i, -1.0)], 0, 0)
        for j in range(x.shape[1]):
            cells = [(base + i * x.shape[1] + j, 1.0) for i in range(x.shape[0])]
            row([*cells, (int(first[b]) + j, -1.0)], 0, 0)
    if memory is not None:
        for sizes in model.memory_rows(axis, choices):
            scaled = np.concatenate(sizes) / memory
            row([(i, float(x)) for i, x in enumerate(scaled) if x], -np.inf, 1)
    upper = np.ones(len(objective))
    for tie, classes in allowed.items():
        for i, c in enumerate(costs.options[tie]):
            if c not in classes:
                upper[int(first[tie]) + i] = 0
    scale = float(objective.max()) or 1.0
    found = optimize.milp(
        objective / scale,
        integrality=np.r_[np.ones(num_choices), np.zeros(len(objective) - num_choices)],
        bounds=optimize.Bounds(0, upper),
        constraints=optimize.LinearConstraint(
            sparse.csr_array((values, (rows, columns)), shape=(len(low), len(objective))), low, high
        ),
        options={"mip_rel_gap": _GAP, "node_limit": _MOST_NODES, "presolve": True},
    )
    if found.x is None:
        return None
    return [
        options[int(np.argmax(found.x[int(first[tie]) : int(first[tie + 1])]))]
        for tie, options in enumerate(costs.options)
    ]
