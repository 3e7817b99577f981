"""Warns once of each place in the user's program that compiles again and again."""

import itertools
import os
import warnings
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from spmd_core import counters, source_lines
from spmd_core.config import config
from spmd_core.debugging.recompiles import explain
from spmd_core.program import compile_cache
from spmd_core.program.compile_cache import Compiled, Key

# The number of programs in a row that differ in the same way, after which a place is warned of.
_NUM_ALIKE = 4
_MAX_PLACES = 256


@dataclass
class _Place:
    """A place of the user's program; see `observe`.

    Attributes:
        newest: its newest programs.
        runs: how many programs its line had run when each of them was compiled.
        has_warned: whether the user was warned of it.
    """

    newest: deque[Compiled] = field(default_factory=lambda: deque(maxlen=_NUM_ALIKE))
    runs: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_ALIKE))
    has_warned: bool = False


# At most `_MAX_PLACES`.
# Guarded by: the graph lock. Cleared by: clear().
_places: OrderedDict[tuple[object, ...], _Place] = OrderedDict()


def clear() -> None:
    """Forgets every place."""
    _places.clear()


def observe(compiled: Compiled) -> None:
    """Warns if the place of this program compiles again and again. For `compile_cache.observers`.

    A *place* is the line of the user's program that caused the compilation, a `sync()` or a read,
    together with the names of the recorded operations in their order. Each pytest test has places
    of its own.

    Two programs of a place *differ in the same way* as two others if the same inputs, by position,
    differ in shape or dtype; if none does, the first operation whose arguments differ is the same,
    and so are the names of these arguments; and the same other fields of the key differ: placements
    of inputs and results, donation, devices, lines, options.

    The warning comes with the fourth program in a row that differs in the same way from the one
    before, if more than half of the programs that the line has started since the first of the four
    were compiled for it. So there is no warning for a loop that settles: whose first steps differ
    in different ways; that trains and evaluates; whose last batch is smaller; or that trains one
    model after another. A program for many sizes (`growing_sizes`) does not count, as it ends the
    recompilations.
    """
    if not config.warn_of_recompiles or compiled.key.bound is not None:
        return
    names = tuple(part.name for part in compiled.key.structure if not isinstance(part, int))
    # The hash replaces the names, of which there may be thousands.
    key = (compiled.record.source, hash(names), os.environ.get("PYTEST_CURRENT_TEST"))
    place = _places.setdefault(key, _Place())
    _places.move_to_end(key)
    if len(_places) > _MAX_PLACES:
        _places.popitem(last=False)
    place.newest.append(compiled)
    programs = [*place.newest]
    ways = {_way(a.key, b.key) for a, b in itertools.pairwise(programs)}
    source = compiled.record.source
    place.runs.append(sum(r.executions for r in counters.programs() if r.source == source))
    is_settling = place.runs[-1] - place.runs[0] >= 2 * (_NUM_ALIKE - 1)
    if place.has_warned or len(programs) < _NUM_ALIKE or len(ways) > 1 or is_settling:
        return
    place.has_warned = True
    report = explain(compiled, programs[:-1])
    advice = dict.fromkeys(change.advice for change in report.changes if change.advice)
    text = "\n".join([str(report), *(f"  {line}" for line in advice if line not in str(report))])
    warnings.warn(
        f"{_NUM_ALIKE} programs in a row were compiled for {source}, each of which "
        "differs from the one before in the same way, so almost every step waits for the compiler. "
        f"The newest: {text}\n"
        "  spmd.config.warn_of_recompiles = False leaves this warning out; "
        "SPMD_EXPLAIN_RECOMPILES=0 prints a report on each compilation.",
        RuntimeWarning,
        stacklevel=source_lines.user_frame()[2],
    )


def _way(old: Key, new: Key) -> tuple[object, ...]:
    """In which way two keys of equal operations differ; see `observe`."""
    inputs = tuple(i for i, (a, b) in enumerate(zip(old.leaves, new.leaves)) if a[0] is not b[0])
    fields = [
        name
        for name in Key._fields
        if name not in ("structure", "leaves", "outputs")
        and getattr(old, name) != getattr(new, name)
    ]
    if [place for _, place in old.leaves] != [place for _, place in new.leaves]:
        fields.append("leaves")
    if [o[::2] for o in old.outputs] != [o[::2] for o in new.outputs]:
        fields.append("outputs")
    first = () if inputs else _first_other_arguments(old, new)
    return inputs, first, tuple(fields)


def _first_other_arguments(old: Key, new: Key) -> tuple[object, ...]:
    """The position of the first operation with other arguments, and the names of these."""
    for i, (a, b) in enumerate(zip(old.structure, new.structure)):
        if a is b or a == b:
            continue
        if isinstance(a, int) or isinstance(b, int):
            return (i,)
        x, y = a.arguments or {}, b.arguments or {}
        names = (name for name in dict.fromkeys([*x, *y]) if x.get(name) != y.get(name))
        return (i, *names)
    return ()


compile_cache.observers.append(observe)
