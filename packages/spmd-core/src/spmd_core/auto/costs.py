"""The modelled cost of a choice in seconds: compute, memory traffic, collectives, resharding."""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spmd_core.auto.alive import alive
from spmd_core.auto.groups import Groups
from spmd_core.auto.machine import Machine
from spmd_core.auto.resharding import Held, Partial, Resharding
from spmd_core.auto.shared import sharing
from spmd_core.auto.step_graph import Operation
from spmd_core.auto.work import Work

NONE = -1  # the choice not to split
PARTIAL = -2  # the choice of a sum that its parts lie on the devices of an axis
# For each tie, and then for each element that is shared, the class that an axis splits, or NONE.
Choice = list[int]

# Of two choices that cost the same, the one that stores less is better: as if each byte that a
# device holds were read once in so many steps.
_STEPS_PER_READ = 100
# A parameter of fewer bytes saves so little where it is split that one more collective costs more.
SMALL_BYTES = 1 << 16
# The part of a latency that a larger parameter's collective costs, as XLA combines many into one.
_COMBINED = 0.1


@dataclass(frozen=True)
class AxisCosts:
    """The costs of a step by one axis's choices, given those of the other axes.

    Attributes:
        options: for each element, a tie or what is shared, the classes that the axis may split,
            NONE first.
        own: for each element the seconds of each option.
        between: for pairs of elements, the seconds of each pair of options.
    """

    options: tuple[tuple[int, ...], ...]
    own: tuple[np.ndarray, ...]
    between: dict[tuple[int, int], np.ndarray]

    def total(self, choice: Sequence[int]) -> float:
        """The seconds of a choice."""
        at = [options.index(c) for options, c in zip(self.options, choice)]
        own = sum(float(costs[i]) for costs, i in zip(self.own, at))
        return own + sum(float(x[at[a], at[b]]) for (a, b), x in self.between.items())


class CostModel:
    """The costs of a step on a mesh.

    Args:
        groups: the step.
        mesh_shape: the sizes of the mesh's axes.
        machine: the devices.
        ids: the mesh's devices, row by row; by default all, in the order of their numbers.
    """

    def __init__(
        self,
        groups: Groups,
        mesh_shape: Sequence[int],
        machine: Machine,
        ids: Sequence[int] | None = None,
    ) -> None:
        self.ids = tuple(range(math.prod(mesh_shape)) if ids is None else ids)
        self.groups, self.mesh_shape, self.machine = groups, tuple(mesh_shape), machine
        crossing = machine.crossing(mesh_shape, self.ids)
        self._resharding = Resharding(self.mesh_shape, crossing, machine)
        self._num_ties, self._shared = max(groups.tie) + 1, groups.once(sharing)
        self.num_elements = self._num_ties + len(self._shared.elements)
        first = {tie: groups.groups[number] for number, tie in reversed([*enumerate(groups.tie)])}
        # The classes that each element may choose, with the sizes along them.
        self._classes = [
            {c: sizes for c, sizes in enumerate(first[tie].sizes) if c not in first[tie].fixed}
            for tie in range(self._num_ties)
        ] + [x.sizes for x in self._shared.elements]
        self.operations = groups.once(_kinds)
        self._work = Work(groups, mesh_shape, machine)
        self._works: dict[Hashable, np.ndarray] = {}
        self._prices: dict[Hashable, np.ndarray] = {}
        self._wide: dict[int, int] = {}  # by gradient, as a product makes it
        self._known: dict[tuple[int, tuple[tuple[int, ...], ...]], AxisCosts] = {}
        self._rows: dict[tuple[int, tuple[tuple[int, ...], ...]], list[list[np.ndarray]]] = {}

    def options(self, axis: int, choices: Sequence[Choice]) -> tuple[tuple[int, ...], ...]:
        """The classes of each element that an axis may split, given what the other axes split."""
        found = []
        for element, classes in enumerate(self._classes):
            allowed = [NONE]
            for c, sizes in classes.items():
                shards = self.mesh_shape[axis]
                for other, choice in enumerate(choices):
                    if other != axis and choice[element] == c:
                        shards *= self.mesh_shape[other]
                if all(_is_even(size, shards) for size in sizes):
                    allowed.append(c)
            found.append(tuple(allowed))
        for number, one in enumerate(self._shared.elements, self._num_ties):
            if one.is_sum:
                found[number] = (*found[number], PARTIAL)
        return tuple(found)

    def axis_costs(self, axis: int, choices: Sequence[Choice]) -> AxisCosts:
        """The costs of each choice of an axis, given those of the others.

        Searches of different kinds on one mesh ask for equal ones, so they are kept.
        """
        key = _key(axis, choices)
        if key not in self._known:
            self._known[key] = self._axis_costs(axis, choices)
        return self._known[key]

    def _axis_costs(self, axis: int, choices: Sequence[Choice]) -> AxisCosts:
        options = self.options(axis, choices)
        own = [np.zeros(len(x)) for x in options]
        between: dict[tuple[int, int], np.ndarray] = {}
        ties, groups = self.groups.tie, self.groups
        for tie, held in enumerate(self._held(axis, choices, options)):
            own[tie] += held / (_STEPS_PER_READ * self.machine.memory_bytes_per_s)

        def add(element: int, other: int, found: np.ndarray) -> None:
            if other == element:
                own[element] += np.diagonal(found)
            elif element < other:
                between[element, other] = between.get((element, other), 0) + found
            else:
                between[other, element] = between.get((other, element), 0) + found.T

        for number, one in enumerate(self._shared.elements, self._num_ties):
            moved = one.times * self._shared_moves(number, axis, choices, options)
            add(number, one.tie, moved)
        for i, times in self.operations:
            operation = groups.step.operations[i]
            tie = ties[groups.of_operation[i]]
            own[tie] += times * self._worked(i, operation, axis, choices, options[tie])
            for position, (t, rule_position) in enumerate(
                [*operation.operands, *operation.results]
            ):
                group = groups.of_tensor[t]
                if group == groups.of_operation[i]:
                    continue
                is_result = position >= len(operation.operands)
                shared = self._shared.of.get((i, position))
                other = ties[group] if shared is None else self._num_ties + shared
                found = times * self._moves(
                    i, operation, t, rule_position, is_result, other, axis, choices, options
                )
                add(tie, other, found)
        return AxisCosts(options, tuple(own), between)

    def _worked(
        self,
        number: int,
        operation: Operation,
        axis: int,
        choices: Sequence[Choice],
        options: Sequence[int],
    ) -> np.ndarray:
        """The seconds of an operation for each option, with the reductions inside of it."""
        tie = self.groups.tie[self.groups.of_operation[number]]
        factors = [self.groups.factor_of(number, choice[tie]) for choice in choices]
        factors[axis] = None
        key = number, axis, tuple(factors), tuple(options)
        if key not in self._works:
            costs = self._work.seconds(number, operation, axis, factors, options)
            for i, c in enumerate(options):
                factors[axis] = self.groups.factor_of(number, c)
                costs[i] += self._inside(operation, factors)
            self._works[key] = costs
        return self._works[key]

    def _inside(self, operation: Operation, factors: Sequence[int | None]) -> float:
        """The seconds of the collectives inside of an operation whose factors the axes split."""
        tensors, total = self.groups.step.tensors, 0.0
        sizes = [1 if f is None else n for f, n in zip(factors, self.mesh_shape)]
        for axis, f in enumerate(factors):
            if f is None:
                continue
            share = sizes[axis] / math.prod(sizes)  # of the other axes
            if f in operation.rule.halos:
                # Each device gets what it lacks of its two neighbours' parts of a window's operand.
                most = max(tensors[t].num_bytes for t, _ in operation.dims)
                rim = share * most / operation.rule.sizes[f] * self.mesh_shape[axis]
                total += 2 * self._resharding.transfer((axis,), rim)
            # Along a dim that the results keep, and over which something is reduced, as in a
            # softmax: the statistics are one for all elements along the dims that are reduced.
            for t, i in operation.results:
                kept = {x for dim in operation.rule.results[i] for x in dim}
                reduced = operation.rule.reduced[i] & kept
                if f in reduced:
                    count = math.prod(operation.rule.sizes[x] for x in reduced)
                    size = tensors[t].num_bytes / count
                    total += 2 * self._resharding.all_reduce((axis,), share * size)
                    break
        return total

    def plain_work(
        self,
        number: int,
        operation: Operation,
        axis: int,
        choices: Sequence[Choice],
        options: Sequence[int],
    ) -> np.ndarray:
        """The seconds in which a device computes its part of an operation, for each option."""
        tie = self.groups.tie[self.groups.of_operation[number]]
        others = [self.groups.factor_of(number, choice[tie]) for choice in choices]
        return self._work.seconds(number, operation, axis, others, options)

    def _moves(
        self,
        number: int,
        operation: Operation,
        tensor: int,
        position: int,
        is_result: bool,
        other: int,
        axis: int,
        choices: Sequence[Choice],
        options: Sequence[Sequence[int]],
    ) -> np.ndarray:
        """The seconds of collectives between an operation and a tensor of another group.

        Args:
            number, operation: the operation.
            tensor: the tensor.
            position: among the operands or results of the operation's rule.
            is_result: whether it is a result.
            other: the element whose choice the layout of the tensor is.
            axis: whose options are priced.
            choices: of all axes.
            options: of each element.

        Returns:
            For each option of the operation and each of the other element.
        """
        groups = self.groups
        dims = (operation.rule.results if is_result else operation.rule.operands)[position]
        border = operation.entry.border
        within: tuple[int, ...] = ()
        if border is not None and border.is_exit != is_result:
            within = border.manual.axes  # the blocks of a manual region are where they are

        def need(axis: int, c: int) -> Held:
            if axis in within:
                return None
            factor = groups.factor_of(number, c)
            dim = None
            if factor is not None:
                dim = next((d for d, own in enumerate(dims) if own[:1] == (factor,)), None)
                if is_result and dim is None and operation.partial(position, factor):
                    return Partial.SUM
            return dim

        own = groups.tie[groups.of_operation[number]]
        if not dims:
            return np.zeros((len(options[own]), len(options[other])))
        first, second = (own, need), (other, functools.partial(self._have, tensor))
        size = self._moved_bytes(tensor, is_result=is_result)
        if is_result:
            return self._priced(tensor, size, axis, choices, options, first, second)
        return self._priced(tensor, size, axis, choices, options, second, first).T

    def _moved_bytes(self, tensor: int, *, is_result: bool) -> int:
        """The bytes of a tensor where it is moved: a parameter's gradient in its own dtype.

        Under autocast a product has made it in a narrower one, but it is summed over devices as it
        is marked, after the cast.
        """
        step = self.groups.step
        spec = step.tensors[tensor].spec
        if not is_result or self.groups.of_tensor[tensor] not in self.groups.of_state:
            return spec.num_bytes
        if tensor not in self._wide:
            gradient = step.tensors[step.totals[tensor][0]].spec
            self._wide[tensor] = spec.num_elements * gradient.dtype.itemsize
        return self._wide[tensor]

    def _shared_moves(
        self, number: int, axis: int, choices: Sequence[Choice], options: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """The seconds of collectives between what is shared and its tensor.

        Returns:
            For each option of the shared element and each of the tensor.
        """
        one = self._shared.elements[number - self._num_ties]
        have = functools.partial(self._have, one.tensor)
        first, second = (number, have), (one.tie, have)
        size = self._moved_bytes(one.tensor, is_result=one.is_sum)
        if one.is_sum:
            return self._priced(one.tensor, size, axis, choices, options, first, second)
        return self._priced(one.tensor, size, axis, choices, options, second, first).T

    def _have(self, tensor: int, axis: int, c: int) -> Held:
        """What an axis does to a tensor by a choice."""
        if c == PARTIAL:
            return Partial.SUM
        return None if c == NONE else self.groups.dim_of(tensor, c)

    def _priced(
        self,
        tensor: int,
        num_bytes: int,
        axis: int,
        choices: Sequence[Choice],
        options: Sequence[Sequence[int]],
        source: tuple[int, Callable[[int, int], Held]],
        target: tuple[int, Callable[[int, int], Held]],
    ) -> np.ndarray:
        """The seconds of collectives that bring a tensor from one layout to another.

        Args:
            tensor: the tensor.
            num_bytes: of the whole of it, as it is moved.
            axis, choices, options: see `_moves`.
            source, target: an element, and what an axis does to the tensor by its choice.

        Returns:
            For each option of the source and each of the target.
        """
        (a, before), (b, after) = source, target
        shape = self.groups.step.tensors[tensor].spec.shape
        held = [None if i == axis else before(i, x[a]) for i, x in enumerate(choices)]
        needed = [None if i == axis else after(i, x[b]) for i, x in enumerate(choices)]
        sources = tuple(before(axis, c) for c in options[a])
        targets = tuple(after(axis, c) for c in options[b])
        is_combined = (
            self.groups.of_tensor[tensor] in self.groups.of_state and num_bytes >= SMALL_BYTES
        )
        key = num_bytes, shape, axis, tuple(held), tuple(needed), sources, targets, is_combined
        if key not in self._prices:
            known: dict[tuple[Held, Held], float] = {}
            for first, second in itertools.product(dict.fromkeys(sources), dict.fromkeys(targets)):
                held[axis], needed[axis] = first, second
                known[first, second] = self._resharding.seconds(num_bytes, shape, held, needed)
            costs = np.array([[known[first, second] for second in targets] for first in sources])
            if is_combined:
                # XLA combines the collectives of parameters and gradients into few.
                costs = np.maximum(0.0, costs - (1 - _COMBINED) * self.machine.latency_s)
            self._prices[key] = costs
        return self._prices[key]

    def _bytes(self, tensor: int, axis: int, choices: Sequence[Choice]) -> float:
        """The bytes of a tensor that a device has, without a split along this axis."""
        size = float(self.groups.step.tensors[tensor].num_bytes)
        tie = self.groups.tie[self.groups.of_tensor[tensor]]
        for other, choice in enumerate(choices):
            is_split = choice[tie] != NONE and self.groups.dim_of(tensor, choice[tie]) is not None
            if other != axis and is_split:
                size /= self.mesh_shape[other]
        return size

    def memory_rows(self, axis: int, choices: Sequence[Choice]) -> list[list[np.ndarray]]:
        """The bytes of each tie's options at the points of the step where most is alive."""
        key = _key(axis, choices)
        if key not in self._rows:
            options = self.options(axis, choices)
            self._rows[key] = [self._bytes_of(x, axis, choices, options) for x in self.alive]
        return self._rows[key]

    def _held(
        self, axis: int, choices: Sequence[Choice], options: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """The bytes of the step's inputs on a device, for each option of each tie."""
        leaves = [(t, times) for t, times in self.alive[0] if self._is_leaf(t)]
        return self._bytes_of(leaves, axis, choices, options)

    def _is_leaf(self, tensor: int) -> bool:
        return self.groups.step.tensors[tensor].leaf is not None

    def _bytes_of(
        self,
        tensors: Sequence[tuple[int, int]],
        axis: int,
        choices: Sequence[Choice],
        options: Sequence[Sequence[int]],
    ) -> list[np.ndarray]:
        """The bytes of some tensors, and of as many alike, for each option of each tie."""
        rows = [np.zeros(len(x)) for x in options]
        for tensor, times in tensors:
            tie = self.groups.tie[self.groups.of_tensor[tensor]]
            size = times * self._bytes(tensor, axis, choices)
            for i, c in enumerate(options[tie]):
                is_split = c != NONE and self.groups.dim_of(tensor, c) is not None
                rows[tie][i] += size / self.mesh_shape[axis] if is_split else size
        return rows

    @cached_property
    def alive(self) -> list[list[tuple[int, int]]]:
        """The tensors that are alive at the peak of the step, and at its end.

        One of each kind, and how many there are.
        """
        points = []
        groups = self.groups
        for found in groups.once(alive):
            kinds: dict[Hashable, list[int]] = {}
            for t in found:
                spec = groups.step.tensors[t].spec
                classes = tuple(groups.tensor_class.get((t, d), -1) for d in range(len(spec.shape)))
                is_leaf = groups.step.tensors[t].leaf is not None
                key = (groups.tie[groups.of_tensor[t]], id(spec.logical), classes, is_leaf)
                kinds.setdefault(key, []).append(t)
            points.append([(same[0], len(same)) for same in kinds.values()])
        return points


def _kinds(groups: Groups) -> list[tuple[int, int]]:
    """One operation of each kind, and how often those of its kind run in a step."""
    operations, shared = groups.step.operations, groups.once(sharing).of
    kinds: dict[Hashable, list[int]] = {}
    for i, operation in enumerate(operations):
        kinds.setdefault(_kind(groups, shared, i, operation), []).append(i)
    return [(same[0], sum(operations[i].times for i in same)) for same in kinds.values()]


def _kind(
    groups: Groups, shared: Mapping[tuple[int, int], int], number: int, operation: Operation
) -> Hashable:
    """What decides an operation's costs: equal keys have the same."""
    return (
        groups.tie[groups.of_operation[number]],
        id(operation.entry),
        -1 if operation.entry.traits.by_item else operation.part,
        tuple(
            (
                groups.tie[groups.of_tensor[t]],
                id(groups.step.tensors[t].spec),
                shared.get((number, place)),
            )
            for place, (t, _) in enumerate(operation.dims)
        ),
    )


def _key(axis: int, choices: Sequence[Choice]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """What decides an axis's costs: the choices of the others."""
    return axis, tuple(tuple(c) for other, c in enumerate(choices) if other != axis)


def _is_even(size: int, shards: int) -> bool:
    """Whether a size is split evenly, or with little padding."""
    return size % shards == 0 or size >= 8 * shards
