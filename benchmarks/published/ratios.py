"""Ratios of two rows whose runs took turns: the machine's drift reaches both, and cancels."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.published.rows import Measured, Quantity


def by_round(ours: Measured, theirs: Measured, name: str) -> list[float]:
    """The ratio of the medians in each round that both rows have."""
    pairs = zip(ours.runs, theirs.runs, strict=False)
    found = [[run["samples"].get(name) for run in pair] for pair in pairs]
    return [statistics.median(a) / statistics.median(b) for a, b in found if a and b]


def against(
    pairs: Mapping[str, tuple[Measured, Measured]], name: str = "step_s"
) -> dict[str, Quantity]:
    """For each pair of rows, the first's quantity over the second's, with an interval of its own.

    A ratio has one sample for each round. So their variance is averaged with the typical one of all
    pairs, as that of times is (`rows.py`); rows of one round have no interval.

    Args:
        pairs: by label; the runs of both took turns.
        name: of the quantity.
    """
    rounds = {label: by_round(*pair, name) for label, pair in pairs.items()}
    shares = [statistics.stdev(of) / statistics.mean(of) for of in rounds.values() if len(of) > 1]
    noise = _root_mean_square(shares)
    # One round says nothing of how far the next would lie, whatever other pairs do.
    return {
        label: Quantity(of, noise if len(of) > 1 else 0.0) for label, of in rounds.items() if of
    }


def _root_mean_square(values: Sequence[float]) -> float:
    return (sum(v * v for v in values) / len(values)) ** 0.5 if values else 0.0
