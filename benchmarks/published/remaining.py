"""How long is left of a run? From what each row took in earlier runs, and the speed of this one."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.published.rows import Measured, Row, read

# A quick run whose results are committed: the times of its rows predict those of a new run.
BASELINE = Path(__file__).parents[1] / "results" / "quick"
MOST_AT_ONCE = 2  # commands that are not timed run beside each other
UNKNOWN_S = 30.0  # seconds of a row that no run has finished yet


class Remaining:
    """Expected seconds of what is left.

    A run of a row takes what the same command took before: in this folder, or else in the committed
    quick run. The rest is scaled by how much longer than expected the finished ones took here, as
    another machine is slower by about the same factor for all. What has never run takes the mean.

    Args:
        known: rows of this folder and of others, those that count most first.
    """

    def __init__(self, known: Iterable[Measured]) -> None:
        self._expected: dict[tuple[str, ...], float] = {}
        for row in known:
            if row.runs:
                mean = sum(run["seconds"] for run in row.runs) / len(row.runs)
                self._expected.setdefault(tuple(row.command), mean)
        self._taken_s = self._thought_s = 0.0

    def add(self, row: Row, seconds: float) -> None:
        """Notes that a run of the row took so long here."""
        if (expected := self._expected.get(tuple(row.command))) is not None:
            self._taken_s += seconds
            self._thought_s += expected
        else:
            self._expected[tuple(row.command)] = seconds / self._factor

    def seconds(self, left: Mapping[Row, int]) -> float:
        """Seconds until so many runs of each row have ended."""
        known = list(self._expected.values())
        mean = sum(known) / len(known) if known else UNKNOWN_S
        total = 0.0
        for row, num_runs in left.items():
            expected = self._expected.get(tuple(row.command), mean) * num_runs
            total += expected if row.is_timed else expected / MOST_AT_ONCE
        return total * self._factor

    @property
    def _factor(self) -> float:
        return self._taken_s / self._thought_s if self._thought_s else 1.0


def earlier(folder: Path) -> list[Measured]:
    """The rows of a folder, and then those of the committed quick run."""
    return [*read(folder), *read(BASELINE)]


def minutes(seconds: float) -> str:
    """Seconds as a rough time.

    Example:
        >>> minutes(20), minutes(89), minutes(570)
        ('under a minute', '1 minute', '10 minutes')
    """
    if seconds < 45:
        return "under a minute"
    rounded = round(seconds / 60)
    return f"{rounded} minute{'s' if rounded != 1 else ''}"
