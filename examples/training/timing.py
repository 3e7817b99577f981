"""Step times of an asynchronous device, and a training loop that ends cleanly on Ctrl-C."""

import signal
import statistics
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


class StepClock:
    """Measures seconds per step from the moments at which losses were read.

    The device runs behind Python, so the duration of one loop iteration is not a step time. Between
    two reads of a loss, the device completed the steps between them. Such an interval counts if
    nothing was compiled in it and the same number of steps was in flight at both ends; if the loop
    waited for the device at one end only, the steps would look too fast or too slow. Steps up to
    the first mark are warm-up.

    Example:
        >>> clock = StepClock(now=iter([10.0, 12.0]).__next__)
        >>> (
        ...     clock.mark(step=1, in_flight=2, num_compiles=1),
        ...     clock.mark(step=5, in_flight=2, num_compiles=1),
        ...     clock.num_timed_steps,
        ... )
        (None, 0.5, 4)
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last: tuple[int, int, int, float] | None = None
        self._intervals: list[float] = []
        self.num_timed_steps = 0

    def mark(self, *, step: int, in_flight: int, num_compiles: int) -> float | None:
        """Seconds per step since the previous mark, or None if that interval does not count.

        Args:
            step: the newest step whose results were read, just before this call.
            in_flight: steps recorded after `step`.
            num_compiles: compiles of the process so far.
        """
        last, self._last = self._last, (step, in_flight, num_compiles, self._now())
        if last is None or (in_flight, num_compiles) != last[1:3] or step == last[0]:
            return None
        seconds = (self._last[3] - last[3]) / (step - last[0])
        self._intervals.append(seconds)
        self.num_timed_steps += step - last[0]
        return seconds

    def resume(self, *, step: int, num_compiles: int) -> None:
        """Starts the next interval now, after other work that followed `step`.

        No step may be in flight.
        """
        self._last = (step, 0, num_compiles, self._now())

    @property
    def step_time_s(self) -> float | None:
        """Median seconds per step over the intervals, or None before the first interval."""
        return statistics.median(self._intervals) if self._intervals else None


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
