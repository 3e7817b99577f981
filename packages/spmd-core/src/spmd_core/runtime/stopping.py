"""An early end of a loop, which all processes leave after the same step.

A process that is asked to stop cannot leave a loop by itself: the others would wait for it. So the
thread of `runtime.watch` passes the request on to the others. Each process then publishes how often
its loop has called `should_stop`, and waits in that call until process 0 has chosen the first call
that none has made yet. Without a request, nothing waits, and nothing is sent.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from spmd_core import releases

_distributed = releases.jax_module("jax._src.distributed", "global_state")
# How long process 0 waits for the counts of the others. A process without one has left its loop,
# has failed, or has not reached the loop.
_ANSWER_S = 10.0
_PAUSE_S = 0.01


class _Stop:
    """One process's state of requested and agreed stops.

    Attributes:
        is_requested: whether this process was asked to stop. Written by handlers of signals, so
            without the lock.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._lock = threading.Lock()  # held by the thread while the processes choose
        self._num_calls = 0
        self._last: int | None = None  # the call that returns True, once chosen
        self._round = 0  # how often they have chosen

    def take_request(self) -> bool:
        """In a program of one process."""
        was_requested, self.is_requested = self.is_requested, False
        return was_requested

    def is_here(self) -> bool:
        """Whether this is the call that the processes have chosen."""
        with self._lock:
            self._num_calls += 1
            if self._last is None or self._num_calls < self._last:
                return False
            self._begin_round()
            return True

    def answer(self, client: Any, process: int, num_processes: int) -> None:
        """See the function of this name."""
        folder = f"spmd/stop/{self._round}"
        if self._last is not None:
            return
        if self.is_requested:
            client.key_value_set(f"{folder}/asked/{process}", "asked", allow_overwrite=True)
        elif not client.key_value_dir_get(f"{folder}/asked/"):
            return
        with self._lock:
            client.key_value_set(
                f"{folder}/calls/{process}", str(self._num_calls), allow_overwrite=True
            )
            if process == 0:
                client.key_value_set(f"{folder}/last", _chosen(client, folder, num_processes))
            last = int(client.blocking_key_value_get(f"{folder}/last", round(2000 * _ANSWER_S)))
            if last:
                self._last = last
            else:
                self._begin_round()

    def _begin_round(self) -> None:
        self._last, self.is_requested = None, False
        self._round += 1


def _chosen(client: Any, folder: str, num_processes: int) -> str:
    """The first call that no process has made yet; 0 if a process does not publish its count."""
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        calls = [int(text) for _, text in client.key_value_dir_get(f"{folder}/calls/")]
        if len(calls) == num_processes:
            return str(max(calls) + 1)
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


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Inside, the first Ctrl-C or SIGTERM requests a stop; a second one acts as before the block.

    A scheduler sends SIGTERM some seconds before it ends a process. Outside of the main thread,
    where Python allows no handlers, signals are left alone.

    Example:
        >>> with stop_on_signals():
        ...     for step in range(1000):
        ...         signal.raise_signal(signal.SIGTERM)
        ...         if should_stop():  # in every process, after each step
        ...             break
        >>> step
        0
    """
    before: dict[signal.Signals, Any] = {}

    def request(number: int, frame: FrameType | None) -> None:
        request_stop()
        restore()

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # `signal.signal` returns None for a handler that is not Python's, such as jax's for
            # SIGTERM, a notice of preemption that nothing here reads.
            before[number] = signal.signal(number, request) or signal.SIG_DFL
    try:
        yield
    finally:
        restore()


def answer(client: Any, process: int, num_processes: int) -> None:
    """Passes a request on to the others, and agrees with them on the step after which all stop.

    Args:
        client: jax's client of the coordination service.
        process: this process.
        num_processes: how many there are.
    """
    _stop.answer(client, process, num_processes)


def reset() -> None:
    """Forgets a request."""
    _stop.is_requested = False
