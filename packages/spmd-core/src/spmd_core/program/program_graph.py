"""One cut, frozen: the graph that a program is lowered from."""

from dataclasses import dataclass

from spmd_core.config import CompilerOption
from spmd_core.graph.values import Entry, Spec
from spmd_core.runtime.placement import Placement
from spmd_core.sharding.sharding import Sharding
from spmd_core.source_lines import Origin


@dataclass(frozen=True)
class Node:
    """One recorded operation of a graph. `inputs` number the graph's values: n >= 0 is the n-th result of all nodes in order, and
    n < 0 is leaf -n - 1."""

    entry: Entry
    inputs: tuple[int, ...]
    origin: Origin | None = None


@dataclass(frozen=True)
class Leaf:
    """An input of the program, and how it lies on the program's devices."""

    spec: Spec
    placement: Placement
    origin: Origin | None = None


@dataclass(frozen=True)
class Output:
    """A result of the program: which value, and where it goes: as marked, as the buffer that it replaces lay, or as the partitioner likes."""

    value: int
    spec: Spec
    placement: Placement | None

    @property
    def sharding(self) -> Sharding | None:
        return None if self.placement is None else self.placement.sharding


@dataclass(frozen=True)
class Graph:
    """Everything that the program depends on; `donated` are positions of leaves whose buffers the results take over."""

    leaves: tuple[Leaf, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    donated: tuple[int, ...]
    device_ids: tuple[int, ...]
    options: tuple[tuple[str, CompilerOption], ...] = ()


def padded_shape(spec: Spec, sharding: Sharding | None) -> tuple[int, ...]:
    """The shape that is stored: each sharded dim rounded up to a multiple of its shards."""
    return spec.shape if sharding is None else sharding.padded_shape(spec.shape)


def stored_shape(spec: Spec, placement: Placement) -> tuple[int, ...]:
    """The shape of the array that a leaf is."""
    return (
        padded_shape(spec, placement.sharding)
        if placement.manual is None
        else (placement.manual.size, *spec.shape)
    )
