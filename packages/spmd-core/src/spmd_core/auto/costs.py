"""The modelled cost of a choice: compute, memory traffic, collectives and resharding, in seconds.

The costs of ring algorithms on n devices, for `b` bytes of the whole along the axis: an all-gather
and a reduce-scatter send b (n-1)/n, an all-reduce twice as much, an all-to-all b (n-1)/n**2 (Thakur
et al., "Optimization of Collective Communication Operations in MPICH", 2005).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spmd_core.auto.groups import Groups
from spmd_core.auto.machine import Machine
from spmd_core.auto.step_graph import Operation
from spmd_core.ops.barrier import BARRIER
from spmd_core.ops.kernels.traits import Elements

NONE = -1  # the choice not to split
Choice = list[int]  # for each tie the class that an axis splits, or NONE

# The part of the tensors of a fused chain of operations that XLA writes to memory and reads again.
_MATERIALISED = 0.5
# Of two choices that cost the same, the one that stores less is better: as if each byte that a
# device holds were read once in so many steps.
_STEPS_PER_READ = 100
# A parameter of fewer bytes saves so little where it is split that one more collective costs more.
SMALL_BYTES = 1 << 16
# The part of a latency that a larger parameter's collective costs, as XLA combines many into one.
_COMBINED = 0.1


@dataclass(frozen=True)
class AxisCosts:
    """The costs of one axis's choices, given those of the other axes.

    Attributes:
        options: for each tie the classes that the axis may split, NONE first.
        own: for each tie the seconds of each option.
        between: for pairs of ties, the seconds of each pair of options.
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
        self._crossing = machine.crossing(mesh_shape, self.ids)
        self.groups, self.mesh_shape, self.machine = groups, tuple(mesh_shape), machine
        self.num_ties = max(groups.tie) + 1
        members: list[list[int]] = [[] for _ in range(self.num_ties)]
        for number, tie in enumerate(groups.tie):
            members[tie].append(number)
        self.members = members
        kinds: dict[Hashable, list[int]] = {}
        for i, operation in enumerate(groups.step.operations):
            kinds.setdefault(self._kind(i, operation), []).append(i)
        # One operation of each kind, and how often those of its kind run.
        operations = groups.step.operations
        self.operations = [
            (same[0], sum(operations[i].times for i in same)) for same in kinds.values()
        ]
        self._traffics: dict[int, float] = {}  # by operation
        self._known: dict[tuple[int, tuple[tuple[int, ...], ...]], AxisCosts] = {}
        self._rows: dict[tuple[int, tuple[tuple[int, ...], ...]], list[list[np.ndarray]]] = {}

    def _kind(self, number: int, operation: Operation) -> Hashable:
        """What decides an operation's costs: equal keys have the same."""
        groups = self.groups
        return (
            groups.tie[groups.of_operation[number]],
            id(operation.entry),
            -1 if operation.entry.traits.by_item else operation.part,
            tuple(
                (groups.tie[groups.of_tensor[t]], id(groups.step.tensors[t].spec))
                for t, _ in operation.dims
            ),
        )

    def options(self, axis: int, choices: Sequence[Choice]) -> tuple[tuple[int, ...], ...]:
        """The classes of each tie that an axis may split, given what the other axes split."""
        found = []
        for tie, members in enumerate(self.members):
            one = self.groups.groups[members[0]]
            allowed = [NONE]
            for c, sizes in enumerate(one.sizes):
                shards = self.mesh_shape[axis]
                for other, choice in enumerate(choices):
                    if other != axis and choice[tie] == c:
                        shards *= self.mesh_shape[other]
                if c not in one.fixed and all(_is_even(size, shards) for size in sizes):
                    allowed.append(c)
            found.append(tuple(allowed))
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
        for i, times in self.operations:
            operation = groups.step.operations[i]
            tie = ties[groups.of_operation[i]]
            own[tie] += times * self._work(i, operation, axis, choices, options[tie])
            for position, (t, rule_position) in enumerate(
                [*operation.operands, *operation.results]
            ):
                group = groups.of_tensor[t]
                if group == groups.of_operation[i]:
                    continue
                is_result = position >= len(operation.operands)
                found = times * self._moves(
                    i, operation, t, rule_position, is_result, axis, choices,
                    options[tie], options[ties[group]],
                )  # fmt: skip
                other = ties[group]
                if other == tie:
                    own[tie] += np.diagonal(found)
                elif tie < other:
                    between[tie, other] = between.get((tie, other), 0) + found
                else:
                    between[other, tie] = between.get((other, tie), 0) + found.T
        return AxisCosts(options, tuple(own), between)

    def _work(
        self,
        number: int,
        operation: Operation,
        axis: int,
        choices: Sequence[Choice],
        options: Sequence[int],
    ) -> np.ndarray:
        """The seconds of an operation for each option, with the reductions inside of it."""
        costs, share = self.plain_work(number, operation, axis, choices, options)
        groups = self.groups
        # Along a dim that the results keep, and over which something is reduced, as in a softmax.
        for f in operation.factors:
            c = groups.factor_class[number, f]
            if c in options and f in operation.rule.halos:
                # Each device gets what it lacks of its two neighbours' parts of a window's operand.
                most = max(groups.step.tensors[t].num_bytes for t, _ in operation.dims)
                rim = share * most / operation.rule.sizes[f] * self.mesh_shape[axis]
                costs[list(options).index(c)] += 2 * self._seconds(axis, rim)
            if c in options:
                for t, i in operation.results:
                    kept = {x for dim in operation.rule.results[i] for x in dim}
                    reduced = operation.rule.reduced[i] & kept
                    if f in reduced:
                        # The statistics: one for all elements along the dims that are reduced.
                        count = math.prod(operation.rule.sizes[x] for x in reduced)
                        size = groups.step.tensors[t].num_bytes / count
                        costs[list(options).index(c)] += 2 * self._all_reduce(axis, share * size)
                        break
        return costs

    def plain_work(
        self,
        number: int,
        operation: Operation,
        axis: int,
        choices: Sequence[Choice],
        options: Sequence[int],
    ) -> tuple[np.ndarray, float]:
        """The seconds in which a device computes its part of an operation.

        Returns:
            For each option; and the part that the other axes leave to a device.
        """
        groups, tie = self.groups, self.groups.tie[self.groups.of_operation[number]]
        parts: dict[int, int] = {}
        share = 1.0
        for other, choice in enumerate(choices):
            factor = None if other == axis else groups.factor_of(number, choice[tie])
            if factor is not None:
                share /= self.mesh_shape[other]
                parts[factor] = parts.get(factor, 1) * self.mesh_shape[other]
        n, traffic = self.mesh_shape[axis], self._traffic(number, operation)
        costs = np.zeros(len(options))
        for i, c in enumerate(options):
            split, part, factor = dict(parts), share, groups.factor_of(number, c)
            if factor is not None:
                split[factor] = split.get(factor, 1) * n
                part = share / n
            costs[i] = max(
                operation.flops * self._padded(operation, split) / self.machine.flops,
                traffic * part / self.machine.memory_bytes_per_s,
            )
        return costs, share

    def _traffic(self, number: int, operation: Operation) -> float:
        """The bytes of all devices that an operation reads and writes in memory."""
        if number not in self._traffics:
            found = 0.0
            is_barrier = operation.entry.name == BARRIER  # which moves nothing
            if operation.entry.traits.elements > Elements.PERMUTED and not is_barrier:
                sizes = [self.groups.step.tensors[t].num_bytes for t, _ in operation.dims]
                part = 1.0 if not operation.is_light else _MATERIALISED
                most = sum(sizes) if operation.entry.traits.by_item else 3 * max(sizes, default=0)
                found = part * min(sum(sizes), most)
            self._traffics[number] = found
        return self._traffics[number]

    def _padded(self, operation: Operation, parts: Mapping[int, int]) -> float:
        """The part of a product that a device computes, with matrices padded to whole tiles.

        Factors that the same tensors have are one dim of a matrix, such as batch and sequence.
        Those that all tensors have only number the matrices; one that is broadcast along such a
        factor, as a mask may be along the batch, counts as having it.
        """
        if not operation.flops:
            return 1.0
        part = 1.0
        for factors, is_in_all in operation.matrix_dims:
            whole = math.prod(operation.rule.sizes[f] for f in factors)
            local = whole / math.prod(parts.get(f, 1) for f in factors)
            if not is_in_all and whole > local:
                local = math.ceil(local / self.machine.tile) * self.machine.tile
            part *= min(1.0, local / whole)
        return part

    def _moves(
        self,
        number: int,
        operation: Operation,
        tensor: int,
        position: int,
        is_result: bool,
        axis: int,
        choices: Sequence[Choice],
        options: Sequence[int],
        held: Sequence[int],
    ) -> np.ndarray:
        """The seconds of collectives between an operation and a tensor of another group.

        Returns:
            For each option of the operation and each of the tensor.
        """
        groups = self.groups
        size = self._bytes(tensor, axis, choices)
        shape = groups.step.tensors[tensor].spec.shape
        dims = (operation.rule.results if is_result else operation.rule.operands)[position]
        costs = np.zeros((len(options), len(held)))
        if not dims or size == 0:
            return costs
        border = operation.entry.border
        if border is not None and border.is_exit != is_result and axis in border.manual.axes:
            return costs  # the blocks of a manual region are where they are
        partial = set()
        needs: list[int | None] = []
        for c in options:
            factor = groups.factor_of(number, c)
            dim = None
            if factor is not None:
                dim = next((d for d, own in enumerate(dims) if own[:1] == (factor,)), None)
                if is_result and dim is None and operation.partial(position, factor):
                    partial.add(len(needs))
            needs.append(dim)
        has = [groups.dim_of(tensor, c) if c != NONE else None for c in held]
        for a, need in enumerate(needs):
            for b, have in enumerate(has):
                if a in partial:
                    costs[a, b] = (
                        self._all_reduce(axis, size)
                        if have is None
                        else self._gather(axis, size, inner=math.prod(shape[:have]) > 1)
                        * self.machine.scatters
                    )
                else:
                    source, target = (need, have) if is_result else (have, need)
                    costs[a, b] = self._reshard(axis, size, source, target, shape)
        if groups.of_tensor[tensor] in self._state and size >= SMALL_BYTES:
            # XLA combines the collectives of parameters and gradients into few.
            costs = np.maximum(0.0, costs - (1 - _COMBINED) * self.machine.latency_s)
        return costs

    @cached_property
    def _state(self) -> frozenset[int]:
        """The groups of parameters and of optimizer state."""
        return frozenset(self.groups.of_tensor[leaf] for leaf in self.groups.step.updated)

    def _bytes(self, tensor: int, axis: int, choices: Sequence[Choice]) -> float:
        """The bytes of a tensor that a device has, without a split along this axis."""
        size = float(self.groups.step.tensors[tensor].num_bytes)
        tie = self.groups.tie[self.groups.of_tensor[tensor]]
        for other, choice in enumerate(choices):
            is_split = choice[tie] != NONE and self.groups.dim_of(tensor, choice[tie]) is not None
            if other != axis and is_split:
                size /= self.mesh_shape[other]
        return size

    def _reshard(
        self,
        axis: int,
        size: float,
        source: int | None,
        target: int | None,
        shape: tuple[int, ...],
    ) -> float:
        if source == target or source is None:
            return 0.0
        if target is not None:
            return self._exchange(axis, size)
        return self._gather(axis, size, inner=math.prod(shape[:source]) > 1)

    def _seconds(self, axis: int, sent: float) -> float:
        bandwidth = self.machine.bandwidth(crosses=self._crossing[axis])
        return sent / bandwidth + self.machine.latency_s

    def _gather(self, axis: int, size: float, *, inner: bool) -> float:
        """An all-gather, or a reduce-scatter; along an inner dim, parts are put in order, too."""
        n = self.mesh_shape[axis]
        order = 2 * size / self.machine.memory_bytes_per_s if inner else 0.0
        return self._seconds(axis, size * (n - 1) / n) + order

    def _all_reduce(self, axis: int, size: float) -> float:
        n = self.mesh_shape[axis]
        return self._seconds(axis, 2 * size * (n - 1) / n)

    def _exchange(self, axis: int, size: float) -> float:
        n = self.mesh_shape[axis]
        return self._seconds(axis, size * (n - 1) / n**2)

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
        for alive in _alive(groups):
            kinds: dict[Hashable, list[int]] = {}
            for t in alive:
                spec = groups.step.tensors[t].spec
                classes = tuple(groups.tensor_class.get((t, d), -1) for d in range(len(spec.shape)))
                is_leaf = groups.step.tensors[t].leaf is not None
                key = (groups.tie[groups.of_tensor[t]], id(spec.logical), classes, is_leaf)
                kinds.setdefault(key, []).append(t)
            points.append([(same[0], len(same)) for same in kinds.values()])
        return points


def _key(axis: int, choices: Sequence[Choice]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """What decides an axis's costs: the choices of the others."""
    return axis, tuple(tuple(c) for other, c in enumerate(choices) if other != axis)


def _is_even(size: int, shards: int) -> bool:
    """Whether a size is split evenly, or with little padding."""
    return size % shards == 0 or size >= 8 * shards


def _alive(groups: Groups) -> list[list[int]]:
    """The stored tensors at the end of the forward, and at the peak of bytes."""
    step = groups.step
    stored = list(range(len(step.tensors)))  # views are stored as what they view
    for operation in step.operations:
        traits = operation.entry.traits
        if traits.elements <= Elements.PERMUTED and operation.operands:
            stored[operation.results[0][0]] = stored[operation.operands[traits.source][0]]
    last: dict[int, int] = {}
    for i, operation in enumerate(step.operations):
        for t, _ in operation.dims:
            last[stored[t]] = i
    end = len(step.operations)
    replaced = {step.outputs[o]: leaf for leaf, o in step.updated.items()}
    for t in step.outputs:
        if t not in replaced:
            last[stored[t]] = end
    kept = [t for t, x in enumerate(step.tensors) if x.leaf is not None]
    made = {stored[t]: i for i, o in enumerate(step.operations) for t, _ in o.results}
    born: dict[int, list[int]] = {}
    for t, i in made.items():
        # What replaces a leaf takes over its buffer; what is read at once is fused.
        if t not in replaced and step.tensors[t].leaf is None and last.get(t, i) - i > 2:
            born.setdefault(i, []).append(t)
    alive: dict[int, None] = {}
    best: tuple[int, list[int]] = (0, [])
    size = 0
    for i in range(end):
        for t in born.get(i, ()):
            alive[t] = None
            size += step.tensors[t].num_bytes
        if size >= best[0]:
            best = (size, list(alive))
        for t in [t for t in alive if last[t] == i]:
            del alive[t]
            size -= step.tensors[t].num_bytes
    return [[*kept, *best[1]], [*kept, *alive]]
