"""The best choice of one mesh axis after the other.

For each axis, each tie chooses a class or none; pairs of ties have costs (`pairwise`). Axes take
turns until none changes its choice, as the best choice of one depends on those of the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spmd_core.auto.costs import NONE, Choice, CostModel
from spmd_core.auto.pairwise import Limit, least

_MOST_SWEEPS = 3


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
    choices: list[Choice] = [[NONE] * model.num_elements for _ in range(num_axes)]
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
    work, order = work_of(model, choices), _order(model, choices)
    seconds, held = evaluate(model, choices), memory_of(model, choices)
    return Solution(tuple(map(tuple, choices)), seconds, work, held, order)


def _order(model: CostModel, choices: Sequence[Choice]) -> tuple[tuple[int, ...], ...]:
    """For each tie the axes, those first along which most readers and writers are split as it is.

    An axis over which a tensor is gathered before it is read, as parameters are in FSDP, splits the
    blocks of the axes that stay: a gather of blocks that are further apart would permute them.
    """
    groups = model.groups
    axes = range(len(choices))
    if len(axes) == 1:
        return ((0,),) * model.num_elements
    alike = [[0] * len(axes) for _ in range(model.num_elements)]
    for i, times in model.operations:
        operation = groups.step.operations[i]
        own = groups.of_operation[i]
        for t, dims in operation.dims:
            group = groups.of_tensor[t]
            if group == own or not dims:
                continue
            tie = groups.tie[group]
            for axis, choice in enumerate(choices):
                factor = groups.factor_of(i, choice[groups.tie[own]])
                need = next((d for d, x in enumerate(dims) if x[:1] == (factor,)), None)
                held = None if choice[tie] == NONE else groups.dim_of(t, choice[tie])
                alike[tie][axis] += times * (held is not None and need == held)
    return tuple(tuple(sorted(axes, key=lambda a: -of[a])) for of in alike)


def evaluate(model: CostModel, choices: Sequence[Sequence[int]]) -> float:
    """The modelled seconds of all axes' choices."""
    lists = [list(c) for c in choices]
    return model.axis_costs(0, lists).total(lists[0])


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
        seconds = model.plain_work(i, operation, 0, lists, options[tie])
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
    kept = [
        [i for i, c in enumerate(options) if tie not in allowed or c in allowed[tie]]
        for tie, options in enumerate(costs.options)
    ]
    if not all(kept):
        return None
    limits = (
        []
        if memory is None
        else [
            Limit([x[at] for x, at in zip(sizes, kept)], memory)
            for sizes in model.memory_rows(axis, choices)
        ]
    )
    found = least(
        [x[at] for x, at in zip(costs.own, kept)],
        {(a, b): x[kept[a]][:, kept[b]] for (a, b), x in costs.between.items()},
        limits,
    )
    if found is None:
        return None
    return [options[at[i]] for options, at, i in zip(costs.options, kept, found)]
