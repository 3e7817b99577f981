"""The pending graph of each thread, and the lock under which all threads record.

What a thread records is computed by its own cuts, so that the step of one thread does not cut that
of another one. What a thread that has ended left pending is computed by the next cut of any thread.
So is what autograd's own threads record; but a thread that records has autograd run its backward
passes in itself.

A cut computes what its thread recorded, what threads that have ended left, and what these values
need of others, whose storages it computes, too. A buffer that another thread's pending graph reads
is not donated (`program.planning`). Errors of programs and of indices are raised in the thread that
started the program, and in those that read its results. The lock is held while an operation is
recorded, and from the plan of a cut to the start of its program. While XLA compiles the program,
other threads record, run theirs and compile: the cut is planned once more after it
(`program.absent_programs`). Threads share compiled programs, and wait for each other's compilation
of the same one.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Recording and cutting exclude each other: a cut must not see half of an operation. Reentrant, as a
# host read inside an operation cuts.
lock = threading.RLock()
_condition = threading.Condition(lock)


def is_held() -> bool:
    """Whether this thread holds the lock."""
    try:
        _condition.notify(0)  # nobody waits; it raises in a thread without the lock
    except RuntimeError:
        return False
    return True


class Recorder:
    """The pending graph of one thread.

    Attributes:
        storages: those whose pending value this thread recorded, by weak reference. Some of them
            may be computed by now, or have been written by another thread.
        failed: those that were left pending as their program failed, by weak reference.
        has_ended: whether the thread has ended, or is one of autograd's own: then any thread's
            cut computes what it left.
        num_cuts: how often the thread has cut.
        watch: the state of `dispatch.automatic_cut` for a loop that does not cut; else None.
        sources: the threads whose results this thread's programs have read.
        inside: the function whose operations are recorded for a loop or a branch, such as "the
            function of a scan"; None for a thread's own graph. Nothing cuts there.
        require_own: inside of such a function, raises ControlFlowError for a tensor that it has not
            made, as Python is about to give that another storage; else None.
    """

    __slots__ = (
        "__weakref__",
        "failed",
        "has_ended",
        "inside",
        "num_cuts",
        "require_own",
        "sources",
        "storages",
        "watch",
    )

    def __init__(
        self, inside: str | None = None, require_own: Callable[[Any], None] | None = None
    ) -> None:
        self.inside, self.require_own = inside, require_own
        self.storages: list[weakref.ref[Any]] = []
        self.failed: weakref.WeakSet[Any] = weakref.WeakSet()
        self.has_ended = False
        self.num_cuts = 0
        self.watch: Any = None
        self.sources: weakref.WeakSet[Recorder] = weakref.WeakSet()


class _UntilEnd:
    """Held by a thread; notes the end of the thread when it is deleted."""

    __slots__ = ("recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __del__(self) -> None:
        self.recorder.has_ended = True


# The recorder of this thread, and what notices that the thread has ended.
# Guarded by: thread-local storage. Cleared by: the end of the thread.
this_thread = threading.local()
# For autograd's own threads, as torch does not say whose backward they run.
# Guarded by: the graph lock. Cleared by: each cut.
_unowned = Recorder()
_unowned.has_ended = True
# Those of all threads.
# Guarded by: the graph lock.
# Cleared by: each cut: a thread that has ended, and has nothing pending, goes.
_recorders = [_unowned]
# How many recorders were made.
# Guarded by: the graph lock. Cleared by: never: only the number counts.
_num_made = 0


def current() -> Recorder:
    """The pending graph that this thread records into."""
    try:
        found: Recorder = this_thread.recorder
    except AttributeError:
        return _new()
    return found


def _new() -> Recorder:
    global _num_made
    if torch._C._current_graph_task_id() != -1 and torch._C._is_multithreading_enabled():
        return _unowned
    # Backward passes run in this thread. Autograd's own would record into another graph, and would
    # hold the results of `torch.autograd.grad` for some milliseconds longer than the caller: a cut
    # in that time would compute all of them, in a program of its own.
    torch.autograd.set_multithreading_enabled(False)
    with lock:
        _recorders[:] = [
            r for r in _recorders if not r.has_ended or r.storages or r.failed or r is _unowned
        ]
        recorder = Recorder()
        _recorders.append(recorder)
        _num_made += 1
    this_thread.recorder, this_thread.until_end = recorder, _UntilEnd(recorder)
    return recorder


@contextmanager
def recording_inside(what: str, require_own: Callable[[Any], None]) -> Iterator[None]:
    """Inside, this thread records a function for a loop or a branch, into a graph of its own.

    The graph is dropped at the end: what it has is part of the operation that runs the function.

    Args:
        what: the function, in errors.
        require_own: see `Recorder`.
    """
    around = current()
    this_thread.recorder = recorder = Recorder(what, require_own)
    try:
        yield
    finally:
        this_thread.recorder = around
        # Storages refer to it, and this to storages: they would live until garbage is collected.
        recorder.require_own = None


def is_alone() -> bool:
    """Whether no other thread than this one has recorded so far."""
    return _num_made < 2


def cut_here() -> list[Recorder]:
    """The pending graphs that this thread's cuts compute, its own first; call it under `lock`."""
    own = current()
    return [own, *(r for r in _recorders if r.has_ended and r is not own)]


def elsewhere() -> list[Recorder]:
    """The pending graphs that other threads' cuts compute; call it under `lock`."""
    own = current()
    return [r for r in _recorders if not r.has_ended and r is not own]
