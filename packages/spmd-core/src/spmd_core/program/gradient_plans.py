"""Describes which gradients of a program are reduced over the batch, and how."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from spmd_core.graph.values import Entry, Spec
from spmd_core.program.program_graph import Graph
from spmd_core.runtime.jax_sharding import jax_axis_names
from spmd_core.sharding.mesh import Mesh

# Marks: of a whole layout, along some axes of a mesh, and of a sum over the devices along them.
MARK_SHARDING, MARK_ALONG, MARK_SUM = "spmd::mark_sharding", "spmd::mark_along", "spmd::mark_sum"

# They pass a gradient on; a view, in another shape.
UNCHANGED = ("aten::_to_copy", "aten::view", "aten::clone", MARK_SHARDING, MARK_ALONG)

# The marks of gradients; those of the second name are reduced at once, also where they are added
# up.
MARK, MARK_AT_ONCE = "spmd::mark_gradient", "spmd::mark_gradient.at_once"


@dataclass(frozen=True)
class Reduction:
    """How a gradient is reduced over the batch; axes are numbers of axes of the mesh.

    Attributes:
        mesh: the mesh.
        batch_axes: the axes that split the batch, the major one first, and behind them those of
            `sequence_axes`.
        axis: the one of them over which the gradient is scattered; None if each device gets all.
        dim: the dim of the gradient that `axis` splits.
        others: the dims that are split by other axes, with these, none of which splits the batch.
            Of the axes that split a dim, `axis` is the minor one.
        of_activation: whether the value is an activation or its gradient, a sum over features.
        sequence_axes: those of the batch's axes that split the dim behind the first one.
    """

    mesh: Mesh
    batch_axes: tuple[int, ...]
    axis: int | None = None
    dim: int | None = None
    others: tuple[tuple[int, tuple[int, ...]], ...] = ()
    of_activation: bool = False
    sequence_axes: tuple[int, ...] = ()

    @property
    def num_parts(self) -> int:
        """Into how many parts the batch is split."""
        return self.size(self.batch_axes)

    @property
    def axes(self) -> frozenset[int]:
        """All axes that split the batch or the gradient."""
        return frozenset(self.batch_axes).union(*(axes for _, axes in self.others))

    def size(self, axes: Sequence[int]) -> int:
        """The number of positions along some axes."""
        return math.prod(self.mesh.mesh_shape[axis] for axis in axes)

    def spec(self, axes: Mapping[int, tuple[int, ...]]) -> PartitionSpec:
        """The partition spec of an array whose dims are split by these axes."""
        names = jax_axis_names(self.mesh)
        split = {dim: tuple(names[axis] for axis in by) for dim, by in axes.items()}
        return PartitionSpec(*(split.get(dim) for dim in range(max(split, default=-1) + 1)))


@dataclass(frozen=True)
class Lookup:
    """The gradient of a table of which the whole batch looks up the same rows.

    Attributes:
        node: the position of the operation that computes it.
        number: its result's.
        gradient: the spec of that operation's first operand, in which it is linear.
    """

    node: int
    number: int
    gradient: Spec


@dataclass(frozen=True)
class Sum:
    """A value that is a sum over the batch.

    Attributes:
        node: the position of the operation that sums.
        result: which of the operation's results it is.
        number: that result's, as in `Node.inputs`.
        split_dims: for each input of the operation, the axes that split its dims in the region.
        spec: the spec of the value, which may be a conversion or another shape of that result.
        lookup: what makes the value of that result; None if it is the value.
        once: the input that one device alone adds to its part; None if there is none.
        sources: for each dim of the result, the inputs and their dims whose parts make a part of
            it; empty where that is not known.
    """

    node: int
    result: int
    number: int
    split_dims: tuple[Mapping[int, tuple[int, ...]], ...]
    spec: Spec
    lookup: Lookup | None = None
    once: int | None = None
    sources: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def position(self) -> int:
        """The position of the operation with which it is lowered."""
        return self.node if self.lookup is None else self.lookup.node

    @property
    def replaced(self) -> tuple[int, ...]:
        """The numbers of the values that it stands for."""
        return (self.number,) if self.lookup is None else (self.number, self.lookup.number)


@dataclass(frozen=True)
class Total:
    """A value that adds up others, at least one of which is a `Sum` or a `Total`.

    Attributes:
        node: the position of the addition.
        terms: its operands; a number is that of a value that is used as it is.
    """

    node: int
    terms: "tuple[Sum | Total | int, ...]"


@dataclass(frozen=True)
class Gradient:
    """A gradient that is reduced in a manual region.

    Attributes:
        found: what it adds up.
        reduction: how it is reduced.
    """

    found: Sum | Total
    reduction: Reduction


@dataclass(frozen=True)
class Plans:
    """The gradients to reduce in manual regions.

    Attributes:
        gradients: by the position of the mark of a gradient.
        sums: by the position of an operation, the sums to lower with it, each with the position of
            the mark.
        joined: the marks whose gradients are added up before one reduction, by the position of the
            addition, in the order of recording. Additions that add up such sums with further ones
            have the marks of all.
        ends: the positions of the additions in `joined` that end with the reduction.
        replaced: the numbers of the values that are then not used.
    """

    gradients: Mapping[int, Gradient] = field(default_factory=dict)
    sums: Mapping[int, Sequence[tuple[int, Sum]]] = field(default_factory=dict)
    joined: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()
    replaced: frozenset[int] = frozenset()


def sums(found: Sum | Total | int) -> Iterator[Sum]:
    """The sums that a gradient adds up."""
    if isinstance(found, Sum):
        yield found
    elif isinstance(found, Total):
        for term in found.terms:
            yield from sums(term)


def uses(graph: Graph) -> Counter[int]:
    """How often each value of a graph is used, as an operand or a result, by its number."""
    found = Counter(number for node in graph.nodes for number in node.inputs)
    found.update(output.value for output in graph.outputs)
    return found


def is_plain_addition(entry: Entry) -> bool:
    """Whether an operation adds two tensors, without a factor."""
    if entry.name != "aten::add.Tensor":
        return False
    return not entry.number_kinds and (entry.arguments or {}).get("alpha", 1) == 1
