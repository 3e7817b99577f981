"""Limits the number of programs in flight, and finds which of them failed."""

import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from spmd_core import counters
from spmd_core.config import config
from spmd_core.errors import ProgramError
from spmd_core.runtime import interrupts, watch
from spmd_core.runtime.abstract import AbstractArray
from spmd_core.runtime.devices import platform

# The prefix of XLA's CPU errors for a program of which an operand, or a part, has failed.
_PASSED_ON = "Error dispatching computation: "
# jax 0.10.0 also says of which event an error is.
_PREFIXES = re.compile(rf"^(?:[A-Z_]+: |Buffer Definition Event: |{_PASSED_ON})+")
# What jax raises for a program that has failed. It is a ValueError if a process with which the
# program exchanges data is gone.
FAILURES = (jax.errors.JaxRuntimeError, ValueError)
# jax's error of a program -> the error to raise
Explain = Callable[[Exception], Exception]


def wait_for(array: jax.Array) -> None:
    """Blocks until the array is computed.

    Raises:
        DeviceMemoryError, ProgramError: its program failed, or one that it depends on; as the first
            program that fails says of itself, if that is still known.
    """
    if isinstance(array, AbstractArray):
        return
    try:
        with counters.timed(counters.Activity.WAITING):
            array.block_until_ready()
    except FAILURES as error:
        raise watch.failure_of_others(error) or programs.explained(error) from error


def _cause(error: Exception) -> str:
    """The part of an error's text that the errors of dependent programs repeat."""
    return _PREFIXES.sub("", str(error)).rstrip(". ")


def _cause_of(failure: Exception) -> str | None:
    """The cause of an error that explains jax's."""
    return _cause(failure.__cause__) if isinstance(failure.__cause__, Exception) else None


def of_unknown_program(error: Exception) -> ProgramError:
    """The error of a program that has failed and is no longer known."""
    return ProgramError(
        f"a program that was started without waiting failed on the device: {error}. "
        "Its results are lost; call spmd.sync(wait=True) after each step to find which."
    )


@dataclass(eq=False)
class _Started:
    """A program in flight.

    Attributes:
        token: its token.
        explain: jax's error, if the program fails -> the error to raise.
        thread: the one that started it.
    """

    token: jax.Array
    explain: Explain
    thread: threading.Thread = field(default_factory=threading.current_thread)

    @property
    def is_told_here(self) -> bool:
        """Whether a failure is raised in this thread."""
        return self.thread is threading.current_thread() or not self.thread.is_alive()


class InFlight:
    """Limits the number of programs in flight, by waiting for the oldest one.

    A failure that one thread meets while it waits is raised in the thread that started the program.

    Each program has an additional result, its token, which is never donated: the program has ended
    when its token is computed.

    Attributes:
        has_started: whether this process has started any program.
    """

    def __init__(self) -> None:
        self._queue: deque[_Started] = deque()
        # Failures that other threads have met.
        self._untold: list[tuple[_Started, Exception]] = []
        # The newest failures, with what they were explained by.
        self._failures: deque[tuple[str, Explain]] = deque(maxlen=8)
        self.has_started = False

    def add(self, token: jax.Array, explain: Explain) -> None:
        """Adds a started program; waits while too many programs are in flight.

        Args:
            token: its token.
            explain: jax's error, if the program fails later -> the error to raise.

        Raises:
            DeviceMemoryError, ProgramError: the program for which it waits has failed.
        """
        self.has_started = True
        limit = config.max_in_flight_cpu if platform() == "cpu" else config.max_in_flight
        self._queue.append(_Started(token, explain))
        while len(self._queue) > limit:
            self._wait_for_oldest()
        self._raise_untold()

    @interrupts.waits
    def wait_all(self) -> None:
        """Blocks until all started programs have ended.

        Raises:
            DeviceMemoryError, ProgramError: one of them has failed.
        """
        while self._queue:
            self._wait_for_oldest()
        self._raise_untold()

    def _wait_for_oldest(self) -> None:
        started = self._oldest()
        if started is None:
            return
        try:
            with counters.timed(counters.Activity.WAITING):
                started.token.block_until_ready()
        except FAILURES as error:
            is_first = self._remove(started)
            failure = watch.failure_of_others(error) or self._explained_by(started.explain, error)
            failure.__cause__ = error
            if is_first:
                self._untold.append((started, failure))
            self._raise_untold()
        self._remove(started)

    def _oldest(self) -> _Started | None:
        """The oldest program, which stays, as other threads may wait for it, too."""
        try:
            return self._queue[0]
        except IndexError:  # another thread took the last one
            return None

    def _remove(self, started: _Started) -> bool:
        """Takes a program out of the queue; returns False if another thread did."""
        try:
            self._queue.remove(started)
        except ValueError:
            return False
        return True

    def _raise_untold(self) -> None:
        for told in [*self._untold]:
            if told[0].is_told_here:
                self._untold.remove(told)
                raise told[1]

    def explained(self, error: Exception) -> Exception:
        """The error for an array: that of the first program that failed for the same cause."""
        return self._explained_by_another(error) or of_unknown_program(error)

    def explained_at_start(self, error: Exception, own: Explain) -> Exception:
        """The error to raise for a program that cannot start, possibly as an earlier one failed.

        Args:
            error: jax's.
            own: explains the failure if it is the program's own.
        """
        found = self._explained_by_another(error) if _PASSED_ON in str(error) else None
        return found or own(error)

    def _explained_by_another(self, error: Exception) -> Exception | None:
        """The error of the first program that failed for the same cause; None without one."""
        cause = _cause(error)
        self._untold[:] = [u for u in self._untold if _cause_of(u[1]) != cause]
        found = self._take_failed(cause)
        known = next((x for other, x in reversed(self._failures) if other == cause), None)
        # What is passed on twice comes from a program that has failed before.
        if found is not None and (known is None or str(found[0]).count(_PASSED_ON) < 2):
            own, explain = found
            return self._explained_by(explain, own)
        return None if known is None else known(error)

    def _take_failed(self, cause: str) -> tuple[Exception, Explain] | None:
        """Removes the programs that failed for a cause; returns the first, with its error.

        Later ones count as depending on it. Waits for all programs.
        """
        first, others = None, []
        try:
            while (started := self._oldest()) is not None:
                try:
                    started.token.block_until_ready()
                except FAILURES as error:
                    if _cause(error) != cause:
                        others.append(started)
                    elif first is None:
                        first = error, started.explain
                self._remove(started)
        finally:  # of an interruption, too
            self._queue.extendleft(reversed(others))
        return first

    def _explained_by(self, explain: Explain, error: Exception) -> Exception:
        self._failures.append((_cause(error), explain))
        self._take_failed(_cause(error))  # what depends on it
        return explain(error)


# Guarded by: the graph lock to add; a wait takes tokens without a lock.
# Cleared by: programs.wait_all().
programs = InFlight()
