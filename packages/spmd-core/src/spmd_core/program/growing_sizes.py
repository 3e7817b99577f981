"""Finds cuts that differ in a growing size alone, and gives them one program for many sizes.

A decoder whose cache is concatenated to, or a loop over ever longer prefixes, is another program
for each length. Once two cuts have the same operations, and every integer in them (sizes, positions
in a slice) is the same or has grown by the same steps, those that follow run in a program whose
arrays have room for the next power of two, and which gets the length as an input
(`padded_evaluation`). Its results keep their room (`Placement.room`), so that the next cut takes
them as they are.

What cannot be evaluated so compiles for each size, as any other program.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core import counters
from spmd_core.graph.placement import Placement
from spmd_core.graph.values import Entry, Spec
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
from spmd_core.program.lowering import Function
from spmd_core.program.padded_evaluation import Evaluation
from spmd_core.program.program_graph import Graph, KeepWhole, stored_shape

# Arrays have room for at least so many elements along a growing dim, and for more as long as all
# growing arrays of the function together stay below so many bytes, up to a limit: some have none.
_LEAST_ROOM = 32
_CHEAP_BYTES = 1 << 20
_CHEAP_ROOM = 1 << 14
# The traces of so many further sizes are compared with what the first two lead to expect.
_NUM_COMPARED = 2
_MAX_FAMILIES = 256
_MAX_GROWTHS = 8
# After so many refusals no more attempts are made with cuts that differ in integers alone.
_MAX_REFUSALS = 3


@dataclass
class Sample:
    """One cut.

    Attributes:
        key: its key.
        graph: its graph, with exact shapes.
        ints: all integers of the key.
    """

    key: Key
    graph: Graph
    ints: tuple[int, ...]


@dataclass
class Family:
    """Cuts that differ in integers alone, such as those of a model in several widths.

    Attributes:
        sample: the newest cut that has a program of its own.
        growths: how the integers grow, where that is known.
        refusals: why some cuts have a program for each size.
    """

    sample: Sample
    growths: "list[Growing]" = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


_families: OrderedDict[Any, Family] = OrderedDict()
# The number of each form of an entry's key. Entries keep these numbers, so none is given twice.
_form_numbers: dict[Any, int] = {}


def clear() -> None:
    """Forgets every cut."""
    _families.clear()


def refusals() -> list[str]:
    """Why cuts that differ in a size that grows have a program for each size."""
    return [refusal for family in _families.values() for refusal in family.refusals]


def refusal_of(key: Key) -> str | None:
    """Why the cuts of this family have a program for each size; None if they do not, or unknown."""
    family = _families.get(_split_key(key)[0])
    return family.refusals[-1] if family is not None and family.refusals else None


@dataclass(frozen=True)
class Bounded:
    """A program for many sizes, and how the cut at hand is one of them.

    Attributes:
        key: the program's key.
        graph: what to lower.
        targets: how each leaf must lie.
        number: the program's last int.
    """

    key: Key
    graph: Graph
    targets: tuple[Placement, ...]
    number: int


def find(key: Key, make_graph: Callable[[], Graph]) -> Bounded | None:
    """The program for many sizes that computes this cut; None if it needs one of its own.

    Args:
        key: the cut's key.
        make_graph: returns the cut's graph, which most calls do not need.
    """
    skeleton, ints = _split_key(key)
    family = _families.get(skeleton)
    if family is None:
        _families[skeleton] = Family(Sample(key, make_graph(), ints))
        if len(_families) > _MAX_FAMILIES:
            _families.popitem(last=False)
        return None
    _families.move_to_end(skeleton)
    growing = next((g for g in family.growths if g.has(ints)), None)
    try:
        if growing is not None:
            return growing.bounded(key, ints[growing.place], make_graph)
        sample = Sample(key, make_graph(), ints)
        growing = _growth(family, sample)
        family.sample = sample
        if growing is not None:
            return growing.bounded(key, ints[growing.place], make_graph)
    except GrowthRefusedError as error:
        counters.count("growing_sizes_refused")
        family.refusals.append(str(error))
        family.growths = [g for g in family.growths if g is not growing]
    return None


def _split_key(key: Key) -> tuple[Any, tuple[int, ...]]:
    """The key without its integers, and these; positions of values count as no integers."""
    skeleton: list[Any] = []
    ints: list[int] = []
    for x in key.structure:
        if isinstance(x, int):
            skeleton.append(x)
        else:
            form, own = x.form or _set_form(x)
            skeleton.append((form,))
            ints += own
    for spec, placement in key.leaves:
        # The partitioner may have chosen another layout for each size of an unmarked tensor.
        is_free = placement.sharding is None and placement.manual is None
        skeleton.append((spec.dtype, len(spec.shape), None if is_free else placement))
        ints += spec.shape
    for number, spec, output in key.outputs:
        skeleton.append((number, spec.dtype, len(spec.shape), output))
        ints += spec.shape
    return (tuple(skeleton), *key[3:]), tuple(ints)


def _set_form(entry: Entry) -> tuple[int, tuple[int, ...]]:
    ints: list[int] = []
    # An entry without a key is one of its own.
    form = (entry.name, entry if entry.key is None else _without_ints(entry.key, ints))
    for spec in entry.outs:
        ints += spec.shape
    number = _form_numbers.setdefault(form, len(_form_numbers))
    entry.form = (number, tuple(ints))
    return entry.form


def _without_ints(x: Any, ints: list[int]) -> Any:
    kind = x.__class__
    if kind is int:
        ints.append(x)
        return int
    if kind is Spec:
        ints += x.shape
        is_packed = x.logical is x
        if not is_packed:
            ints += x.strides
        return (Spec, len(x.shape), is_packed, x.dtype)
    if isinstance(x, (tuple, list)):
        return (kind, *(_without_ints(item, ints) for item in x))
    return x


def _growth(family: Family, now: Sample) -> "Growing | None":
    """How the integers grow from the family's last cut to this one; None if they do not.

    A dim of a leaf, of a result or of what is computed must have grown by one.
    """
    before = family.sample
    places = (i for i in _sizes(now.key) if before.ints[i] != now.ints[i])
    place = next(places, None)
    if (
        place is None
        or now.ints[place] != before.ints[place] + 1
        or len(family.refusals) >= _MAX_REFUSALS
    ):
        return None
    last = family.growths[-1] if family.growths else None
    if last is not None and last.sample is before and last.place == place:
        raise GrowthRefusedError("its sizes do not grow by equal steps")
    growing = Growing.of(before, now, place)
    family.growths = [*family.growths[-_MAX_GROWTHS + 1 :], growing]
    return growing


def _sizes(key: Key) -> Iterator[int]:
    """Where the sizes of tensors stand among the key's integers: leaves and results come first."""
    entries = [x for x in key.structure if not isinstance(x, int)]
    ends = list(accumulate(len((x.form or _set_form(x))[1]) for x in entries))
    yield from range(ends[-1], ends[-1] + _num_outer_sizes(key))
    for entry, end in zip(entries, ends):
        yield from range(end - sum(len(spec.shape) for spec in entry.outs), end)


def _num_outer_sizes(key: Key) -> int:
    """The number of dims of all leaves and results."""
    leaves, results = (spec for spec, _ in key.leaves), (spec for _, spec, _ in key.outputs)
    return sum(len(spec.shape) for spec in (*leaves, *results))


@dataclass
class Growing:
    """How the cuts of a family depend on one number.

    Attributes:
        sample: the cut at the second value.
        fit: the two values, which are sizes of a dim.
        place: of that size among the integers of the key.
        slopes: of the integers of the key.
        offsets: of the same; both int64.
        first: the function at the first value.
        second: the function at the second value.
        forms: of the two functions.
        leaf_sizes: of each leaf's array.
        out_sizes: of each result's array.
        rooms: how much room there is.
        placements: of the leaves, for which the functions were traced.
        num_compared: of the sizes whose traces were compared.
    """

    sample: Sample
    fit: Fit
    place: int
    slopes: np.ndarray
    offsets: np.ndarray
    first: ClosedJaxpr
    second: ClosedJaxpr
    forms: tuple[Form, Form]
    leaf_sizes: list[Sizes]
    out_sizes: list[Sizes]
    rooms: "_Rooms"
    placements: tuple[Placement, ...]
    num_compared: int = 0
    _graphs: dict[Key, Graph] = field(default_factory=dict)

    @staticmethod
    def of(before: Sample, now: Sample, place: int) -> "Growing":
        """How the integers grow from one cut to another, where a dim grows by one.

        Args:
            before: the one cut.
            now: the other.
            place: of a size that grows, among the integers of the keys.

        Raises:
            GrowthRefusedError: no program holds for all these cuts.
        """
        if any(leaf.placement.manual for leaf in now.graph.leaves):
            raise GrowthRefusedError("a leaf is local to a manual region")
        first, second = before.ints[place], now.ints[place]
        # What shrinks in the key is compared at each cut, so it is known to hold.
        shrinking = frozenset(
            Affine(b - a, a - (b - a) * first) for a, b in zip(before.ints, now.ints) if b < a
        )
        fit = Fit(first, second, shrinking)
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
        if not _growing([*leaves, *outs]) and place >= len(now.ints) - _num_outer_sizes(now.key):
            # Padding to a multiple of the shards hides the growth.
            raise GrowthRefusedError("a dim that grows is split over devices")
        forms = (Form.of(a), Form.of(b))
        if not forms[0].agrees(forms[1]):
            raise GrowthRefusedError("its operations differ")
        rooms = _Rooms([*leaves, *outs], list(growing_arrays(fit, a, b)), second)
        return Growing(
            now, fit, place, slopes, offsets, a, b, forms, leaves, outs, rooms, placements
        )

    def has(self, ints: tuple[int, ...]) -> bool:
        """Whether these integers of a cut's key are those for some value of the number."""
        number = ints[self.place]
        return number >= self.fit.first and np.array_equal(
            self.slopes * number + self.offsets, np.array(ints)
        )

    def bounded(self, key: Key, number: int, make_graph: Callable[[], Graph]) -> Bounded:
        """The program for a cut of which `has` is true; `find` has the other arguments.

        Raises:
            GrowthRefusedError: the cut's function is not the one expected, or has no form with
                room for this size.
        """
        bound = self.rooms.bound(number)
        placements = _placements([placement for _, placement in key.leaves], self.leaf_sizes)
        specs = (spec for spec, _ in self.sample.key.leaves)
        key = self.sample.key._replace(leaves=tuple(zip(specs, placements)), bound=bound)
        is_new = key not in self._graphs
        if number not in (self.fit.first, self.fit.second) and (
            is_new or self.num_compared < _NUM_COMPARED
        ):
            self._compare(make_graph(), number)
        if is_new:
            self._graphs[key] = _traceable(self._graph(bound, placements))
        graph = self._graphs[key]
        return Bounded(key, graph, tuple(leaf.placement for leaf in graph.leaves), number)

    def _compare(self, graph: Graph, number: int) -> None:
        form = Form.of(_trace(_placed(graph, self.placements)))
        if not self.forms[0].predicts(self.forms[1], self.fit, form, number):
            raise GrowthRefusedError("its operations differ at another size")
        self.num_compared += 1

    def _graph(self, bound: int, placements: tuple[Placement, ...]) -> Graph:
        rooms = tuple(_room(sizes, bound) for sizes in self.out_sizes)
        graph = _placed(
            self.sample.graph,
            tuple(
                placement.with_room(_room(sizes, bound))
                for placement, sizes in zip(placements, self.leaf_sizes)
            ),
        )
        return replace(graph, growth=AtBound(self, bound, rooms))


def _trace(graph: Graph) -> ClosedJaxpr:
    return Function(graph, "growing").jaxpr()


def _placed(graph: Graph, placements: tuple[Placement, ...]) -> Graph:
    """The graph with other placements of its leaves."""
    leaves = tuple(
        replace(leaf, placement=placement) for leaf, placement in zip(graph.leaves, placements)
    )
    return replace(graph, leaves=leaves)


def _placements(
    placements: Sequence[Placement], leaf_sizes: Sequence[Sizes]
) -> tuple[Placement, ...]:
    """The placements of leaves, with the growing dims of unmarked ones whole."""
    return tuple(
        _with_whole_dims(placement, sizes) if any(map(_is_growing, sizes)) else placement
        for placement, sizes in zip(placements, leaf_sizes)
    )


def _is_growing(size: Size) -> bool:
    return size.__class__ is Affine


def _with_whole_dims(placement: Placement, sizes: Sizes) -> Placement:
    """The placement, or for an unmarked leaf one that splits no growing dim.

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
    """How much room the arrays of a family have.

    Args:
        stored: the sizes of all leaves and results.
        arrays: the sizes and the bytes of an element of all growing arrays of the function.
        number: one number that they grow with.
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
        """The greatest number for which the arrays have the room that they have for this one."""
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
    """The sizes that become larger."""
    return {s for sizes in arrays for s in sizes if isinstance(s, Affine) and s.slope > 0}


@dataclass(frozen=True)
class AtBound:
    """A program's `Growth`: the function on arrays with room up to a bound."""

    growing: Growing
    bound: int
    rooms: tuple[tuple[int, ...] | None, ...]

    def evaluate(
        self, number: jax.Array, inputs: Sequence[jax.Array], keep_whole: KeepWhole
    ) -> list[jax.Array]:
        """See `program_graph.Growth`."""
        growing = self.growing
        run = Evaluation(growing.fit, self.bound, number)
        packed = len(inputs) - len(growing.leaf_sizes)
        leaves = [
            _resized(x, run.shape(sizes)) for x, sizes in zip(inputs[packed:], growing.leaf_sizes)
        ]
        *results, _ = run.run(growing.first, growing.second, [*inputs[:packed], *leaves])
        outs = []
        for x, room in zip(results, self.rooms):
            array = x.array if room is None else _resized(x.array, room)
            outs.append(keep_whole(array, x.growing) if x.growing else array)
        return outs


def _traceable(graph: Graph) -> Graph:
    """The graph. Raises GrowthRefusedError where its function cannot be traced."""
    try:
        _trace(graph)
    except (TypeError, ValueError) as error:  # jax's, of shapes that do not fit each other
        raise GrowthRefusedError(f"its shapes do not fit at another size: {error}") from error
    return graph


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
    """The shape of an array with room up to the bound; None if it does not grow."""
    if all(isinstance(size, int) for size in sizes):
        return None
    return tuple(_room_for(s.at(bound)) if isinstance(s, Affine) else s for s in sizes)


def _refuse_split(sizes: Sizes, placement: Placement | None) -> None:
    """Raises where a dim that grows is split."""
    if placement is None or placement.jax_sharding is None:
        return
    spec = placement.jax_sharding.spec
    if any(_is_growing(size) and split for size, split in zip(sizes, spec)):
        raise GrowthRefusedError("a dim that grows is split over devices")
