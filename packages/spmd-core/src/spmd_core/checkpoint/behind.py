"""The save in flight: one at a time is written behind the program."""

import time
from collections.abc import Callable
from concurrent.futures import Future

from spmd_core.checkpoint.pace import Pace
from spmd_core.checkpoint.threads import Threads
from spmd_core.runtime import devices


class Behind:
    """Writes one save after the other, by one thread: to start one keeps a step waiting.

    Attributes:
        step: of the save in flight; None: there is none.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._threads = Threads(1, "checkpoint")
        self._written: Future[None] = Future()
        self._pace: Pace | None = None
        # When the last save began to be written, by `time.monotonic`.
        self._begun_s: float | None = None

    def begin(self, step: int, num_bytes: int, write: Callable[[Pace | None], None]) -> None:
        """Begins to write, where nothing is in flight.

        Args:
            step: the step.
            num_bytes: that this process writes of it.
            write: gets the pace at which it writes; None: as fast as it can.
        """
        before, self._begun_s = self._begun_s, time.monotonic()
        self._pace = None
        # Steps of other devices leave the host's cores free.
        if before is not None and num_bytes and devices.platform() == "cpu":
            self._pace = Pace(num_bytes, self._begun_s - before)
        pace, self.step = self._pace, step
        self._written = self._threads.submit(lambda: write(pace))

    def finish(self) -> BaseException | None:
        """Waits for the save in flight, which rests no more; returns why it failed, if so."""
        if self._pace is not None:
            self._pace.end()
        self.step = None
        return self._written.exception()

    def close(self) -> None:
        """Ends the thread."""
        self._threads.close()
