"""Counters of compiles, executions, moved bytes and host fallbacks; records of programs."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from spmd_core.arguments import checked, require_int, require_kind

# These are reported even while they are 0.
_KNOWN = (
    "compiles",
    "cache_hits",
    "cuts",
    "automatic_cuts",
    "cuts_run_apart",
    "steps",
    "executions",
    "host_fallbacks",
    "host_reads",
    "donated_bytes",
    "uploaded_bytes",
    "resharded_bytes",
)
# Guarded by: nothing; threads that count at the same time may lose a count.
# Cleared by: metrics.reset().
_counters: Counter[str] = Counter()
# By overload and line.
# Guarded by: nothing, as above. Cleared by: metrics.reset().
_fallbacks: Counter[tuple[str, str]] = Counter()
# Records of the newest programs, at most `_MAX_PROGRAM_RECORDS`.
# Guarded by: the graph lock. Cleared by: metrics.reset().
_programs: list["ProgramRecord"] = []
_MAX_PROGRAM_RECORDS = 512
# Splits a thread's time by activity (`metrics.time_first_step`).
# Guarded by: the GIL; a race may start two, of which one then counts nothing.
# Cleared by: the end of the block.
_clock: "Clock | None" = None


@dataclass
class ProgramRecord:
    """One compiled program.

    Bytes are per device, from the compiler's analysis; flops are the whole program's.
    """

    name: str
    num_ops: int
    num_leaves: int
    num_outputs: int
    num_devices: int
    trace_s: float = 0.0  # building StableHLO
    compile_s: float = 0.0  # XLA, or reading the persistent cache
    flops: float = 0.0
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0  # output bytes that live in a donated argument's buffer
    temp_bytes: int = 0
    peak_bytes: int = 0  # without the code
    code_bytes: int = 0  # of machine code; 0 where the compiler does not say
    executions: int = 0
    donated: tuple[int, ...] = field(default_factory=tuple)  # positions of the donated arguments
    source: str = ""  # `file:line` of the user's call that needed the program: `sync()` or a read
    # The loops that `config.fold_layers` has made: iterations and operations of an iteration.
    loops: tuple[tuple[int, int], ...] = ()
    unfolded: str = ""  # why it has made none, if it was on
    folding: str = ""  # what "auto" of that setting has chosen, and why


@dataclass(frozen=True)
class HostFallback:
    """An operation that ran on the host: its overload, the user's `file:line`, and how often."""

    op: str
    source: str
    count: int


def count(name: str, amount: int = 1) -> None:
    """Adds to a counter."""
    if type(amount) is not int or amount < 0:
        amount = require_int("amount", amount, least=0)
    if type(name) is not str:
        require_kind("name", name, str, write="the counter's name, such as 'compiles'")
    _counters[name] += amount


def count_fallback(overload: str, source: str) -> bool:
    """Counts an operation that ran on the host; True for the first run of this operation.

    Raises:
        TypeError: an argument is no text.
    """
    require_kind("overload", overload, str, write="its name, such as 'aten::nonzero'")
    require_kind("source", source, str, write="the line, such as 'train.py:12'")
    first = all(op != overload for op, _ in _fallbacks)
    _fallbacks[overload, source] += 1
    _counters["host_fallbacks"] += 1
    return first


def record_program(record: ProgramRecord) -> None:
    """Counts a compiled program and keeps its record. TypeError for another object."""
    require_kind("record", record, ProgramRecord, write="a ProgramRecord")
    count("compiles")
    _programs.append(record)
    del _programs[:-_MAX_PROGRAM_RECORDS]


def counters() -> dict[str, int]:
    """All counters by name.

    `compiles`, `cache_hits`, `executions`, `cuts`, `steps`, `host_fallbacks`, `host_reads`,
    `donated_bytes`, `uploaded_bytes`, `resharded_bytes`, and others.
    """
    return {name: _counters[name] for name in sorted({*_KNOWN, *_counters})}


def counter(name: str) -> int:
    """One counter's value; 0 if nothing was counted."""
    require_kind("name", name, str, write="the counter's name, such as 'compiles'")
    return _counters[name]


def host_fallbacks() -> tuple[HostFallback, ...]:
    """Operations that ran on the CPU, as they have no lowering and no decomposition.

    One entry for each overload and source line, the most frequent first.
    """
    return tuple(HostFallback(op, source, n) for (op, source), n in _fallbacks.most_common())


@checked(since=0)
def programs(*, since: int = 0) -> tuple[ProgramRecord, ...]:
    """The newest 512 compiled programs, oldest first.

    With `since`, only those compiled after `counter("compiles")` had that value.
    """
    new = counter("compiles") - since
    return tuple(_programs[-new:]) if new > 0 else ()


class Activity(StrEnum):
    """What a thread spends its time on."""

    RECORDING = "recording"  # and everything else that Python does
    PLANNING = "planning"  # of a cut, without the following three
    TRACING = "tracing"
    COMPILING = "compiling"
    WAITING = "waiting"  # for the devices


class Clock:
    """Seconds of the thread that made it, by activity; those of a nested one count for it alone."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.seconds = dict.fromkeys(Activity, 0.0)
        self._activity, self._since = Activity.RECORDING, time.perf_counter()

    def turn_to(self, activity: Activity) -> Activity:
        """Ends the present activity, begins another one, and returns the one that ended."""
        now = time.perf_counter()
        self.seconds[self._activity] += now - self._since
        ended, self._activity, self._since = self._activity, activity, now
        return ended


@contextmanager
def clock() -> Iterator[Clock]:
    """Inside, each moment of this thread is counted for an activity.

    Raises:
        RuntimeError: a clock runs already.
    """
    global _clock
    if _clock is not None:
        raise RuntimeError(
            "one block is timed at a time; got a second one inside of it, or in another thread. "
            "End the first block before."
        )
    _clock = made = Clock()
    try:
        yield made
    finally:
        made.turn_to(Activity.RECORDING)
        _clock = None


def timed(activity: Activity) -> AbstractContextManager[None]:
    """Counts the block for this activity while a `clock` runs in this thread; else does nothing."""
    running = _clock
    if running is None or running.thread != threading.get_ident():
        return _UNTIMED
    return _turned(running, activity)


@contextmanager
def _turned(running: Clock, activity: Activity) -> Iterator[None]:
    outer = running.turn_to(activity)
    try:
        yield
    finally:
        running.turn_to(outer)


_UNTIMED = nullcontext()


def reset() -> None:
    """Sets every counter to zero and forgets the program records; compiled programs stay cached."""
    _counters.clear()
    _fallbacks.clear()
    _programs.clear()


def report() -> str:
    """The counters, host fallbacks and programs as a readable table."""
    rows: list[tuple[str, Any]] = [(name, value) for name, value in counters().items()]
    rows += [(f"host fallback {f.op} at {f.source}", f.count) for f in host_fallbacks()]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:>14,}" for name, value in rows]
    for p in _programs:
        lines.append(
            f"{p.name} for {p.source}: {p.num_ops} ops on {p.num_devices} devices, "
            f"traced in {p.trace_s:.2f} s, compiled in {p.compile_s:.2f} s, "
            f"ran {p.executions} times, peak {p.peak_bytes / 1e6:.1f} MB per device"
        )
    return "\n".join(lines)
