"""How fast is this machine at the moment? A fixed job, timed."""

import statistics
import time
from collections.abc import Sequence

import numpy as np

SIZE, REPEATS = 768, 5


def probe_s() -> float:
    """Seconds of a job for all cores and for Python, the median of some. Takes about 0.3 s."""
    matrix = np.ones((SIZE, SIZE), np.float32)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
        sum(i * i for i in range(100_000))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def drift(probes_s: Sequence[float]) -> float:
    """How much the machine's speed moves: a standard deviation of probes.

    Half the range of the middle 68% of them, which one that was disturbed does not decide.

    Args:
        probes_s: of `probe_s`, over a while.

    Returns:
        A share of their median; 0 for less than two.
    """
    if len(probes_s) < 2:
        return 0.0
    low, high = np.quantile(probes_s, (0.16, 0.84))
    return float((high - low) / 2 / statistics.median(probes_s))
