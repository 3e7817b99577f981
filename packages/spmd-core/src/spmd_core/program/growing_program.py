"""One program for cuts that differ in a size, whose arrays are padded to a greatest size.

The function of the cuts is traced at two sizes, from which `affine_sizes` fits how its integers
depend on the size. `padded_evaluation` evaluates it on padded arrays, with the size as an input.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.graph.placement import Placement
from spmd_core.graph.values import Entry
from spmd_core.program import compile_cache
from spmd_core.program.affine_sizes import (
    Affine,
    Fit,
    Form,
    GrowthRefusedError,
    Size,
    Sizes,
    growing_arrays,
    shape_of,
)
from spmd_core.program.compile_cache import Key
from spmd_core.program.lower import jaxpr
from spmd_core.program.padded_arrays import Capacity
from spmd_core.program.padded_evaluation import Evaluation
from spmd_core.program.program import Program
from spmd_core.program.program_graph import RecordedGraph, ReplicateDims, stored_shape

# The smallest capacity of an array along a growing dim. It is doubled, up to `_CHEAP_ROOM`, as long
# as all growing arrays of the function together take at most `_CHEAP_BYTES`.
_LEAST_ROOM = 32
_CHEAP_BYTES = 1 << 20
_CHEAP_ROOM = 1 << 14
# The number of further sizes whose traces are compared with what the first two predict.
_NUM_COMPARED = 2
# Smaller sizes are not assumed to follow the fit: a dim of one element may be broadcast.
_LEAST_SIZE = 2


@dataclass
class Sample:
    """One cut that has a program of its own.

    Attributes:
        key: the program's key.
        graph: the cut's graph, with exact shapes.
        ints: all integers of the key.
    """

    key: Key
    graph: RecordedGraph
    ints: tuple[int, ...]


@dataclass(frozen=True)
class Bounded:
    """A program for many sizes, with the size of one cut.

    Attributes:
        key: the program's key.
        graph: the graph to lower.
        targets: the placement that each leaf must have.
        number: the size of the cut, which the program takes as its last int.
    """

    key: Key
    graph: RecordedGraph
    targets: tuple[Placement, ...]
    number: int

    def program(self, name: str) -> Program:
        """The program, from the cache or newly compiled; its name is this one with the bound."""
        return compile_cache.get(self.key, lambda: self.graph, self.name(name))

    def name(self, name: str) -> str:
        """The program's name, for a cut of this name."""
        return f"{name}_{self.key.bound}"


@dataclass
class Growing:
    """How the cuts of a family depend on one number.

    Attributes:
        sample: the cut at the second value.
        fit: the two values, which are sizes of a dim.
        place: the position of that size among the integers of the key.
        slopes: the slopes of the integers of the key, int64.
        offsets: their offsets, int64.
        least: the smallest number for which the fit is known to hold.
        first: the function at the first value.
        second: the function at the second value.
        forms: the forms of the two functions.
        leaf_sizes: the sizes of each leaf's array.
        out_sizes: the sizes of each result's array.
        rooms: the padded capacity of the arrays.
        placements: the placements of the leaves for which the functions were traced.
        step: the greatest common divisor of the differences between all sizes whose traces were
            compared.
        compared: the further sizes whose traces were compared.
    """

    sample: Sample
    fit: Fit
    place: int
    slopes: np.ndarray
    offsets: np.ndarray
    least: int
    first: ClosedJaxpr
    second: ClosedJaxpr
    forms: tuple[Form, Form]
    leaf_sizes: list[Sizes]
    out_sizes: list[Sizes]
    rooms: "_Rooms"
    placements: tuple[Placement, ...]
    step: int = 1
    compared: set[int] = field(default_factory=set)
    _graphs: dict[Key, RecordedGraph] = field(default_factory=dict)

    @staticmethod
    def of(before: Sample, now: Sample, place: int) -> "Growing":
        """How the integers change from one cut to another.

        Args:
            before: one cut.
            now: the other cut.
            place: the position, among the integers of the keys, of a size that differs; all other
                differences are multiples of this one.

        Raises:
            GrowthRefusedError: no program holds for all these cuts.
        """
        if any(leaf.placement.manual for leaf in now.graph.leaves):
            raise GrowthRefusedError("a leaf is local to a manual region")
        for old, new in zip(before.graph.leaves, now.graph.leaves):
            _refuse_split_change(old.spec.shape, new.spec.shape, new.placement)
        first, second = before.ints[place], now.ints[place]
        fit = Fit(first, second, _shrinking(before, now, first, second))
        ints = [fit.size(a, b) for a, b in zip(before.ints, now.ints)]
        slopes = np.array([s.slope if isinstance(s, Affine) else 0 for s in ints])
        offsets = np.array([s.offset if isinstance(s, Affine) else s for s in ints])
        leaves = [
            fit.sizes(*(stored_shape(leaf.spec, leaf.placement) for leaf in pair))
            for pair in zip(before.graph.leaves, now.graph.leaves)
        ]
        placements = _placements([leaf.placement for leaf in now.graph.leaves], leaves)
        a, b = (_trace(_placed(s.graph, placements)) for s in (before, now))
        outs = [
            fit.sizes(shape_of(x), shape_of(y))
            for x, y in zip(a.jaxpr.outvars[:-1], b.jaxpr.outvars[:-1])
        ]
        for sizes, output in zip(outs, now.graph.outputs):
            _refuse_split(sizes, output.placement)
        if not _growing([*leaves, *outs]) and place >= len(now.ints) - num_outer_sizes(now.key):
            # No stored array grows: the padding to a multiple of the shards hides it.
            raise GrowthRefusedError("a dim that grows is split over devices")
        forms = (Form.of(a), Form.of(b))
        if not forms[0].agrees(forms[1]):
            raise GrowthRefusedError("its operations differ")
        arrays = list(growing_arrays(fit, a, b))
        growing = _growing([*leaves, *outs, *(sizes for sizes, _ in arrays)])
        # At a number smaller than both, a dim may be broadcast or empty.
        least = max((-((s.offset - _LEAST_SIZE) // s.slope) for s in growing), default=first)
        return Growing(
            now,
            fit,
            place,
            slopes,
            offsets,
            min(first, second, least) if growing else max(first, second),
            a,
            b,
            forms,
            leaves,
            outs,
            _Rooms([*leaves, *outs], arrays, second),
            placements,
            step=abs(second - first),
        )

    def has(self, ints: tuple[int, ...]) -> bool:
        """Whether the integers of a cut's key agree with the fit, for some value of the number."""
        number = ints[self.place]
        return number >= self.least and np.array_equal(
            self.slopes * number + self.offsets, np.array(ints)
        )

    def bounded(self, key: Key, number: int, make_graph: Callable[[], RecordedGraph]) -> Bounded:
        """The program for a cut for which `has` is true. See `growing_sizes.find_program`.

        Raises:
            GrowthRefusedError: the cut's trace is not as predicted, or cannot be evaluated on
                arrays that are padded for this size.
        """
        bound = self.rooms.bound(number)
        placements = _placements([placement for _, placement in key.leaves], self.leaf_sizes)
        specs = (spec for spec, _ in self.sample.key.leaves)
        key = self.sample.key._replace(
            leaves=tuple(zip(specs, placements)), bound=bound, slopes=self.slopes.tobytes()
        )
        is_new = key not in self._graphs
        if number not in self.compared and (
            is_new
            or len(self.compared) < _NUM_COMPARED
            # The sizes compared so far may all be multiples of something, such as 8.
            or (number - self.fit.first) % self.step
        ):
            self._compare(make_graph(), number)
        if is_new:
            graph = self._graph(bound, placements)
            _trace(graph)
            self._graphs[key] = graph
        graph = self._graphs[key]
        return Bounded(key, graph, tuple(leaf.placement for leaf in graph.leaves), number)

    def _compare(self, graph: RecordedGraph, number: int) -> None:
        if number not in (self.fit.first, self.fit.second):
            form = Form.of(_trace(_placed(graph, self.placements)))
            if not self.forms[0].predicts(self.forms[1], self.fit, form, number):
                raise GrowthRefusedError("its operations differ at another size")
            self.compared.add(number)
            self.step = math.gcd(self.step, number - self.fit.first)

    def _graph(self, bound: int, placements: tuple[Placement, ...]) -> RecordedGraph:
        rooms = tuple(_room(sizes, bound) for sizes in self.out_sizes)
        graph = _placed(
            self.sample.graph,
            tuple(
                placement.with_room(_room(sizes, bound))
                for placement, sizes in zip(placements, self.leaf_sizes)
            ),
        )
        return replace(graph, growth=AtBound(self, bound, rooms))


def num_outer_sizes(key: Key) -> int:
    """The number of dims of all leaves and results."""
    leaves, results = (spec for spec, _ in key.leaves), (spec for _, spec, _ in key.outputs)
    return sum(len(spec.shape) for spec in (*leaves, *results))


def _shrinking(before: Sample, now: Sample, first: int, second: int) -> frozenset[Affine]:
    """The fits of integers of the keys that shrink. They are compared at each cut, so they hold."""
    pairs = [*zip(before.ints, now.ints)]
    for a, b in zip(before.graph.nodes, now.graph.nodes, strict=True):
        pairs += zip(_padding(a.entry), _padding(b.entry), strict=True)
    found = set()
    for x, y in pairs:
        slope, rest = divmod(y - x, second - first)
        if slope < 0 and not rest:
            found.add(Affine(slope, x - slope * first))
    return frozenset(found)


def _padding(entry: Entry) -> tuple[int, ...]:
    """How many zeros the gradient of a slice has after its elements, along the sliced dim."""
    given = entry.arguments or {}
    if entry.name not in ("aten::slice_backward", "aten::select_backward"):
        return ()
    shape = entry.spec.shape
    dim = given["dim"] % len(shape)
    size = shape[dim]
    is_slice = entry.name == "aten::slice_backward"
    start = given["start" if is_slice else "index"]
    length = given["grad_output"].shape[dim] if is_slice else 1
    return (size - length - (start + size if start < 0 else start),)


def _trace(graph: RecordedGraph) -> ClosedJaxpr:
    """The graph's function, without the rules for the partitioner, which apply after padding.

    Raises:
        GrowthRefusedError: it cannot be traced. The cut's own program then raises that error.
    """
    try:
        return jaxpr(graph, "growing")
    except GrowthRefusedError:
        raise
    except Exception as error:
        raise GrowthRefusedError(f"it cannot be traced at each size: {error}") from error


def _placed(graph: RecordedGraph, placements: tuple[Placement, ...]) -> RecordedGraph:
    """The graph with other placements of its leaves."""
    leaves = tuple(
        replace(leaf, placement=placement) for leaf, placement in zip(graph.leaves, placements)
    )
    return replace(graph, leaves=leaves)


def _placements(
    placements: Sequence[Placement], leaf_sizes: Sequence[Sizes]
) -> tuple[Placement, ...]:
    """The placements of leaves, with the growing dims of unmarked leaves replicated."""
    return tuple(
        _with_replicated_dims(placement, sizes) if any(map(_is_growing, sizes)) else placement
        for placement, sizes in zip(placements, leaf_sizes)
    )


def _is_growing(size: Size) -> bool:
    return size.__class__ is Affine


def _with_replicated_dims(placement: Placement, sizes: Sizes) -> Placement:
    """The placement; for an unmarked leaf, one that splits no growing dim.

    Raises:
        GrowthRefusedError: a mark splits a growing dim.
    """
    if placement.sharding is not None:
        _refuse_split(sizes, placement)
        return placement
    own = placement.device_sharding
    axes = tuple(
        None if isinstance(size, Affine) else split for size, split in zip_longest(sizes, own.spec)
    )
    if all(a == b for a, b in zip(axes, own.spec)):
        return placement
    return Placement.of(NamedSharding(own.mesh, PartitionSpec(*axes)), None)


class _Rooms:
    """The padded capacity of the arrays of a family.

    Args:
        stored: the sizes of all leaves and results.
        arrays: the sizes, and the bytes per element, of all growing arrays of the function.
        number: some value of the number.
    """

    def __init__(self, stored: list[Sizes], arrays: list[tuple[Sizes, int]], number: int) -> None:
        self._arrays = arrays
        self._growing = _growing(stored) or _growing(sizes for sizes, _ in arrays)
        self._least = _LEAST_ROOM
        while self._least < _CHEAP_ROOM and self._is_cheap(
            self._bound_for(2 * self._least, number)
        ):
            self._least *= 2

    def bound(self, number: int) -> int:
        """The greatest number whose arrays have the same capacity as those of this number."""
        return self._bound_for(self._least, number)

    def _bound_for(self, least: int, number: int) -> int:
        largest = max(self._growing, key=lambda size: size.at(number))
        room = max(least, _room_for(largest.at(number)))
        return (room - largest.offset) // largest.slope

    def _is_cheap(self, bound: int) -> bool:
        """Whether all growing arrays together take little memory."""
        num_bytes = sum(
            itemsize * math.prod(s.at(bound) if isinstance(s, Affine) else s for s in sizes)
            for sizes, itemsize in self._arrays
        )
        return num_bytes <= _CHEAP_BYTES


def _growing(arrays: Iterable[Sizes]) -> set[Affine]:
    """The sizes that grow with the number."""
    return {s for sizes in arrays for s in sizes if isinstance(s, Affine) and s.slope > 0}


@dataclass(frozen=True)
class AtBound:
    """A program's `Growth`: the function on arrays that are padded for numbers up to a bound."""

    growing: Growing
    bound: int
    rooms: tuple[tuple[int, ...] | None, ...]

    def evaluate(
        self, number: jax.Array, inputs: Sequence[jax.Array], replicate_dims: ReplicateDims
    ) -> tuple[list[jax.Array], jax.Array]:
        """See `program_graph.Growth`."""
        growing = self.growing
        capacity = Capacity(self.bound, number, replicate_dims)
        packed = len(inputs) - len(growing.leaf_sizes)
        leaves = [
            _resized(x, capacity.shape(sizes))
            for x, sizes in zip(inputs[packed:], growing.leaf_sizes)
        ]
        *results, token = Evaluation(growing.fit, capacity).results(
            growing.first, growing.second, [*inputs[:packed], *leaves]
        )
        outs = []
        for x, room in zip(results, self.rooms):
            array = x.array if room is None else _resized(x.array, room)
            outs.append(replicate_dims(array, x.growing) if x.growing else array)
        return outs, token.array


def _resized(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if x.shape == shape:
        return x
    kept = tuple(min(n, p) for n, p in zip(x.shape, shape))
    x = lax.slice(x, (0,) * x.ndim, kept)
    return jnp.pad(x, [(0, p - n) for n, p in zip(kept, shape)])


def _room_for(size: int) -> int:
    """The next power of two."""
    return max(_LEAST_ROOM, 1 << (size - 1).bit_length())


def _room(sizes: Sizes, bound: int) -> tuple[int, ...] | None:
    """The padded shape of an array for numbers up to the bound; None if it does not grow."""
    if all(isinstance(size, int) for size in sizes):
        return None
    return tuple(_room_for(s.at(bound)) if isinstance(s, Affine) else s for s in sizes)


def _refuse_split_change(first: Sequence[int], second: Sequence[int], placement: Placement) -> None:
    """Raises if a mark splits a dim whose size differs."""
    if placement.sharding is not None:
        sizes = (a if a == b else Affine(1, 0) for a, b in zip(first, second))
        _refuse_split(tuple(sizes), placement)


def _refuse_split(sizes: Sizes, placement: Placement | None) -> None:
    """Raises if a dim that grows is split."""
    if placement is None or placement.jax_sharding is None:
        return
    for dim, (size, split) in enumerate(zip(sizes, placement.jax_sharding.spec)):
        if _is_growing(size) and split:
            axes = split if isinstance(split, tuple) else (split,)
            raise GrowthRefusedError(
                f"dim {dim} varies in size, and is split over devices by {', '.join(axes)}"
            )
