"""Compiles the programs that cuts lack while other threads record, run and compile.

The graph lock is released while XLA compiles. So the thread that began has to plan its cut again:
others may have computed, written or marked its tensors meanwhile.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from spmd_core.graph.recorders import lock
from spmd_core.program import compile_cache
from spmd_core.program.compilation import Making, compile_lowered, completed
from spmd_core.program.compile_cache import Key
from spmd_core.program.growing_program import Bounded
from spmd_core.program.lower import Lowered
from spmd_core.program.planned_program import PlannedProgram
from spmd_core.program.planning import CutPlan
from spmd_core.program.program import Program, new_record
from spmd_core.runtime import interrupts

# Set once the program is in the cache, or cannot be compiled.
# Guarded by: the graph lock. Cleared by: the end of each compilation.
_in_work: dict[Key, threading.Event] = {}


Result = TypeVar("Result")


# A program, and, if it is one for growing sizes, that with the size of the cut.
Found: TypeAlias = tuple[Program | PlannedProgram, Bounded | None]
# What was compiled for cuts, by the keys of their plans.
Ready: TypeAlias = dict[Key, Found]


@dataclass(frozen=True)
class AbsentProgram:
    """A program that is not in the cache.

    Attributes:
        planned: the plan of the cut that is to run it.
        bounded: of a program for growing sizes: that with the size of the cut.
    """

    planned: CutPlan
    bounded: Bounded | None

    @property
    def key(self) -> Key:
        """The program's key."""
        return self.planned.key if self.bounded is None else self.bounded.key

    def making(self) -> Making:
        """Makes the program, and puts it into the cache."""
        planned, bounded = self.planned, self.bounded
        if bounded is None:
            return compile_cache.making(planned.key, planned.graph, planned.name)
        name = bounded.name(planned.name)
        return compile_cache.making(bounded.key, lambda: bounded.graph, name)


def compile_all(absent: Sequence[AbsentProgram]) -> Ready:
    """Compiles programs, several at a time, or waits for another thread that compiles one of them.

    Call it under the graph lock, which is released meanwhile. A thread that entered it more than
    once must not call this: it would keep the lock from the thread that it waits for.

    Returns:
        Those that this thread has compiled; none if another thread was about to.

    Raises:
        DeviceMemoryError, ProgramError: the first that could not be compiled.
    """
    mine = {one.key: one for one in absent if one.key not in _in_work}
    if not mine:
        event = _in_work[absent[0].key]
        _released(lambda: _wait(event))
        return {}
    done = threading.Event()
    _in_work.update(dict.fromkeys(mine, done))
    try:
        makings = [one.making() for one in mine.values()]
        if len(makings) > 1:
            programs = _at_once(makings)
        else:
            programs = [completed(makings[0], _compile_released)]
        return {
            one.planned.key: (program, one.bounded) for one, program in zip(mine.values(), programs)
        }
    finally:
        for key in mine:
            del _in_work[key]
        done.set()


def _at_once(makings: Sequence[Making]) -> list[Program]:
    """The programs, which are lowered here, one by one, and compiled by threads."""
    with ExitStack() as stack:
        threads = ThreadPoolExecutor(min(len(makings), os.cpu_count() or 1))
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        begun = []
        for making in makings:
            lowered = next(stack.enter_context(closing(making)))
            record = new_record(lowered.graph, lowered.name)  # with the line of this thread
            begun.append((making, lowered, threads.submit(compile_lowered, lowered, record)))
        return [
            completed(making, _Begun(lowered, future), lowered) for making, lowered, future in begun
        ]


@dataclass(frozen=True)
class _Begun:
    """A compiler that has begun to compile the first form of a program."""

    first: Lowered
    future: Future[Program]

    def __call__(self, lowered: Lowered) -> Program:
        if lowered is not self.first:  # the partitioner made that one invalid
            return _compile_released(lowered)
        return _released(lambda: _result(self.future))


def _compile_released(lowered: Lowered) -> Program:
    return _released(lambda: compile_lowered(lowered))


def _released(function: Callable[[], Result]) -> Result:
    """What a function returns that runs without the graph lock."""
    lock.release()
    try:
        return function()
    finally:
        lock.acquire()


@interrupts.waits
def _wait(event: threading.Event) -> None:
    event.wait()


@interrupts.waits
def _result(future: Future[Program]) -> Program:
    return future.result()
