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
    """How far the machine's speed moved: the largest distance of a probe from their median.

    Args:
        probes_s: of `probe_s`, over a while.

    Returns:
        A share of the median; 0 for less than two.
    """
    if len(probes_s) < 2:
        return 0.0
    median = statistics.median(probes_s)
    return max(abs(probe - median) for probe in probes_s) / median
