"""A recorded step as tensors and operations whose dims are related: what a search splits.

The rule of each operation (`program.dim_rules`) says which dims of its operands are which dims of
its results, and what it sums. Rules are those of ATen operations and not of StableHLO's: a step has
a quarter as many, equal calls share one, and the search can say which line of the user an operation
is.
"""

from dataclasses import dataclass, field
from functools import cached_property

from spmd_core.auto import sorted_rules
from spmd_core.graph.values import Entry, Spec
from spmd_core.metrics.flops import entry_flops
from spmd_core.program import dim_rules
from spmd_core.program.dim_rules import DimRule, Dims
from spmd_core.program.program_graph import Leaf, RecordedGraph
from spmd_core.sharding.sharding import Sharding
from spmd_core.source_lines import Origin


@dataclass(frozen=True)
class Tensor:
    """A value of the step.

    Attributes:
        spec: shape and dtype.
        leaf: the position of the graph input that it is; None for a result.
        fixed: the user's mark; None if the search may choose.
    """

    spec: Spec
    leaf: int | None
    fixed: Sharding | None = None

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
        flops: of all devices together, by torch's formula; 0 if there is none.
        origin: the user's line and module; None if not recorded.
    """

    node: int
    part: int
    entry: Entry
    rule: DimRule
    operands: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    flops: int
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

        A mark is not light: what it reads may be split in another way.
        """
        kept = {f for _, i in self.results for dim in self.rule.results[i] for f in dim}
        if self.flops or self.entry.sharding is not None or not kept.issuperset(self.factors):
            return False
        return not any(
            self.rule.reduced[i].difference(f for dim in self.rule.results[i] for f in dim)
            for _, i in self.results
        )

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
        tensors: the values: first the graph inputs, then the results of all nodes.
        operations: at least one for each node.
        outputs: for each output of the graph, the position of its tensor.
        updated: for the position of a leaf that an output replaces, the position of that output.
    """

    recorded: RecordedGraph
    tensors: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[int, ...]
    updated: dict[int, int]

    @staticmethod
    def of(recorded: RecordedGraph) -> "StepGraph":
        """The step of a recorded graph. Lowers each distinct operation once, about 6 ms each."""
        num_leaves = len(recorded.leaves)
        tensors = [Tensor(leaf.spec, i, mark_of(leaf)) for i, leaf in enumerate(recorded.leaves)]

        def position(number: int) -> int:
            return num_leaves + number if number >= 0 else -number - 1

        operations = []
        rules: dict[Entry, DimRule] = {}
        of_sorted = sorted_rules.rules(recorded)
        for i, node in enumerate(recorded.nodes):
            operands = tuple(position(n) for n in node.inputs)
            results = tuple(range(len(tensors), len(tensors) + len(node.entry.outs)))
            tensors += [Tensor(spec, None, node.entry.sharding) for spec in node.entry.outs]
            rule = of_sorted.get(i) or rules.get(node.entry)
            if rule is None:
                specs = [tensors[t].spec for t in operands]
                is_attention = node.entry.traits.query is not None
                find = dim_rules.dims_in_one_block if is_attention else dim_rules.dims
                rule = rules[node.entry] = find(node.entry, specs)
            flops = entry_flops(node.entry)
            for part, (read, made) in enumerate(_parts(rule)):
                operations.append(
                    Operation(
                        i,
                        part,
                        node.entry,
                        rule,
                        tuple((operands[k], k) for k in read),
                        tuple((results[k], k) for k in made),
                        0 if part else flops,
                        node.origin,
                    )
                )
        outputs = tuple(position(output.value) for output in recorded.outputs)
        return StepGraph(recorded, tuple(tensors), tuple(operations), outputs, updated(recorded))

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the operations that read it."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for i, operation in enumerate(self.operations):
            for t in dict.fromkeys(t for t, _ in operation.operands):
                found[t].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def makers(self) -> tuple[int | None, ...]:
        """For each tensor, the operation that computes it; None for a leaf."""
        found: list[int | None] = [None] * len(self.tensors)
        for i, operation in enumerate(self.operations):
            for t, _ in operation.results:
                found[t] = i
        return tuple(found)


def _parts(rule: DimRule) -> list[tuple[list[int], list[int]]]:
    """The operands and results that have dims in common, for each part of an operation."""
    part_of: dict[int, int] = {}  # of a factor

    def root(factor: int) -> int:
        while part_of.setdefault(factor, factor) != factor:
            factor = part_of[factor]
        return factor

    for dims in (*rule.operands, *rule.results):
        first, *others = [f for dim in dims for f in dim] or [-1]
        for other in others:
            part_of[root(other)] = root(first)
    parts: dict[int, tuple[list[int], list[int]]] = {}
    for side, tensors in enumerate((rule.operands, rule.results)):
        for i, dims in enumerate(tensors):
            factors = [f for dim in dims for f in dim]
            # Tensors of one element have no dims, and belong to no part.
            key = root(factors[0]) if factors else -1
            parts.setdefault(key, ([], []))[side].append(i)
    return list(parts.values())


def mark_of(leaf: Leaf) -> Sharding | None:
    """The mark of the tensor that a graph input is; None if it has none.

    The data of an input without a mark may lie as another program wanted it.
    """
    owner = None if leaf.owner is None else leaf.owner()
    mark: Sharding | None = leaf.placement.sharding if owner is None else owner.sharding
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
