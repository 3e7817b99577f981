"""An early end of a loop, which all processes leave after the same step.

A process that is asked to stop cannot leave a loop by itself: the others would wait for it. So the
thread of `runtime.watch` passes the request on to the others. Each process then publishes how often
its loop has called `should_stop`, and waits in that call until process 0 has chosen the first call
that none has made yet. Without a request, nothing waits, and nothing is sent.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from spmd_core import releases
from spmd_core.arguments import require_number

_distributed = releases.jax_module("jax._src.distributed", "global_state")
# How long process 0 waits for the counts of the others. A process without one has left its loop,
# has failed, or has not reached the loop.
_ANSWER_S = 10.0
_PAUSE_S = 0.01
_PREEMPTED = "preempted"  # beside a request that a SIGTERM made
_EXIT_LATE = 1


class _Stop:
    """One process's state of requested and agreed stops.

    Attributes:
        is_requested: whether this process was asked to stop. Written by handlers of signals, so
            without the lock.
        is_preempted: whether a SIGTERM asked. Written as `is_requested`.
        was_preempted: whether a SIGTERM, to any process, asked for the last stop.
    """

    def __init__(self) -> None:
        self.is_requested = self.is_preempted = self.was_preempted = False
        self._lock = threading.Lock()  # held by the thread while the processes choose
        self._num_calls = 0
        self._last: int | None = None  # the call that returns True, once chosen
        self._is_preemption = False  # whether a SIGTERM asked for it
        self._round = 0  # how often they have chosen

    def take_request(self) -> bool:
        """In a program of one process."""
        was_requested, self.is_requested = self.is_requested, False
        if was_requested:
            self.was_preempted, self.is_preempted = self.is_preempted, False
        return was_requested

    def is_here(self) -> bool:
        """Whether this is the call that the processes have chosen."""
        with self._lock:
            self._num_calls += 1
            if self._last is None or self._num_calls < self._last:
                return False
            self.was_preempted = self._is_preemption
            self._begin_round()
            return True

    def answer(self, client: Any, process: int, num_processes: int) -> None:
        """See the function of this name."""
        folder = f"spmd/stop/{self._round}"
        if self._last is not None:
            return
        if self.is_requested:
            why = _PREEMPTED if self.is_preempted else "asked"
            client.key_value_set(f"{folder}/asked/{process}", why, allow_overwrite=True)
        elif not client.key_value_dir_get(f"{folder}/asked/"):
            return
        with self._lock:
            client.key_value_set(
                f"{folder}/calls/{process}", str(self._num_calls), allow_overwrite=True
            )
            if process == 0:
                client.key_value_set(f"{folder}/last", _chosen(client, folder, num_processes))
            chosen = client.blocking_key_value_get(f"{folder}/last", round(2000 * _ANSWER_S))
            last, _, why = chosen.partition(" ")
            if int(last):
                self._last, self._is_preemption = int(last), why == _PREEMPTED
            else:
                self._begin_round()

    def _begin_round(self) -> None:
        self._last, self.is_requested, self.is_preempted = None, False, False
        self._round += 1


def _chosen(client: Any, folder: str, num_processes: int) -> str:
    """The first call that no process has made yet, and whether a SIGTERM asked for it.

    0 if a process does not publish its count.
    """
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        calls = [int(text) for _, text in client.key_value_dir_get(f"{folder}/calls/")]
        if len(calls) == num_processes:
            asked = [text for _, text in client.key_value_dir_get(f"{folder}/asked/")]
            return f"{max(calls) + 1} {_PREEMPTED if _PREEMPTED in asked else ''}"
        time.sleep(_PAUSE_S)
    return "0"


# Guarded by: its own lock; the GIL for the request, which signal handlers make.
# Cleared by: each stop.
_stop = _Stop()


def request_stop() -> None:
    """Makes `should_stop` return True once, in all processes.

    May be called by a signal handler.

    Example:
        >>> request_stop(), should_stop(), should_stop()
        (None, True, False)
    """
    _stop.is_requested = True


def should_stop() -> bool:
    """Whether the loop should end here, because some process was asked to stop.

    Call it at the end of each step, in every process. It returns True after the same step in all of
    them: with several processes, in one of the steps after the one in which the request came. If a
    process has left its loop meanwhile, the request is dropped, as the others leave theirs. Does
    not wait for the devices; after a request it waits up to a second for the other processes.
    """
    state = _distributed.global_state
    if state.client is None or state.num_processes < 2:
        return _stop.take_request()
    return _stop.is_here()


def was_preempted() -> bool:
    """Whether a SIGTERM, to any of the processes, asked for the last stop that `should_stop` told.

    It is the notice of a scheduler that takes the machine back. False for Ctrl-C and for
    `request_stop`.
    """
    return _stop.was_preempted


class _Handlers:
    """Handlers of signals that request a stop.

    Args:
        numbers: the signals.
        deadline_s: see `stop_on_signals`.
    """

    def __init__(self, numbers: Sequence[signal.Signals], deadline_s: float | None) -> None:
        self._numbers, self._deadline_s = numbers, deadline_s
        self._before: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None

    def set(self) -> None:
        """Takes the place of the handlers that are there."""
        for number in self._numbers:
            # `signal.signal` returns None for a handler that is not Python's, such as jax's for
            # SIGTERM, a notice of preemption that nothing here reads.
            self._before[number] = signal.signal(number, self._request) or signal.SIG_DFL

    def restore(self) -> None:
        """Gives the handlers from before their places back, and ends the deadline."""
        self._restore(self._numbers)
        if self._timer is not None:
            self._timer.cancel()

    def _restore(self, numbers: Sequence[signal.Signals]) -> None:
        for number in numbers:
            if number in self._before:
                signal.signal(number, self._before.pop(number))

    def _request(self, number: int, frame: FrameType | None) -> None:
        _stop.is_preempted = _stop.is_preempted or number == signal.SIGTERM
        request_stop()
        if number != signal.SIGTERM or self._deadline_s is None:
            self._restore(self._numbers)
            return
        # The deadline ends what hangs; schedulers send SIGTERM again while a run saves.
        self._restore([n for n in self._numbers if n != signal.SIGTERM])
        if self._timer is None:
            self._timer = threading.Timer(
                min(self._deadline_s, threading.TIMEOUT_MAX), _end_late, [self._deadline_s]
            )
            self._timer.daemon = True
            self._timer.start()


def _end_late(deadline_s: float) -> None:
    print(
        f"error: a program ends within {deadline_s:g} s after SIGTERM; this process has not ended "
        "its step and saved by then, and ends now. What was saved before is whole. Give it more "
        "time by deadline_s, or make steps and saves shorter.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(_EXIT_LATE)


@contextmanager
def stop_on_signals(*, deadline_s: float | None = None) -> Iterator[None]:
    """Inside, the first Ctrl-C or SIGTERM requests a stop; a second one acts as before the block.

    A scheduler sends SIGTERM some seconds before it ends a process. Outside of the main thread,
    where Python allows no handlers, signals are left alone.

    Args:
        deadline_s: how long after a SIGTERM the process may be inside of the block. Then it says so
            and ends with code 1, whatever it does; a second SIGTERM before that changes nothing.
            None: any time.

    Raises:
        ValueError, TypeError: `deadline_s` is no positive number.

    Example:
        >>> with stop_on_signals():
        ...     for step in range(1000):
        ...         signal.raise_signal(signal.SIGTERM)
        ...         if should_stop():  # in every process, after each step
        ...             break
        >>> step
        0
    """
    with handled([signal.SIGINT, signal.SIGTERM], deadline_s=deadline_s):
        yield


@contextmanager
def handled(numbers: Sequence[signal.Signals], *, deadline_s: float | None) -> Iterator[None]:
    """`stop_on_signals` for some signals."""
    if deadline_s is not None and not require_number("deadline_s", deadline_s) > 0:
        raise ValueError(
            f"deadline_s is a number of seconds, more than 0; got {deadline_s!r}. Pass for "
            "instance 30."
        )
    handlers = _Handlers(numbers, deadline_s)
    if threading.current_thread() is threading.main_thread():
        handlers.set()
    try:
        yield
    finally:
        handlers.restore()


def answer(client: Any, process: int, num_processes: int) -> None:
    """Passes a request on to the others, and agrees with them on the step after which all stop.

    Args:
        client: jax's client of the coordination service.
        process: this process.
        num_processes: how many there are.
    """
    _stop.answer(client, process, num_processes)


def reset() -> None:
    """Forgets a request, and why the last stop was."""
    _stop.is_requested = _stop.is_preempted = _stop.was_preempted = False
