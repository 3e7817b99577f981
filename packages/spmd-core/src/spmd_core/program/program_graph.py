"""`RecordedGraph`: the immutable description of a cut, from which a program is lowered."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from spmd_core.config import CompilerOption
from spmd_core.graph.placement import Placement
from spmd_core.graph.values import Entry, Spec
from spmd_core.sharding.sharding import Sharding
from spmd_core.source_lines import Origin


@dataclass(frozen=True)
class Node:
    """One recorded operation of a graph.

    Attributes:
        entry: the operation.
        inputs: the value numbers of its inputs: n >= 0 is the n-th result, counted over all nodes
            in order; n < 0 is leaf -n - 1.
        origin: the user's source line; None if it was not recorded.
    """

    entry: Entry
    inputs: tuple[int, ...]
    origin: Origin | None = None


@dataclass(frozen=True)
class Leaf:
    """An input of the program, with its placement on the program's devices.

    Attributes:
        spec: the tensor's spec.
        placement: its placement.
        origin: the user's source line; None if it was not recorded.
        owner: a weak reference to the storage whose value it was when the graph was made, for the
            tensor's name in errors; None if there is none.
    """

    spec: Spec
    placement: Placement
    origin: Origin | None = None
    owner: "weakref.ref[Any] | None" = field(default=None, compare=False)


@dataclass(frozen=True)
class Output:
    """A result of the program.

    Attributes:
        value: the value's number, as in `Node.inputs`.
        spec: the spec of the storage that receives it.
        placement: that of the storage's mark, or of the buffer that the result replaces; None if
            the partitioner chooses.
        owner: a weak reference to that storage, as in `Leaf`.
    """

    value: int
    spec: Spec
    placement: Placement | None
    owner: "weakref.ref[Any] | None" = field(default=None, compare=False)

    @property
    def sharding(self) -> Sharding | None:
        return None if self.placement is None else self.placement.sharding


# (x, dims) -> x with those dims replicated; the partitioner chooses the sharding of the others
ReplicateDims = Callable[[jax.Array, Iterable[int]], jax.Array]


class Growth(Protocol):
    """How one program computes cuts of many sizes (`growing_sizes`).

    Attributes:
        bound: the greatest size, which is a part of the program's name.
        rooms: for each result that grows, its padded shape; None for others.
    """

    @property
    def bound(self) -> int: ...

    @property
    def rooms(self) -> tuple[tuple[int, ...] | None, ...]: ...

    def evaluate(
        self, number: jax.Array, inputs: Sequence[jax.Array], replicate_dims: ReplicateDims
    ) -> tuple[list[jax.Array], jax.Array]:
        """The results of the program's function at this number, and its token.

        Args:
            number: the actual size, a 0-dim int64 array.
            inputs: the packed numbers, then the padded leaves.
            replicate_dims: replicates some dims of an array.
        """
        ...


@dataclass(frozen=True)
class RecordedGraph:
    """Everything that a program depends on.

    Attributes:
        leaves: the graph inputs.
        nodes: the operations, in the order of recording.
        outputs: the results.
        donated: the positions of the donated leaves.
        device_ids: the program's devices.
        options: the compiler options, by name.
        checks_indices: whether the program checks indices, and returns the result as its token.
        fold_layers: whether runs of operations that are repeated become loops.
        growth: for a program for growing sizes, its evaluation; the specs of the graph are then
            those of one size.
    """

    leaves: tuple[Leaf, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    donated: tuple[int, ...]
    device_ids: tuple[int, ...]
    options: tuple[tuple[str, CompilerOption], ...] = ()
    checks_indices: bool = False
    fold_layers: bool = False
    growth: "Growth | None" = None


def padded_shape(spec: Spec, sharding: Sharding | None) -> tuple[int, ...]:
    """The shape of the stored array: each split dim is padded to a multiple of its shards."""
    return spec.shape if sharding is None else sharding.padded_shape(spec.shape)


def stored_shape(spec: Spec, placement: Placement) -> tuple[int, ...]:
    """The shape of a leaf's array; for a local value, with the first dim for the manual axes."""
    if placement.room is not None:
        return placement.room
    return (
        padded_shape(spec, placement.sharding)
        if placement.manual is None
        else (placement.manual.size, *spec.shape)
    )
