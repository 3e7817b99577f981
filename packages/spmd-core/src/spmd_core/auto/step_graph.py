"""A step as tensors and operations whose dims are related: what a search splits.

The rule of each operation (`program.dim_rules`) says which dims of its operands are which dims of
its results, and what it sums. Rules are those of ATen operations and not of StableHLO's: a step has
a quarter as many, equal calls share one, and the search can say which line of the user an operation
is.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeGuard

from spmd_core.graph.stacks import UnstackEntry, stacked_sharding
from spmd_core.graph.subgraphs import SCAN, ControlEntry
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.dim_rules import DimRule, Dims
from spmd_core.program.mark_names import is_plain_addition
from spmd_core.program.program_graph import Leaf, RecordedGraph
from spmd_core.sharding.sharding import Manual, Sharding
from spmd_core.source_lines import Origin, Phase

# Where a value of a loop's body is: the positions of the loop among the recorded nodes and of loops
# inside of it among the nodes of their bodies, and its value number in the innermost body.
Place = tuple[int, ...]


class JoinEntry(Entry):
    """Stands for what a loop does with a tensor: all its operands and results are split alike."""

    __slots__ = ()


@dataclass(frozen=True)
class Tensor:
    """A value of the step.

    Attributes:
        spec: shape and dtype.
        leaf: the position of the graph input that it is; None for a result.
        fixed: the user's mark; None if the search may choose.
        manual: the manual region that it is local to, over whose axes nothing splits it further;
            None for a global tensor.
    """

    spec: Spec
    leaf: int | None
    fixed: Sharding | None = None
    manual: Manual | None = None

    @property
    def num_bytes(self) -> int:
        return self.spec.num_bytes


@dataclass(frozen=True)
class Operation:
    """An operation of the step, or the part of one that has no dim in common with the rest.

    Such parts are the items of a fused optimizer's lists.

    Attributes:
        node: its position among the recorded nodes.
        part: the number of the part.
        entry: what it does.
        rule: its dims, as factors.
        operands, results: the positions of its tensors, with their positions in the rule.
        flops: of all devices together, by torch's formula; 0 if there is none. Inside of a manual
            region, of all devices along its other axes.
        times: how often it runs in a step.
        manual: the manual region that it is inside of, or whose border it crosses; None if none.
        origin: the user's line and module; None if not recorded.
    """

    node: int
    part: int
    entry: Entry
    rule: DimRule
    operands: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    flops: int
    times: int = 1
    manual: Manual | None = None
    origin: Origin | None = field(default=None, compare=False)

    @cached_property
    def dims(self) -> tuple[tuple[int, Dims], ...]:
        """Its operands, then its results: each tensor's position, and the factors of its dims."""
        read = ((t, self.rule.operands[i]) for t, i in self.operands)
        made = ((t, self.rule.results[i]) for t, i in self.results)
        return (*read, *made)

    @cached_property
    def factors(self) -> tuple[int, ...]:
        """Its factors, in the order of its tensors' dims."""
        return tuple(dict.fromkeys(f for _, dims in self.dims for dim in dims for f in dim))

    @cached_property
    def is_light(self) -> bool:
        """Whether its results have the dims of its operands: nothing is summed or looked up.

        A mark is not light: what it reads may be split in another way. Nor is a border.
        """
        if isinstance(self.entry, JoinEntry):
            return True
        if self.entry.border is not None:
            return False
        kept = {f for _, i in self.results for dim in self.rule.results[i] for f in dim}
        if self.flops or self.entry.sharding is not None or not kept.issuperset(self.factors):
            return False
        return not any(
            self.rule.reduced[i].difference(f for dim in self.rule.results[i] for f in dim)
            for _, i in self.results
        )

    @cached_property
    def viewed(self) -> int | None:
        """The tensor of which its result is a view or a cast.

        None if it computes something, or if the two have no dim in common, as those of a reshape
        may.
        """
        traits = self.entry.traits
        if traits.elements > Elements.PERMUTED or not self.results:
            return None
        return next((t for t, position in self.operands if position == traits.source), None)

    @cached_property
    def matrix_dims(self) -> tuple[tuple[tuple[int, ...], bool], ...]:
        """Its factors by the tensors that have them; whether all have them.

        One that is broadcast along a factor, as a mask may be along the batch, counts as having it.
        A kernel of one row and column is not: rows and columns of its images are a matrix's.
        """
        found: dict[tuple[bool, ...], list[int]] = {}
        result = self.rule.results[self.results[0][1]] if self.results else ()
        tensors = []
        for _, dims in self.dims:
            if len(dims) == len(result) and not self.entry.traits.images:
                dims = tuple(own or kept for own, kept in zip(dims, result))
            if dims:
                tensors.append({f for dim in dims for f in dim})
        for f in self.factors:
            found.setdefault(tuple(f in factors for factors in tensors), []).append(f)
        return tuple((tuple(factors), all(has)) for has, factors in found.items())

    def partial(self, result: int, factor: int) -> bool:
        """Whether a result, by its position in the rule, is reduced over a factor that it lacks."""
        kept = {f for dim in self.rule.results[result] for f in dim}
        return factor in self.rule.reduced[result] and factor not in kept


@dataclass(frozen=True)
class StepGraph:
    """Tensors and operations, in the order of recording.

    Attributes:
        recorded: the graph that they were made of.
        tensors: the values: first the graph inputs, then the results of all nodes, then those of
            loops' bodies.
        operations: at least one for each node; those of a loop's body in place of the loop.
        outputs: for each output of the graph, the position of its tensor.
        updated: for the position of a leaf that an output replaces, the position of that output.
        places: for the tensors of loops' bodies, where they are.
    """

    recorded: RecordedGraph
    tensors: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[int, ...]
    updated: dict[int, int]
    places: dict[int, Place] = field(default_factory=dict)

    @cached_property
    def recomputes(self) -> bool:
        """Whether layers compute again in the backward."""
        origins = (operation.origin for operation in self.operations)
        return any(x is not None and x.phase is Phase.RECOMPUTATION for x in origins)

    @cached_property
    def stacks_of_numbers(self) -> frozenset[int]:
        """The leaves that are stacks of tensors without dims, such as counters of steps."""
        found: set[int] = set()
        for node in self.recorded.nodes:
            if isinstance(node.entry, UnstackEntry) and not node.entry.outs[0].shape:
                found.update(node.inputs)
            elif is_loop(node.entry):
                (body,) = node.entry.subgraphs
                found.update(
                    node.inputs[i] for i in node.entry.stacked if not body.parameters[i].shape
                )
        return frozenset(-number - 1 for number in found if number < 0)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the operations that read it."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for i, operation in enumerate(self.operations):
            for t in dict.fromkeys(t for t, _ in operation.operands):
                found[t].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def totals(self) -> tuple[tuple[int, bool], ...]:
        """For each tensor the sum that it is added up to with other results, or its last view.

        With each, whether it is a sum.
        """
        found: dict[int, tuple[int, bool]] = {}
        for tensor in range(len(self.tensors)):
            path: list[tuple[int, bool]] = []  # with whether the next one is a sum
            while tensor not in found and (after := self._added_by(tensor)) is not None:
                is_sum = self.operations[after].entry.traits.elements > Elements.PERMUTED
                path.append((tensor, is_sum))
                tensor = self.operations[after].results[0][0]
            last, is_sum = found.setdefault(tensor, (tensor, False))
            for t, is_added in reversed(path):
                is_sum |= is_added
                found[t] = last, is_sum
        return tuple(found[t] for t in range(len(self.tensors)))

    def _added_by(self, tensor: int) -> int | None:
        """The operation that alone reads a tensor, and views it or adds it to others."""
        readers = self.readers[tensor]
        if len(readers) != 1 or tensor in self._returned:
            return None
        (number,) = readers
        return number if len(self.operations[number].results) == 1 and self._adds[number] else None

    @cached_property
    def _returned(self) -> frozenset[int]:
        return frozenset(self.outputs)

    @cached_property
    def _adds(self) -> tuple[bool, ...]:
        """Whether each operation is a view or cast, or adds two results of products or the like."""
        found: dict[int, bool] = {}

        def adds(number: int) -> bool:
            if number not in found:
                found[number] = False  # what a loop carries may be added to itself
                operation = self.operations[number]
                if operation.entry.traits.elements <= Elements.PERMUTED:
                    found[number] = bool(operation.operands)
                elif is_plain_addition(operation.entry):
                    makers = [self.makers[t] for t, _ in operation.operands]
                    found[number] = all(
                        x is not None and (not self.operations[x].is_light or adds(x))
                        for x in makers
                    )
            return found[number]

        return tuple(map(adds, range(len(self.operations))))

    @cached_property
    def makers(self) -> tuple[int | None, ...]:
        """For each tensor, the operation that computes it; None for a leaf."""
        found: list[int | None] = [None] * len(self.tensors)
        for i, operation in enumerate(self.operations):
            for t, _ in operation.results:
                found[t] = i
        return tuple(found)


def is_loop(entry: Entry) -> TypeGuard[ControlEntry]:
    """Whether an operation is a loop whose body a search reads."""
    return entry.name == SCAN


def mark_of(leaf: Leaf) -> Sharding | None:
    """The mark of the tensor that a graph input is; None if it has none.

    The data of an input without a mark may lie as another program wanted it.
    """
    owner = None if leaf.owner is None else leaf.owner()
    mark: Sharding | None = leaf.placement.sharding if owner is None else owner.sharding
    if mark is not None and mark.ndim < len(leaf.spec.shape):  # that of the rows of a stack
        return stacked_sharding(mark)
    return mark


def updated(recorded: RecordedGraph) -> dict[int, int]:
    """The output that replaces each leaf, by their owners."""
    outputs: dict[int, int] = {}
    for i, output in enumerate(recorded.outputs):
        owner = None if output.owner is None else output.owner()
        if owner is not None:
            outputs[id(owner)] = i
    found = {}
    for i, leaf in enumerate(recorded.leaves):
        owner = None if leaf.owner is None else leaf.owner()
        if owner is not None and id(owner) in outputs:
            found[i] = outputs[id(owner)]
    return found
