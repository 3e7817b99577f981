"""Step times of an asynchronous device: median and spread, without the steps that compiled."""

import statistics
import time
from collections.abc import Callable

from spmd_core.arguments import checked
from spmd_core.counters import counter


class StepTimes:
    """Measures seconds per step from the moments at which losses were read.

    The device runs behind Python, so the duration of one loop iteration is not a step time. Between
    two reads of a loss, the device completed the steps between them. Such an interval counts if
    nothing was compiled in it and the same number of steps was in flight at both ends; if the loop
    waited for the device at one end only, the steps would look too fast or too slow. Steps up to
    the first mark are warm-up. It prints as median, quartiles and count.

    Args:
        now: a clock in seconds.

    Attributes:
        num_steps: the number of steps that count.

    Example:
        >>> times = StepTimes(now=iter([10.0, 12.0, 12.3, 12.9]).__next__)
        >>> times.mark(step=1, in_flight=2), times.mark(step=5, in_flight=2)
        (None, 0.5)
        >>> _ = times.mark(step=6, in_flight=2), times.mark(step=8, in_flight=2)
        >>> print(times)
        300 ms (quartiles 300 and 400) over 7 steps in 3 intervals
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last: tuple[int, int, int, float] | None = None
        self._intervals: list[float] = []
        self.num_steps = 0

    @checked(step=0, in_flight=0, num_compiles=0)
    def mark(
        self, *, step: int, in_flight: int = 0, num_compiles: int | None = None
    ) -> float | None:
        """Seconds per step since the previous mark, or None if that interval does not count.

        Args:
            step: the newest step whose results were read, just before this call.
            in_flight: steps recorded after `step`.
            num_compiles: compiles so far; None: of this process, `counter("compiles")`.

        Raises:
            ValueError: the step is below that of the previous mark.
        """
        now = self._now()
        last = self._last
        if last is not None and step < last[0]:
            raise ValueError(
                f"steps are marked in ascending order; got step {step} after {last[0]}. "
                "Make another StepTimes for another run."
            )
        compiles = counter("compiles") if num_compiles is None else num_compiles
        self._last = (step, in_flight, compiles, now)
        if last is None or (in_flight, compiles) != last[1:3] or step == last[0]:
            return None
        seconds = (self._last[3] - last[3]) / (step - last[0])
        self._intervals.append(seconds)
        self.num_steps += step - last[0]
        return seconds

    @checked(step=0, num_compiles=0)
    def resume(self, *, step: int, num_compiles: int | None = None) -> None:
        """Starts the next interval now, after other work that followed `step`.

        No step may be in flight.
        """
        compiles = counter("compiles") if num_compiles is None else num_compiles
        self._last = (step, 0, compiles, self._now())

    @property
    def intervals_s(self) -> tuple[float, ...]:
        """Seconds per step of each interval that counts, in their order."""
        return tuple(self._intervals)

    @property
    def median_s(self) -> float | None:
        """Median seconds per step over the intervals, or None before the first interval."""
        return statistics.median(self._intervals) if self._intervals else None

    @property
    def quartiles_s(self) -> tuple[float, float] | None:
        """The first and the third quartile over the intervals, or None before the second one.

        An interval of several steps is their mean, so the spread of single steps is wider.
        """
        if len(self._intervals) < 2:
            return None
        first, _, third = statistics.quantiles(self._intervals, n=4, method="inclusive")
        return first, third

    def __str__(self) -> str:
        if self.median_s is None:
            return "no step times: too few steps"
        spread = ""
        if self.quartiles_s is not None:
            first, third = self.quartiles_s
            spread = f" (quartiles {first * 1e3:.4g} and {third * 1e3:.4g})"
        return (
            f"{self.median_s * 1e3:.4g} ms{spread} over {self.num_steps} steps "
            f"in {len(self._intervals)} intervals"
        )
