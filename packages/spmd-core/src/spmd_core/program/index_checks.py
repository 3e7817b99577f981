"""`config.check_indices`: an index outside its dim, which a program cannot raise, is raised later.

A program with such checks returns, as its token, the number of the first one that failed. Each
device looks at the indices that it has, so that none is moved; where a program runs on several
processes, they agree by one reduction of a number. The next read on the host reads the tokens of
the programs up to the one that made what it reads, which have ended by then.

`benchmarks/results/index_checks.md` has what it costs. Functions of jax's (`call_jax`) are opaque
to it.
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
from spmd_core.runtime.devices import num_processes


@dataclass(frozen=True)
class _Started:
    """A program that was started.

    Attributes:
        number: how many programs with checks were started up to it.
        token: its token.
        name: its name.
        graph: what it computes.
        checks: its checks.
        lines: the user's line of each, `file:line`.
        recorder: the thread that started it.
    """

    number: int
    token: Any  # jax's type lacks `is_ready`
    name: str
    graph: RecordedGraph
    checks: Sequence[Check]
    lines: Sequence[str]
    recorder: Recorder


# The programs whose tokens no read has checked yet, and the number of all with checks.
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
            # A cut must not raise for another program, so the earliest that found something stays.
            del _unread[int(_failed(oldest.token) is not None)]


def stamp() -> tuple[int, Recorder] | None:
    """What `Value.checked` is of the results of the program that this thread has just started.

    That is how many programs with checks were started so far, and by which thread; None if none.
    """
    return (_num_started, recorders.current()) if _num_started else None


def note_reads(leaves: Sequence[Value]) -> None:
    """Notes that this thread's programs read these values, maybe of other threads' programs.

    A read in this thread then raises what was found in theirs.
    """
    if not _num_started or recorders.is_alone():
        return
    own = recorders.current()
    for leaf in leaves:
        _, maker = getattr(leaf, "checked", (0, own))
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

    Programs of other threads are left to these, unless this thread has read their results.

    Args:
        number: how many programs with checks must have ended, for which this waits. Of later ones,
            those that have ended are checked too. None waits for all, also for those of threads
            that have ended.
        maker: the thread whose program made what is read.
        of_all_threads: whether to look at the programs of all threads.

    Raises:
        IndexRangeError: there is one. Later programs are checked by the next call.
    """
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
            # A program failed. Whoever reads its results is told; the others are read one by one.
            tokens = [program.token for program in ended]
        checks = [_failed(token) for token in tokens]
    except BaseException:  # an interruption, which loses no check
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
    """The number of the check that failed, from the token, for which it waits.

    None where the program itself has failed, of which its results tell.
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
    """Warns of what no read has told, at the end of the process.

    Several processes do not wait for their devices then, as one of them may have failed.
    """
    try:
        raise_if_found(None if num_processes() == 1 else 0, of_all_threads=True)
    except IndexRangeError as error:
        warnings.warn(
            f"the process ends unaware of an error: {error}", RuntimeWarning, stacklevel=1
        )


atexit.register(_warn_at_exit)
