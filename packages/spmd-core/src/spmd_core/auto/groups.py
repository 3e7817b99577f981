"""Groups of tensors and operations that are split alike, and equal groups of repeated layers.

An operation that computes nothing across its dims, such as an addition or a view, is split as its
operands are: it and they are one group, whose dims fall into *classes*. All others, products,
sums and lookups, are groups of their own, whose classes are their factors. What the search chooses
is a class of each group for each mesh axis. Groups that look alike, as those of a model's layers
do, are *tied*: they get the same choice.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from spmd_core.auto.step_graph import JoinEntry, Operation, StepGraph

_T = TypeVar("_T")

# How far around a group its surroundings must look alike for it to be tied to another one.
_ROUNDS = 3


@dataclass
class Group:
    """Tensors and operations that are split alike.

    Attributes:
        tensors, operations: their positions in the step, ascending.
        sizes: for each class the sizes along it, which its number of shards should divide.
        fixed: classes that cannot be split.
    """

    tensors: list[int] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)
    sizes: list[set[int]] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Groups:
    """The groups of a step.

    Attributes:
        step: the step.
        groups: the groups.
        of_tensor, of_operation: the group of each.
        tensor_class: (tensor, dim) -> class; dims of one element have none.
        factor_class: (operation, factor) -> class.
        tie: for each group the number of what it is tied to; equal numbers get one choice.
    """

    step: StepGraph
    groups: tuple[Group, ...]
    of_tensor: tuple[int, ...]
    of_operation: tuple[int, ...]
    tensor_class: dict[tuple[int, int], int]
    factor_class: dict[tuple[int, int], int]
    tie: tuple[int, ...]
    _known: dict[Callable[..., Any], Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, function: Callable[["Groups"], _T]) -> _T:
        """What a function finds in these groups, the same for all meshes: it is called once."""
        if function not in self._known:
            self._known[function] = function(self)
        found: _T = self._known[function]
        return found

    def dim_of(self, tensor: int, group_class: int) -> int | None:
        """The dim of a tensor that a class of its group splits; None if it has none."""
        return self._dims.get((tensor, group_class))

    def factor_of(self, operation: int, group_class: int) -> int | None:
        """The factor of an operation that a class of its group splits; None if it has none."""
        return self._factors.get((operation, group_class))

    @cached_property
    def of_state(self) -> frozenset[int]:
        """The groups of the leaves that the step replaces: parameters and state."""
        return frozenset(self.of_tensor[leaf] for leaf in self.step.updated)

    @cached_property
    def _dims(self) -> dict[tuple[int, int], int]:
        """(tensor, class) -> dim, the first of several."""
        found: dict[tuple[int, int], int] = {}
        for (tensor, dim), c in sorted(self.tensor_class.items()):
            found.setdefault((tensor, c), dim)
        return found

    @cached_property
    def _factors(self) -> dict[tuple[int, int], int]:
        """(operation, class) -> factor, the first of several."""
        found: dict[tuple[int, int], int] = {}
        for i, operation in enumerate(self.step.operations):
            for f in operation.factors:
                found.setdefault((i, self.factor_class[i, f]), f)
        return found


_Key = tuple[str, int, int]


class _Union:
    """Sets that are merged; each is known by its first element."""

    def __init__(self) -> None:
        self._parent: dict[_Key, _Key] = {}

    def find(self, key: _Key) -> _Key:
        root = key
        while (above := self._parent.setdefault(root, root)) != root:
            root = above
        while self._parent[key] != root:
            self._parent[key], key = root, self._parent[key]
        return root

    def merge(self, a: _Key, b: _Key) -> None:
        first, second = sorted((self.find(a), self.find(b)))
        self._parent[second] = first


def group(step: StepGraph) -> Groups:
    """The groups of a step, tied."""
    dims, owners = _Union(), _Union()
    joined: list[list[tuple[int, tuple[tuple[int, ...], ...]]]] = []
    for number, operation in enumerate(step.operations):
        followed = _followed(step, operation)
        joined.append(followed)
        for tensor, factors in followed:
            owners.merge(("operation", number, 0), ("tensor", tensor, 0))
            for dim, own in enumerate(factors):
                if own:
                    dims.merge(("tensor", tensor, dim), ("factor", number, own[0]))
    return _tied(_collected(step, dims, owners, joined))


def _followed(
    step: StepGraph, operation: Operation
) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """The tensors that are split as the operation is, with their factors."""
    if not operation.is_light:
        return []
    if isinstance(operation.entry, JoinEntry):
        return list(operation.dims)
    most = max(step.tensors[t].spec.num_elements for t, _ in operation.dims)
    results = {t for t, _ in operation.results}
    kept = []
    for tensor, factors in operation.dims:
        if step.tensors[tensor].manual != operation.manual:
            continue  # a global tensor in a manual region, equal on all of its devices
        spec = step.tensors[tensor].spec
        is_part = _is_part(operation, step, spec.num_elements, most)
        if tensor in results or spec.num_elements == most or is_part:
            kept.append((tensor, factors))
    return kept


def _is_part(operation: Operation, step: StepGraph, elements: int, most: int) -> bool:
    """Whether a tensor is one of the equal parts that are cut off a whole, or joined to one."""
    return bool(operation.rule.halos) and elements > 0 and most % elements == 0 and elements > 1


def _collected(
    step: StepGraph,
    dims: _Union,
    owners: _Union,
    joined: list[list[tuple[int, tuple[tuple[int, ...], ...]]]],
) -> Groups:
    groups: list[Group] = []
    number_of: dict[_Key, int] = {}

    def group_of(key: _Key) -> int:
        root = owners.find(key)
        if root not in number_of:
            number_of[root] = len(groups)
            groups.append(Group())
        return number_of[root]

    of_operation = [group_of(("operation", i, 0)) for i in range(len(step.operations))]
    of_tensor = [group_of(("tensor", i, 0)) for i in range(len(step.tensors))]
    for i, g in enumerate(of_operation):
        groups[g].operations.append(i)
    for i, g in enumerate(of_tensor):
        groups[g].tensors.append(i)
    tensor_class: dict[tuple[int, int], int] = {}
    factor_class: dict[tuple[int, int], int] = {}
    for one in groups:
        classes: dict[_Key, int] = {}

        def class_of(key: _Key, size: int, classes: dict[_Key, int] = classes) -> int:
            root = dims.find(key)
            if root not in classes:
                classes[root] = len(one.sizes)  # noqa: B023
                one.sizes.append(set())  # noqa: B023
            one.sizes[classes[root]].add(size)  # noqa: B023
            return classes[root]

        for i in one.operations:
            operation = step.operations[i]
            for f in operation.factors:
                size = operation.rule.sizes[f]
                factor_class[i, f] = class_of(("factor", i, f), size)
                if not _can_split(operation, f, step):
                    one.fixed.add(factor_class[i, f])
        for t in one.tensors:
            for d, size in enumerate(step.tensors[t].spec.shape):
                key = ("tensor", t, d)
                if size > 1:
                    if dims.find(key) in classes:  # the sizes are those of factors
                        tensor_class[t, d] = classes[dims.find(key)]
                    else:
                        tensor_class[t, d] = class_of(key, size)
            own_classes = [
                tensor_class[t, d]
                for d in range(len(step.tensors[t].spec.shape))
                if (t, d) in tensor_class
            ]
            one.fixed.update(c for c in own_classes if own_classes.count(c) > 1)
    return Groups(
        step, tuple(groups), tuple(of_tensor), tuple(of_operation), tensor_class, factor_class, ()
    )


def _can_split(operation: Operation, factor: int, step: StepGraph) -> bool:
    """Whether devices can share an operation's work along a factor."""
    rule = operation.rule
    tensors = [dims for _, dims in operation.dims]
    if any(factor in dim[1:] for dims in tensors for dim in dims):
        return False  # the minor part of a dim
    if factor in rule.halos and not operation.entry.traits.images:
        sizes = [
            step.tensors[t].spec.shape[d]
            for t, dims in operation.dims
            for d, dim in enumerate(dims)
            if dim == (factor,)
        ]
        # Equal parts of a whole, as of a fused projection: each device has its part of each.
        return bool(sizes) and all(max(sizes) % n == 0 and n > 1 for n in sizes)
    return factor not in rule.replicated


def _tied(found: Groups) -> Groups:
    """Ties the groups whose operations, shapes and surroundings are equal."""
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    colors = [number(("group", _signature(found, g))) for g in range(len(found.groups))]
    edges = list(_edges(found))
    for _ in range(_ROUNDS):
        around: list[list[tuple[int, ...]]] = [[] for _ in colors]
        for a, b, label in edges:
            around[a].append((label, 0, colors[b]))
            around[b].append((label, 1, colors[a]))
        colors = [number((color, tuple(sorted(set(x))))) for color, x in zip(colors, around)]
    ties = {color: i for i, color in enumerate(dict.fromkeys(colors))}
    return Groups(
        found.step, found.groups, found.of_tensor, found.of_operation, found.tensor_class,
        found.factor_class, tuple(ties[c] for c in colors),
    )  # fmt: skip


def _signature(found: Groups, number: int) -> Hashable:
    """What two groups must have in common, with their classes numbered alike."""
    one, step = found.groups[number], found.step
    operations = tuple(
        (
            id(step.operations[i].entry),
            step.operations[i].part if not step.operations[i].entry.traits.by_item else -1,
            tuple(found.factor_class[i, f] for f in step.operations[i].factors),
            (step.operations[i].times, step.operations[i].manual),
        )
        for i in one.operations
    )
    tensors = tuple(
        (
            id(step.tensors[t].spec.logical),
            step.tensors[t].leaf is None,
            step.tensors[t].fixed,
            step.tensors[t].manual,
            tuple(
                found.tensor_class.get((t, d), -1) for d in range(len(step.tensors[t].spec.shape))
            ),
        )
        for t in one.tensors
    )
    return operations, tensors


def _edges(found: Groups) -> Iterator[tuple[int, int, int]]:
    """The pairs of an operation's group and another group of one of its tensors."""
    for i, operation in enumerate(found.step.operations):
        own = found.of_operation[i]
        for position, (t, _) in enumerate(operation.dims):
            if found.of_tensor[t] != own:
                is_item = operation.entry.traits.by_item
                yield (
                    own,
                    found.of_tensor[t],
                    hash((id(operation.entry), 0 if is_item else position)),
                )
