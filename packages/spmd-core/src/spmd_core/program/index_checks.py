"""Raises the errors of `config.check_indices` at the next read, as a program cannot raise.

A program with index checks returns the number of the first check that failed as its token. Each
device checks the indices that it holds, so no index is moved; if a program runs on several
processes, they agree by an all-reduce of one number. The next read on the host reads the tokens of
all programs up to the one that computed the value, which have ended by then.

`benchmarks/results/index_checks.md` has the cost. Indices inside of jax functions (`call_jax`) are
not checked.
"""

import atexit
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmd_core.errors import IndexRangeError
from spmd_core.graph import recorders
from spmd_core.graph.recorders import Recorder
from spmd_core.graph.values import Value
from spmd_core.program.index_flag import NONE_FAILED, Check
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.runtime.devices import is_started, num_processes


@dataclass(frozen=True)
class _Started:
    """A program with checks that was started.

    Attributes:
        number: how many programs with checks were started up to this one.
        token: the program's token.
        name: its name.
        graph: its recorded graph.
        checks: its checks.
        lines: the user's source line of each check, `file:line`.
        recorder: the thread that started the program.
    """

    number: int
    token: Any  # jax's type lacks `is_ready`
    name: str
    graph: RecordedGraph
    checks: Sequence[Check]
    lines: Sequence[str]
    recorder: Recorder


# The programs whose tokens no read has looked at yet, and the number of all programs with checks.
# Guarded by: `_lock`. Cleared by: forget().
_unread: deque[_Started] = deque()
# Guarded by: `_lock`. Cleared by: never: only the order counts.
_num_started = 0
_lock = threading.Lock()
# Beyond this number of programs without a read, the oldest is checked and dropped.
_MAX_UNREAD = 256


def add(
    token: jax.Array, name: str, graph: RecordedGraph, checks: Sequence[Check], lines: Sequence[str]
) -> None:
    """Keeps a started program's token for the next read."""
    global _num_started
    with _lock:
        _num_started += 1
        recorder = recorders.current()
        _unread.append(_Started(_num_started, token, name, graph, checks, lines, recorder))
        oldest = _unread[0] if len(_unread) > _MAX_UNREAD else None
        if oldest is not None:
            # A cut must not raise for another program, so the earliest failure is kept.
            del _unread[int(_failed(oldest.token) is not None)]


def stamp() -> tuple[int, Recorder] | None:
    """`Value.checked` for the results of the program that this thread has just started.

    That is the number of programs with checks that were started so far, and this thread; None if
    there were none.
    """
    return (_num_started, recorders.current()) if _num_started else None


def note_reads(leaves: Sequence[Value]) -> None:
    """Records that programs of this thread read these values, maybe computed by other threads.

    A read in this thread then also raises the errors of the other threads' programs.
    """
    if not _num_started or recorders.is_alone():
        return
    for leaf in leaves:
        note_read(getattr(leaf, "checked", None))


def note_read(checked: tuple[int, Recorder] | None) -> None:
    """Records that a program of this thread reads a value with this `Value.checked`."""
    if checked is None:
        return
    _, maker = checked
    own = recorders.current()
    if maker is not own and maker not in own.sources:
        own.sources.update(maker.sources)
        own.sources.add(maker)


def forget() -> None:
    """Drops the tokens of programs that were not checked yet."""
    _unread.clear()


def raise_if_found(
    number: int | None = None, maker: Recorder | None = None, *, of_all_threads: bool = False
) -> None:
    """Raises for the first operation of the earliest program with an index outside its dim.

    Programs of other threads raise in those threads, unless this thread has read their results.

    Args:
        number: waits for this many programs with checks. Later programs that have ended are checked
            too. None waits for all programs, including those of threads that have ended.
        maker: the thread whose program computed the value that is read.
        of_all_threads: whether to check the programs of all threads.

    Raises:
        IndexRangeError: an index was outside its dim. The next call checks later programs.
    """
    if not _unread:
        return
    threads = {t for r in (recorders.current(), maker) if r is not None for t in (r, *r.sources)}
    ended: list[_Started] = []
    left: list[_Started] = []
    with _lock:
        while _unread:
            program = _unread.popleft()
            recorder = program.recorder
            is_told_here = of_all_threads or recorder in threads
            if not (is_told_here or (number is None and recorder.has_ended)):
                left.append(program)
                continue
            if number is None or program.number <= number or program.token.is_ready():
                ended.append(program)
            else:
                left.append(program)
                break
        _unread.extendleft(reversed(left))
    try:
        try:
            # All transfers start before the first one is awaited.
            tokens = jax.device_get([program.token for program in ended])
        except jax.errors.JaxRuntimeError:
            # A program failed, which a read of its results will raise. Read tokens one by one.
            tokens = [program.token for program in ended]
        checks = [_failed(token) for token in tokens]
    except BaseException:  # an interruption: all checks are kept
        with _lock:
            _unread.extendleft(reversed(ended))
        raise
    for i, (program, check) in enumerate(zip(ended, checks, strict=True)):
        if check is not None:
            with _lock:
                later = sorted([*ended[i + 1 :], *_unread], key=lambda started: started.number)
                _unread.clear()
                _unread.extend(later)
            raise IndexRangeError(_describe(program, check))


def _failed(token: jax.Array) -> int | None:
    """The number of the check that failed, or None. Waits for the token.

    None also for a program that has failed itself, which a read of its results will raise.
    """
    try:
        number = int(np.asarray(token).min())
    except jax.errors.JaxRuntimeError:
        return None
    return None if number == NONE_FAILED else number


def _describe(program: _Started, number: int) -> str:
    check = program.checks[number]
    node = program.graph.nodes[check.position]
    results = ", ".join(repr(spec) for spec in node.entry.outs)
    where = program.lines[number] if node.origin is None else node.origin
    inside = f"{check.inside} in " if check.inside else ""
    return (
        "an index must lie inside the dim that it indexes; "
        f"{inside}{node.entry.name} -> {results}, recorded at {where}, takes {check.accepted} and "
        f"got another index. It is operation {check.position} of {program.name}, which has run: "
        "its reads took the nearest element and its writes were dropped, so what was computed from "
        "it since is wrong, and so are the tensors that were updated with that. Correct the index, "
        "and load such tensors anew or from a checkpoint. spmd.config.check_indices = False leaves "
        "indices unchecked."
    )


def _warn_at_exit() -> None:
    """At the end of the process, warns of failed checks that no read has raised.

    With several processes, it does not wait for the devices, as one process may have failed. A
    process that used no device has none started here.
    """
    if not is_started():
        return
    try:
        raise_if_found(None if num_processes() == 1 else 0, of_all_threads=True)
    except IndexRangeError as error:
        warnings.warn(
            f"the process ends unaware of an error: {error}", RuntimeWarning, stacklevel=1
        )


atexit.register(_warn_at_exit)
