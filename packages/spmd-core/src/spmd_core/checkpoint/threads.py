"""Threads that are there before they are needed, and that a program's end does not wait for.

`concurrent.futures` joins its threads before anything that is registered for the end of the program
runs; then nobody could tell a save that goes on slowly to hurry. And some releases of Python start
no thread any more by then.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

NICE = 10
"""The priority of threads that give way: beside one of the program, each gets a tenth of a core."""

_Call = tuple[Callable[[], Any], Future[Any]]


class Threads:
    """Some threads, which take calls in their order. They end when nobody has this any more.

    Args:
        count: how many.
        name: of each, before its number.
        gives_way: whether they run where nothing else does: Linux has priorities of threads.
    """

    def __init__(self, count: int, name: str, *, gives_way: bool = False) -> None:
        self._count, self._name, self._gives_way = count, name, gives_way
        self._calls = SimpleQueue[_Call | None]()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads, unless they are there; as the first call does."""
        if self._threads:
            return
        self._threads = [
            threading.Thread(
                target=_run,
                args=(self._calls, self._gives_way),
                name=f"{self._name}-{number}",
                daemon=True,
            )
            for number in range(self._count)
        ]
        for thread in self._threads:
            thread.start()
        # Not at the program's end: the last save goes on then.
        weakref.finalize(self, _end, self._calls, self._count).atexit = False

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Has a thread call this; the future gets what it returns or raises. Does not wait."""
        self.start()
        future = Future[Any]()
        self._calls.put((call, future))
        return future

    def all(
        self, calls: Iterable[Callable[[], Any]], most: int | None = None, *, here: bool = False
    ) -> list[Any]:
        """Has threads call these, in their order; waits, and returns what each returned.

        Args:
            calls: of which none begins when one has failed.
            most: so many of the threads; None: all.
            here: whether this thread takes calls, too.

        Raises:
            BaseException: the first that one of them raised, when none goes on.
        """
        todo = [*calls]
        found: list[Any] = [None] * len(todo)
        errors: list[BaseException] = []
        numbers = iter(range(len(todo)))  # each is taken once: by the GIL

        def work() -> None:
            for number in numbers:
                if errors:
                    return
                try:
                    found[number] = todo[number]()
                except BaseException as error:
                    errors.append(error)

        count = min(self._count if most is None else most, len(todo) - here)
        working = [self.submit(work) for _ in range(count)]
        if here:
            work()
        for each in working:
            each.result()
        if errors:
            raise errors[0]
        return found

    def close(self) -> None:
        """Waits for all that was submitted, and ends the threads; a later call starts others."""
        threads, self._threads = self._threads, []
        _end(self._calls, len(threads))
        for thread in threads:
            thread.join()
        self._calls = SimpleQueue[_Call | None]()


def _end(calls: SimpleQueue[_Call | None], count: int) -> None:
    for _ in range(count):
        calls.put(None)


def _run(calls: SimpleQueue[_Call | None], gives_way: bool) -> None:
    if gives_way:
        with suppress(OSError, AttributeError):  # the system forbids it, or has none
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    while (item := calls.get()) is not None:
        call, future = item
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del item, call, future  # nothing is held until the next one comes
