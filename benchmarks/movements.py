"""How far a figure moved between two runs, and how far noise alone would have moved it.

The noise is measured: by the spread of a run's samples (resampled), or where a file has one sample
for each of many figures, by how much these moved against each other.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000
_CERTAINTY = 0.99  # the probability that a figure which did not move is inside of its noise
_FEWEST_SAMPLES = 3
_LEAST_AMOUNT = 0.01  # a smaller change of bytes or counts is another version's rounding up
# Fewer figures that have a single sample do not tell how much such figures scatter.
_FEWEST_FIGURES = 8


class CheckError(ValueError):
    """Files that cannot be compared."""


@dataclass(frozen=True)
class Movement:
    """How a figure moved.

    Attributes:
        figure: its path, with the names of its entries.
        before, now: the ratio or amount of the baseline and of the run.
        noise: the change that the measurement's noise alone makes, as a fraction; 0 for an amount,
            None where it is not known: of few single samples, or of a time of 0.
        more_is_better: as of images that fit; else less is.
    """

    figure: str
    before: float
    now: float
    noise: float | None
    more_is_better: bool = False

    @property
    def change(self) -> float:
        """The relative change: 0.1 for 10% more."""
        if self.before == 0:
            return 0.0 if self.now == 0 else math.inf
        return self.now / self.before - 1

    def is_beyond(self, least: float) -> bool:
        """Whether it moved by more than its noise, and a ratio by more than `least`."""
        if self.noise is None or abs(self.change) <= (least if self.noise else _LEAST_AMOUNT):
            return False
        return self.change > self.noise or self.change < 1 / (1 + self.noise) - 1

    @property
    def is_worse(self) -> bool:
        """Whether it moved to the worse at all."""
        return self.change < 0 if self.more_is_better else self.change > 0


@dataclass(frozen=True)
class Comparison:
    """A result file beside its baseline.

    Attributes:
        name: of the benchmark.
        movements: of all figures in both.
        gone, new: the figures that only the baseline, and only the run has.
        versions: the parts of the environment that differ, as text.
    """

    name: str
    movements: tuple[Movement, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    versions: str


def of_ratios(entries: Mapping[str, tuple[list[float], list[float]]]) -> Iterator[Movement]:
    """How ratios moved.

    Args:
        entries: by figure, the samples of the baseline and of the run; none of what takes no time.
    """
    timed = {path: both for path, both in entries.items() if all(both)}
    medians = {path: tuple(map(statistics.median, both)) for path, both in timed.items()}
    scatter = _scatter([math.log(now / before) for before, now in medians.values()])
    for path, both in entries.items():
        before, now = medians.get(path, (0.0, 0.0))
        noise = None
        if path in timed:
            noise = _resampled(*both) if min(map(len, both)) >= _FEWEST_SAMPLES else scatter
        yield Movement(path, before, now, noise)


def _scatter(logs: Sequence[float]) -> float | None:
    """The noise of figures with a single sample: how far their movements scatter.

    As a multiple of the median distance from the median, so that a few figures that really moved
    do not count. 1.4826 of it is a standard deviation of normal noise; timings have longer tails.
    """
    if len(logs) < _FEWEST_FIGURES:
        return None
    middle = statistics.median(logs)
    deviation = 1.4826 * statistics.median(abs(log - middle) for log in logs)
    return math.expm1(4 * deviation)


def _resampled(before: Sequence[float], now: Sequence[float]) -> float:
    """The change of medians between two runs that their samples' spread alone explains (bootstrap).

    Each run's samples are drawn again, with replacement: Efron, "Bootstrap methods: another look at
    the jackknife", 1979.
    """
    random = np.random.default_rng(0)
    drawn = [
        np.log(np.median(random.choice(samples, (_RESAMPLES, len(samples))), axis=-1))
        for samples in (before, now)
    ]
    differences = drawn[1] - drawn[0]
    distances = np.abs(differences - np.median(differences))
    return float(np.expm1(np.quantile(distances, _CERTAINTY)))
