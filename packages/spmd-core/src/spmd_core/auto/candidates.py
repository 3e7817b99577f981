"""Candidates of a search: the best choices by the model, for each mesh shape and kind."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from spmd_core.auto import region_rules
from spmd_core.auto.batch import batch_classes
from spmd_core.auto.costs import NONE, SMALL_BYTES, CostModel
from spmd_core.auto.groups import Groups
from spmd_core.auto.machine import Machine
from spmd_core.auto.solve import Solution, solve
from spmd_core.errors import AutoShardingError
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding

_MOST_AXES = 3
# XLA's partitioner reshards between several axes at once worse than the model thinks.
_PER_AXIS = 1.05


class Kind(Enum):
    """What a candidate was asked for, beside the least time."""

    FREE = "least time"
    SHARDED = "least time, parameters split over the first axis"
    REPLICATED = "least time, parameters whole"
    FSDP = "batch and parameters split over the first axis"
    DATA = "batch split over the first axis, parameters whole"
    TENSOR = "batch and parameters split over the first axis, features over the second"


# Of equal candidates the first kind stands: the best ones of those that experts use are compiled.
_IN_ORDER = (Kind.FSDP, Kind.DATA, Kind.TENSOR, Kind.FREE, Kind.SHARDED, Kind.REPLICATED)


@dataclass(frozen=True)
class Candidate:
    """A choice for one mesh shape.

    Attributes:
        mesh_shape: sizes of the axes, the major one first.
        kind: what was asked for.
        solution: the choice, with its modelled time and memory.
    """

    mesh_shape: tuple[int, ...]
    kind: Kind
    solution: Solution


def mesh_shapes(num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of meshes of all devices with at most three axes, those of few axes first.

    Of two axes after the first one only the order with the larger one first: they differ in nothing
    that the model knows.

    Example:
        >>> mesh_shapes(8)
        ((8,), (2, 4), (4, 2), (2, 2, 2))
    """
    if num_devices == 1:
        return ((1,),)
    sizes = [n for n in range(2, num_devices + 1) if num_devices % n == 0]
    found: list[tuple[int, ...]] = []
    for count in range(1, _MOST_AXES + 1):
        for shape in itertools.product(sizes, repeat=count):
            product = 1
            for n in shape:
                product *= n
            if product == num_devices and shape[1:] == tuple(sorted(shape[1:], reverse=True)):
                found.append(shape)
    return tuple(found)


def candidates(
    groups: Groups,
    machine: Machine,
    inputs: Collection[int],
    *,
    mesh: Mesh | None,
    memory: float | None,
) -> list[Candidate]:
    """The candidates, by modelled time; several of equal time and memory are one.

    Args:
        groups: the step.
        machine: the devices.
        inputs: the leaves that come anew with each step.
        mesh: the mesh; None to try all shapes of meshes of the machine's devices.
        memory: the modelled bytes that a device has; None for no limit.

    Raises:
        AutoShardingError: marks of the user contradict each other.
    """
    shapes = mesh_shapes(machine.num_devices) if mesh is None else (tuple(mesh.mesh_shape),)
    found: dict[tuple[float, float], Candidate] = {}
    batch = batch_classes(groups, inputs)
    for shape in shapes:
        model = CostModel(groups, shape, machine, None if mesh is None else mesh.ids)
        marks = fixed(groups, len(shape))
        for kind in _IN_ORDER:
            if not _takes(kind, len(shape), is_given=mesh is not None):
                continue
            allowed = _allowed(model, marks, kind, batch)
            solution = solve(model, memory=memory, allowed=allowed)
            if solution is not None:
                # Equal figures: the same choice on axes of another order, or of fewer devices.
                key = (round(solution.seconds, 9), round(solution.bytes))
                found.setdefault(key, Candidate(shape, kind, solution))
    return sorted(found.values(), key=_order)


def _order(candidate: Candidate) -> tuple[float, float]:
    """Modelled time, with what each further axis must gain to be worth its resharding."""
    solution = candidate.solution
    return solution.seconds * _PER_AXIS ** len(candidate.mesh_shape), solution.bytes


def _takes(kind: Kind, num_axes: int, *, is_given: bool) -> bool:
    """Whether candidates of a kind are made for meshes of so many axes."""
    if kind is Kind.TENSOR:
        return num_axes == 2
    return num_axes < _MOST_AXES or kind is Kind.FREE or is_given


def _allowed(
    model: CostModel,
    marks: Sequence[Mapping[int, int]],
    kind: Kind,
    batch: Mapping[int, int],
) -> list[dict[int, Sequence[int]]]:
    """For each axis the classes that some ties may choose."""
    groups = model.groups
    found: list[dict[int, Sequence[int]]] = [
        {tie: (c,) for tie, c in of_axis.items()} for of_axis in marks
    ]
    if kind is Kind.FREE:
        return found
    nothing = [[NONE] * model.num_elements for _ in model.mesh_shape]
    options = [model.options(axis, nothing) for axis in range(len(found))]
    if kind in (Kind.FSDP, Kind.DATA, Kind.TENSOR):
        for group, c in batch.items():
            tie = groups.tie[group]
            if c in options[0][tie]:
                found[0].setdefault(tie, (c,))
            if kind is Kind.TENSOR:
                found[1].setdefault(tie, tuple(o for o in options[1][tie] if o != c))
    for leaf in groups.step.updated:
        tie = groups.tie[groups.of_tensor[leaf]]
        is_small = groups.step.tensors[leaf].num_bytes < SMALL_BYTES
        for axis, of_axis in enumerate(found):
            if tie in marks[axis]:
                continue
            if kind in (Kind.REPLICATED, Kind.DATA):
                if axis == 0 or kind is Kind.REPLICATED:
                    of_axis[tie] = (NONE,)
            elif (axis == 0 or kind is Kind.TENSOR) and not is_small:
                split = tuple(c for c in options[axis][tie] if c != NONE)
                if split:
                    of_axis[tie] = split
    return found


def fixed(groups: Groups, num_axes: int) -> list[dict[int, int]]:
    """For each axis the classes that the user's marks and manual regions choose, by tie.

    Raises:
        AutoShardingError: marks of the user contradict each other.
    """
    found: list[dict[int, int]] = [{} for _ in range(num_axes)]
    for i, operation in enumerate(groups.step.operations):
        for axis, factor in region_rules.given(operation).items():
            c = NONE if factor is None else groups.factor_class[i, factor]
            found[axis][groups.tie[groups.of_operation[i]]] = c
    for t, tensor in enumerate(groups.step.tensors):
        for axis in () if tensor.manual is None else tensor.manual.axes:
            found[axis][groups.tie[groups.of_tensor[t]]] = NONE
    chosen_by: dict[tuple[int, int], int] = {}
    for t, sharding in _marked(groups):
        tie = groups.tie[groups.of_tensor[t]]
        for axis in range(num_axes):
            dim = next((d for d, axes in enumerate(sharding.dims) if axis in axes), None)
            c = NONE if dim is None else groups.tensor_class.get((t, dim), NONE)
            before = found[axis].setdefault(tie, c)
            first = chosen_by.setdefault((axis, tie), t)
            if before != c:
                raise AutoShardingError(_contradiction(groups, first, t, axis))
    return found


def _marked(groups: Groups) -> Iterator[tuple[int, Sharding]]:
    for t, tensor in enumerate(groups.step.tensors):
        if tensor.fixed is not None:
            yield t, tensor.fixed


def _contradiction(groups: Groups, first: int, second: int, axis: int) -> str:
    tensors = groups.step.tensors
    names = [_described(groups, t) for t in (first, second)]
    specs = [getattr(tensors[t].fixed, "partition_spec", None) for t in (first, second)]
    return (
        "marks of tensors that a step combines element by element must split the same dims; got "
        f"{names[0]} marked with {specs[0]} and {names[1]} with {specs[1]}, which differ along "
        f"axis {axis} of the mesh. Remove one of the marks with clear_sharding, or give both the "
        "same spec."
    )


def _described(groups: Groups, tensor: int) -> str:
    step = groups.step
    one = step.tensors[tensor]
    maker = step.makers[tensor]
    if one.leaf is not None:
        return f"input {one.leaf} of shape {list(one.spec.shape)}"
    assert maker is not None
    operation = step.operations[maker]
    where = "" if operation.origin is None else f" at {operation.origin}"
    return f"a result of shape {list(one.spec.shape)}{where}"
