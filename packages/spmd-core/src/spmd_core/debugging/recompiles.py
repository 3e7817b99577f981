"""Why a program was compiled: the fields of its key that differ from the most similar program's."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spmd_core import counters
from spmd_core.config import config
from spmd_core.debugging.graph_difference import Change, Difference
from spmd_core.errors import SpmdError
from spmd_core.program import compile_cache, growing_sizes
from spmd_core.program.compile_cache import Compiled, Key

_MAX_CHANGES = 12
_STATE_MAKERS = ("aten::zeros", "aten::empty", "aten::full", "aten::ones", "aten::_to_copy")


@dataclass(frozen=True)
class Recompile:
    """Why a program was compiled; prints as a report.

    Attributes:
        program: the program's name.
        source: `file:line` of the user's call that caused the compilation: a `sync()`, or a read.
        seconds: duration of the compilation, tracing included.
        nearest: the name of the most similar earlier program; None if there is none.
        nearest_source: the line that caused the compilation of that program.
        ingredients: the fields of `compile_cache.Key` in which the two differ.
        changes: the causes, without differences that are their consequences.
        note: a summary, if the changes are a common case.
        loops: what became of layers that the program repeats; empty if `config.fold_layers` is
            False.
    """

    program: str
    source: str
    seconds: float
    nearest: str | None
    nearest_source: str
    ingredients: tuple[str, ...]
    changes: tuple[Change, ...]
    note: str
    loops: str = ""

    def __str__(self) -> str:
        head = f"{self.program} was compiled in {self.seconds:.2f} s for {self.source}"
        if self.nearest is None:
            return f"{head}. {self.note} {self.loops}".rstrip()
        lines = [
            f"{head}; the nearest program before it is {self.nearest}, "
            f"for {self.nearest_source}. What changed:"
        ]
        for change in self.changes[:_MAX_CHANGES]:
            lines.append(f"  - {change.text}")
        if len(self.changes) > _MAX_CHANGES:
            lines.append(f"  - and {len(self.changes) - _MAX_CHANGES} more")
        advice = dict.fromkeys(change.advice for change in self.changes if change.advice)
        lines += [f"  {text}" for text in (self.note, *([] if self.note else advice)) if text]
        lines += [f"  {self.loops}"] if self.loops else []
        return "\n".join(lines)

    __repr__ = __str__


def explain_recompile(last: int = 1) -> Recompile:
    """Why the newest program was compiled; with `last=2` the one before it, and so on.

    Compares the program's key with those of all earlier programs that are still known: those in
    memory, and the newest 64. Does not wait for the device.

    Raises:
        ValueError: `last` is not a positive int.
        SpmdError: fewer than `last` compiled programs are known.

    Example:
        >>> import torch, spmd_core as spmd
        >>> def batch(size):
        ...     return torch.ones(size, 8, device="cpu").to("xla").sum().item()
        >>> batch(16), batch(17)
        (128.0, 136.0)
        >>> explain_recompile().changes[0].text
        'leaf 0 (data, read by operation 0, aten::sum): float32[16, 8] -> float32[17, 8]'
    """
    if not isinstance(last, int) or isinstance(last, bool) or last < 1:
        raise ValueError(
            "explain_recompile counts back from the newest program, "
            f"which is 1; got {last!r}. Pass 1 or more."
        )
    known = tuple(compile_cache.history)
    if last > len(known):
        raise SpmdError(
            f"explain_recompile knows {len(known)} compiled programs, "
            f"of the newest {compile_cache.history.maxlen} in this process; got last={last}. "
            "Call it after the sync() or the read that caused the compilation."
        )
    return explain(known[-last], _earlier_programs(known[: len(known) - last], known))


def _earlier_programs(earlier: Sequence[Compiled], known: Sequence[Compiled]) -> list[Compiled]:
    """Earlier programs: those only in memory, which are older, then those of the history."""
    recent = {compiled.key for compiled in known}
    old = [
        Compiled(k, p.graph, p.record)
        for k, p in zip(compile_cache.keys(), compile_cache.programs())
        if k not in recent
    ]
    return [*old, *earlier]


def explain(new: Compiled, before: Sequence[Compiled]) -> Recompile:
    """The report on one compilation."""
    return replace(_explained(new, before), loops=_loops(new))


def _loops(new: Compiled) -> str:
    """What `config.fold_layers` has made of the program."""
    chosen = new.record.folding
    if not new.key.fold_layers:
        return chosen
    found = [f"{length} x {num_ops}" for length, num_ops in new.record.loops]
    made = f"made loops of {', '.join(found)} operations." if found else ""
    made = made or f"made no loop: {new.record.unfolded}"
    return " ".join(text for text in (chosen, f"spmd.config.fold_layers {made}") if text)


def _explained(new: Compiled, before: Sequence[Compiled]) -> Recompile:
    r = new.record
    seconds = r.trace_s + r.compile_s
    old = min(reversed(before), key=lambda other: _distance(new.key, other.key), default=None)
    if old is None or (_names(new.key) & _names(old.key)).total() * 2 < len(new.graph.nodes):
        return Recompile(
            r.name,
            r.source,
            seconds,
            None,
            "",
            (),
            (),
            "No program before it had operations like these: it is the first of its kind.",
        )
    if old.key == new.key:
        note = (
            "The same program was compiled before and dropped from memory since, "
            f"as more than {config.max_programs} were in use. "
            "Raise spmd.config.max_programs, or find out why there are so many."
        )
        return Recompile(r.name, r.source, seconds, None, "", (), (), note)
    difference = Difference(old, new)
    ingredients = compile_cache.changed(new.key, old.key)
    # A difference is always named, even if `Difference` has no words for it.
    changes = difference.changes or tuple(
        Change(name, f"{name} of the key differs from the nearest program's")
        for name in ingredients
    )
    return Recompile(
        r.name,
        r.source,
        seconds,
        old.record.name,
        old.record.source,
        ingredients,
        changes,
        _note(old, new, difference),
    )


def _names(key: Key) -> Counter[str]:
    return Counter(part.name for part in key.structure if not isinstance(part, int))


def _num_other_operations(a: Key, b: Key) -> int:
    ours, theirs = _names(a), _names(b)
    return max((ours - theirs).total(), (theirs - ours).total())


def _distance(a: Key, b: Key) -> tuple[int, int, int]:
    """Operations with other names, then differing fields of the key, then differing elements."""
    size = 0
    for name in Key._fields:
        ours, theirs = getattr(a, name), getattr(b, name)
        if isinstance(ours, tuple):
            size += abs(len(ours) - len(theirs)) + sum(x != y for x, y in zip(ours, theirs))
    return _num_other_operations(a, b), len(compile_cache.changed(a, b)), size


def _note(old: Compiled, new: Compiled, difference: Difference) -> str:
    """The text for the common differences between a first step and the second; else empty."""
    if new.key.bound is not None:
        return (
            f"The program holds for a growing size up to {new.key.bound}, "
            "and does not compile again until then."
        )
    refusal = growing_sizes.refusal_of(new.key)
    if refusal is not None:
        return f"Each size has a program of its own: {refusal}."
    if old.record.executions > 1:
        return ""
    made = [name for name in difference.operations_gone if name.startswith(_STATE_MAKERS)]
    if made and not difference.operations_new:
        return (
            "This is normal once: "
            "the first step creates state, such as the optimizer's, and the next ones reuse it."
        )
    moved = {change.ingredient for change in difference.changes}
    if (
        moved
        and moved <= {"leaves", "donated"}
        and all(change.is_settling for change in difference.changes)
    ):
        return (
            "This is normal once: from the second step on, "
            "its inputs have the shardings of the first one's results, and can be donated."
        )
    return ""


def _print_report(compiled: Compiled) -> None:
    after = config.explain_recompiles_after
    if after is not None and counters.counter("compiles") > after:
        known = tuple(compile_cache.history)
        print(explain(compiled, _earlier_programs(known[:-1], known)), file=sys.stderr)


compile_cache.observers.append(_print_report)
