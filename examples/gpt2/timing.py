"""Honest step times and a clean Ctrl-C: the two things around a training loop that depend on the clock and on signals."""

import signal
import statistics
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


class StepClock:
    """Times steps by the moments at which their results were seen.

    A device runs behind Python, so the time that the loop takes for one step says little. Between two moments at which a loss could be read, the
    device finished the steps in between. An interval counts when nothing was compiled in it and as many steps were in flight at its end as at its
    beginning: a device that is waited for at one end only would look too fast or too slow. Steps up to the first mark warm things up.

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
        """The results of `step` were just read: seconds for each step since the last mark, or None where the interval does not count.

        Args:
            step: the newest step whose results were read.
            in_flight: steps that were recorded after it.
            num_compiles: of the process so far.
        """
        last, self._last = self._last, (step, in_flight, num_compiles, self._now())
        if last is None or (in_flight, num_compiles) != last[1:3] or step == last[0]:
            return None
        seconds = (self._last[3] - last[3]) / (step - last[0])
        self._intervals.append(seconds)
        self.num_timed_steps += step - last[0]
        return seconds

    def resume(self, *, step: int, num_compiles: int) -> None:
        """Something else took time after `step`, and nothing is in flight: the next interval begins now."""
        self._last = (step, 0, num_compiles, self._now())

    @property
    def step_time_s(self) -> float | None:
        """Median over the intervals of their seconds for a step; None before there is one."""
        return statistics.median(self._intervals) if self._intervals else None


class StopOnInterrupt:
    """While the block runs, the first Ctrl-C only sets `requested`; a second one interrupts as usual.

    Outside the main thread, where Python allows no signal handlers, it does nothing.
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
