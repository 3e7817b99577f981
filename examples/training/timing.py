"""A training loop that ends cleanly on Ctrl-C."""

import signal
import threading
from types import FrameType
from typing import Any


class StopOnInterrupt:
    """Within the block, the first Ctrl-C only sets `requested`; a second one interrupts as usual.

    Does nothing outside the main thread, where Python allows no signal handlers.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> "StopOnInterrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, self._previous)
