"""The scalar inputs of a captured program: constants, seeds, and what is read at each call.

A number that varies between two recordings must come from a param_group, such as a learning rate
that a scheduler sets. It is found by comparing: the number was the same function of the group's
values in both recordings, one of a few forms that optimizers write.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_core.errors import CaptureError
from spmd_core.graph.values import Entry, origin_of
from spmd_core.program import start
from spmd_core.program.planning import CutPlan
from spmd_core.steps.capture.reachable import Reached

# What optimizers compute of one value of a param_group on the host, and of two.
_OF_ONE: tuple[Callable[[Any], Any], ...] = (
    lambda v: v, lambda v: -v, lambda v: 1 - v, lambda v: 1 / v, lambda v: v * v,
)  # fmt: skip
_OF_TWO: tuple[Callable[[Any, Any], Any], ...] = (
    lambda v, w: v * w, lambda v, w: -v * w, lambda v, w: 1 - v * w,
)  # fmt: skip
# Of a program: floats, ints and complex numbers.
Lists = tuple[list[float], list[int], list[complex]]


@dataclass(frozen=True)
class Live:
    """A number that is computed from values of param_groups at each call.

    Attributes:
        position: among the program's numbers.
        paths: the values, one or two.
        form: the function of them.
    """

    position: int
    paths: tuple[str, ...]
    form: Callable[..., Any]


@dataclass(frozen=True)
class Numbers:
    """How the numbers of a program come about.

    Attributes:
        values: those of the last recording.
        seeds: the position of each seed, with which of the call's draws it was.
        live: those that are read from param_groups. Several may stand at one position: they must
            give the same number.
    """

    values: tuple[Any, ...]
    seeds: tuple[tuple[int, int], ...]
    live: tuple[Live, ...]

    def paths(self) -> set[str]:
        """The paths of what is read at each call."""
        return {path for live in self.live for path in live.paths}


class Scalars:
    """The scalar inputs of each call, by kind, as a program takes them.

    Args:
        numbers: how they come about.
        reached: where the live ones are read.
    """

    def __init__(self, numbers: Numbers, reached: Reached) -> None:
        self._lists = start.by_kind(numbers.values)
        counts = itertools.count(), itertools.count(), itertools.count()
        of = (float, int, complex).index
        kinds = [of(int if x.__class__ is bool else x.__class__) for x in numbers.values]
        places = [(kind, next(counts[kind])) for kind in kinds]
        self._seeds = [(places[position], draw) for position, draw in numbers.seeds]
        self._paths = [*dict.fromkeys(path for live in numbers.live for path in live.paths)]
        self._groups = [reached.numbers[path] for path in self._paths]
        self._types = [type(mapping[key]) for mapping, key in self._groups]
        # The same number stands at hundreds of positions: by function and paths.
        self._live: dict[tuple[Any, tuple[str, ...]], list[tuple[int, int]]] = {}
        self._kinds = []
        for live in numbers.live:
            at = self._live.setdefault((live.form, live.paths), [])
            if not at:
                self._kinds.append(kind_of(numbers.values[live.position]))
            at.append(places[live.position])
        self._read: list[Any] = []  # the values of param_groups of which `_lists` is made

    def now(self) -> Lists | None:
        """Those of a call without new seeds; None if one is of another kind than it was."""
        read = [mapping.get(key) for mapping, key in self._groups]
        if len(read) == len(self._read) and all(map(operator.is_, read, self._read)):
            return self._lists
        if [*map(type, read)] != self._types:
            return None
        values = dict(zip(self._paths, read))
        fresh: dict[tuple[int, int], Any] = {}
        for ((form, paths), places), kind in zip(self._live.items(), self._kinds):
            number = _of(form, *(values[path] for path in paths))
            if number is None or kind_of(number) != kind:
                return None
            if any(fresh.setdefault(place, number) != number for place in places):
                return None
        floats, ints, complexes = self._lists
        self._lists = [*floats], [*ints], [*complexes]
        for (kind, i), number in fresh.items():
            self._lists[kind][i] = int(number) if kind == 1 else number
        self._read = read
        return self._lists

    def seeded(self, lists: Lists, seeds: Sequence[int]) -> Lists:
        """The scalar inputs of a call, with its seeds.

        Args:
            lists: from `now`.
            seeds: those that the call draws.
        """
        if not self._seeds:
            return lists
        floats, ints, complexes = lists
        ints = [*ints]
        for (_, i), draw in self._seeds:
            ints[i] = seeds[draw]
        return floats, ints, complexes


def seed_positions(entries: Sequence[Entry]) -> list[bool]:
    """For each number of a program, whether it is a seed."""
    found: list[bool] = []
    for entry in entries:
        count = len(entry.number_kinds)
        if entry.subgraphs:  # whose numbers are those of what it runs
            for subgraph in entry.subgraphs:
                found += seed_positions([inner for inner, _ in subgraph.nodes])
        elif entry.traits.has_seeds:
            found += [True] * count
        else:
            found += [False] * (count - entry.random) + [True] * entry.random
    return found


def compared(
    before: Sequence[Any],
    now: Sequence[Any],
    is_seed: Sequence[bool],
    draws: Sequence[int],
    plan: CutPlan,
    reached: tuple[Mapping[str, Any], Reached],
    known: Sequence[Live] = (),
) -> Numbers:
    """How the numbers come about, from those of two recordings of the same program.

    Args:
        before: the numbers of the earlier recording.
        now: those of this one.
        is_seed: whether each is a seed.
        draws: the seeds that this recording drew, in order.
        plan: this recording's, to name a line.
        reached: the values of param_groups in the earlier recording by path, and what this one
            reached.
        known: what is known to be read, from earlier comparisons.

    Raises:
        CaptureError: a number varies, and comes from nowhere that is known.
    """
    seeds, live = [], []
    drawn: dict[int, list[int]] = {}
    for i, seed in enumerate(draws):
        drawn.setdefault(seed, []).append(i)
    for i, (old, new) in enumerate(zip(before, now)):
        if is_seed[i]:
            if new not in drawn:
                raise CaptureError(
                    "random operations of a captured step draw their seeds from torch's generators;"
                    f" {_where(plan, i)} has another one. Leave its seed to torch."
                )
            # Of generators with the same seed, the first operation has the first one's.
            of = drawn[new]
            seeds.append((i, of.pop(0) if len(of) > 1 else of[0]))
        elif _same(old, new):
            live += [x for x in known if x.position == i and _gives(x, new, reached[1])]
        else:
            found = _forms(i, old, new, *reached)
            if not found:
                raise CaptureError(
                    f"a number of a captured step is constant, or comes from an optimizer's "
                    f"param_groups; {_where(plan, i)} got {old!r} and then {new!r}. If it counts "
                    "steps, keep the count on the device: AdamW(..., fused=True) or "
                    "capturable=True does. Else pass a tensor as an argument."
                )
            live += found
    return Numbers(tuple(now), tuple(seeds), tuple(live))


def kind_of(number: Any) -> Any:
    """What optimizers and torch decide by: a number of the same kind gives the same program."""
    return type(number), number == 0, number == 1, number > 0, math.isfinite(number)


def _gives(live: Live, number: Any, reached: Reached) -> bool:
    return _same(_of(live.form, *(reached.number(path) for path in live.paths)), number)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _forms(
    position: int, old: Any, new: Any, before: Mapping[str, Any], reached: Reached
) -> list[Live]:
    """All simplest forms that give the number in both recordings."""
    paths = [p for p in reached.numbers if p in before]
    pairs = [(p, before[p], reached.number(p)) for p in paths]
    found = [
        Live(position, (path,), form)
        for form in _OF_ONE
        for path, then, now in pairs
        if _same(_of(form, then), old) and _same(_of(form, now), new)
    ]
    return found or [
        Live(position, (p, q), form)
        for form in _OF_TWO
        for p, then, now in pairs
        for q, other_then, other_now in pairs
        if _same(_of(form, then, other_then), old) and _same(_of(form, now, other_now), new)
    ]


def _of(form: Callable[..., Any], *values: Any) -> Any:
    try:
        return form(*values)
    except ArithmeticError:
        return None


def _where(plan: CutPlan, position: int) -> str:
    """The operation that takes a number, and its line."""
    entries = [x for x in plan.key.structure if isinstance(x, Entry)]
    ends = itertools.accumulate(len(entry.number_kinds) for entry in entries)
    taker = next(i for i, end in enumerate(ends) if position < end)
    line = origin_of(plan.nodes[taker])
    return entries[taker].name + ("" if line is None else f", recorded at {line},")
