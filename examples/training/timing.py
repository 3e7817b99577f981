"""A training loop that ends cleanly on Ctrl-C and SIGTERM, in all processes after the same step."""

import signal
import threading
from types import FrameType
from typing import Any

import spmd_core as spmd

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnInterrupt:
    """Within the block, the first Ctrl-C or SIGTERM ends the run after a step; a second one acts as
    usual.

    A scheduler sends SIGTERM some seconds before it ends a process. Outside the main thread, where
    Python allows no handlers, signals are left alone.

    Attributes:
        has_ended_run: whether `ends_run` has said so.
    """

    def __init__(self) -> None:
        self.has_ended_run = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopOnInterrupt":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # `signal.signal` returns None for a handler that is not Python's, such as jax's for
                # SIGTERM, a notice of preemption that nothing here reads.
                self._previous[number] = signal.signal(number, self._request) or signal.SIG_DFL
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def ends_run(self) -> bool:
        """Whether the run ends here. Every process of a run asks after each of its steps.

        Where one was asked to end, all do so after the same step, within a few steps.
        """
        self.has_ended_run = spmd.distributed.should_stop()
        return self.has_ended_run

    def _request(self, number: int, frame: FrameType | None) -> None:
        spmd.distributed.request_stop()
        for each, handler in self._previous.items():
            signal.signal(each, handler)
