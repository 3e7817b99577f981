"""Bucketing: finds cuts that differ in one size alone, and gives them one padded program.

A decoder that concatenates to its cache has another program for each length, and so has a training
step for each length of its batches. Cuts belong together if they have the same operations, and
every integer in them (sizes, positions in a slice) is an affine function of one size. They share a
program whose arrays are padded to the next power of two, and which takes the size as an input
(`growing_program`). Its results stay padded (`Placement.room`), so that the next cut can take them
as they are.

This starts at the second size if it is the first one plus one, as in a decoder. Otherwise it starts
at the third size, in any order: two sizes may be those of training and of evaluation, and never
change. Cuts that cannot be evaluated on padded arrays are compiled for each size, like any other
program.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from math import gcd
from typing import Any

import numpy as np

from spmd_core import counters
from spmd_core.graph.values import Entry, Spec
from spmd_core.program.affine_sizes import GrowthRefusedError
from spmd_core.program.compile_cache import Key
from spmd_core.program.growing_program import Bounded, Growing, Sample, num_outer_sizes
from spmd_core.program.program_graph import RecordedGraph

_MAX_FAMILIES = 256
_MAX_GROWTHS = 8
# The number of cuts among which three are sought that differ in one size.
_MAX_SAMPLES = 6
# After this many refusals, no more attempts are made for a family.
_MAX_REFUSALS = 3


@dataclass
class Family:
    """Cuts that differ in integers alone, such as those of a model in several widths.

    Attributes:
        samples: the newest cuts that have programs of their own.
        growths: the known ways in which the integers depend on a size.
        refusals: the reasons why some cuts have a program for each size.
        folded: the keys of the newest such programs whose layers may be loops.
    """

    samples: list[Sample] = field(default_factory=list)
    growths: list[Growing] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    folded: list[Key] = field(default_factory=list)


# At most `_MAX_FAMILIES`.
# Guarded by: the graph lock. Cleared by: growing_sizes.clear().
_families: OrderedDict[Any, Family] = OrderedDict()
# A number for each form of an entry's key. Entries keep these numbers, so none is given twice.
# Guarded by: the graph lock. Cleared by: never: entries keep the numbers.
_form_numbers: dict[Any, int] = {}


def clear() -> None:
    """Forgets every cut."""
    _families.clear()


def forget(key: Key) -> None:
    """Forgets a cut whose program could not be compiled, so that no other is compared with it."""
    family = _families.get(_split_key(key)[0])
    if family is not None:
        family.samples = [sample for sample in family.samples if sample.key != key]


def refusals() -> list[str]:
    """The reasons why cuts that differ in one size have a program for each size."""
    return [refusal for family in _families.values() for refusal in family.refusals]


def refusal_of(key: Key) -> str | None:
    """Why the cuts of this key's family have a program for each size; None if nothing is known."""
    family = _families.get(_split_key(key)[0])
    if family is None and key.fold_layers:
        family = next((x for x in _families.values() if key in x.folded), None)
    return family.refusals[-1] if family is not None and family.refusals else None


def note_folded(key: Key, folded: Key) -> None:
    """Notes that a cut has a program of its own, whose layers may be loops.

    Args:
        key: the cut's key with layers one by one.
        folded: the program's key.
    """
    family = _families.get(_split_key(key)[0])
    if family is not None:
        family.folded = [*family.folded[-_MAX_SAMPLES + 1 :], folded]


def find_program(key: Key, make_graph: Callable[[], RecordedGraph]) -> Bounded | None:
    """The program for many sizes that computes this cut; None if it needs its own program.

    Args:
        key: the cut's key.
        make_graph: returns the cut's graph, which most calls do not need.
    """
    skeleton, ints = _split_key(key)
    family = _families.get(skeleton)
    if family is None:
        family = _families[skeleton] = Family()
        if len(_families) > _MAX_FAMILIES:
            _families.popitem(last=False)
    _families.move_to_end(skeleton)
    growing = next((g for g in family.growths if g.has(ints)), None)
    try:
        if growing is None and any(sample.key == key for sample in family.samples):
            return None  # it is planned again
        if growing is None:
            sample = Sample(key, make_graph(), ints)
            earlier = family.samples
            family.samples = [*earlier[-_MAX_SAMPLES + 1 :], sample]
            growing = _growth(family, earlier, sample)
        if growing is not None:
            return growing.bounded(key, ints[growing.place], make_graph)
    except GrowthRefusedError as error:
        counters.count("growing_sizes_refused")
        family.refusals.append(str(error))
        family.growths = [g for g in family.growths if g is not growing]
    return None


def _split_key(key: Key) -> tuple[Any, tuple[int, ...]]:
    """The key without its integers, and the integers; value numbers stay in the key."""
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
    # An entry without a key is equal to no other.
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


def _growth(family: Family, earlier: list[Sample], now: Sample) -> Growing | None:
    """How the integers depend on a size, from this cut and earlier ones; None if not known yet."""
    if not earlier or len(family.refusals) >= _MAX_REFUSALS:
        return None
    before = earlier[-1]
    place = next((i for i in _sizes(now.key) if before.ints[i] != now.ints[i]), None)
    if place is not None and now.ints[place] == before.ints[place] + 1:
        last = family.growths[-1] if family.growths else None
        if last is not None and last.sample is before and last.place == place:
            raise GrowthRefusedError("its sizes do not grow by equal steps")
    else:
        pairs = combinations(earlier, 2)
        pair = next((p for p in pairs if _are_of_one_kind(*p, now)), None)
        if pair is None:
            return None
        before, now = pair
        place = _place(before, now)
        assert place is not None
    growing = Growing.of(before, now, place)
    family.growths = [*family.growths[-_MAX_GROWTHS + 1 :], growing]
    return growing


def _place(before: Sample, now: Sample) -> int | None:
    """The position, among the integers of two cuts, of the size on which the others depend.

    It is the size with the smallest difference; None if no size differs.
    """
    places = [i for i in _sizes(now.key) if before.ints[i] != now.ints[i]]
    return min(places, key=lambda i: abs(now.ints[i] - before.ints[i]), default=None)


def _are_of_one_kind(first: Sample, second: Sample, third: Sample) -> bool:
    """Whether the integers of three cuts are functions of one size, with three different values."""
    place = _place(first, second)
    if place is None:
        return False
    a, b, c = (np.array(sample.ints) for sample in (first, second, third))
    by, to = int(b[place] - a[place]), int(c[place] - a[place])
    common = gcd(by, to)
    is_affine = np.array_equal((c - a) * (by // common), (b - a) * (to // common))
    varying = np.flatnonzero(a != b)
    sizes = [i for i in _sizes(first.key) if a[i] != b[i]]
    is_special = min(int(x[i]) for i in sizes for x in (a, b, c)) <= 1
    return to not in (0, by) and is_affine and not is_special and not ((b - a)[varying] % by).any()


def _sizes(key: Key) -> Iterator[int]:
    """The positions of tensors' sizes among the key's integers: leaves and results come first."""
    entries = [x for x in key.structure if not isinstance(x, int)]
    ends = list(accumulate(len((x.form or _set_form(x))[1]) for x in entries))
    yield from range(ends[-1], ends[-1] + num_outer_sizes(key))
    for entry, end in zip(entries, ends):
        yield from range(end - sum(len(spec.shape) for spec in entry.outs), end)
