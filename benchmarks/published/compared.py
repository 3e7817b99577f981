"""How far the rows of `scripts/bench.sh` moved from those of another run, perhaps elsewhere.

Seconds are divided by those of the fixed job that took turns with the rows (`speed.py`): so another
machine of the same kind has the same ratios, and another kind about the same. Bytes and counts are
compared as they are. Rates follow from seconds, and are left out.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.movements import CheckError, Comparison, Movement
from benchmarks.published.rows import (
    FILE,
    Measured,
    Quantity,
    VersionError,
    is_timed,
    read,
    same_shape,
    unit,
)

# Counts and bytes that a compiler computes, and what more of them means.
_AMOUNTS = {"bytes": False, "ops": False, "images": True}
_NO_FIGURES = "tried_"  # what a search tried on its way
# From the spreads' intervals of 95%, of which some figures of a run lie outside by chance, to 99.9%
# of a normal distribution.
_CERTAINTY = 1.7


def compare(run: Path, baseline: Path) -> Comparison:
    """Compares the finished rows of two folders.

    Raises:
        CheckError: one of them has no results, or they have no row of the same command in common.
    """
    now, before = _rows(run), _rows(baseline)
    speeds = [_probe_s(rows.values()) for rows in (before, now)]
    common = [key for key in before if key in now and same_shape(before[key], now[key])]
    if not common:
        raise CheckError(
            "two runs are compared by the rows that both finished with the same command; got none "
            f"in common of {run} and {baseline}. Run the command that made the baseline, such as "
            "scripts/bench.sh --quick."
        )
    movements = []
    for key in common:
        pair = [rows[key].quantities() for rows in (before, now)]
        for name in (name for name in pair[0] if name in pair[1]):
            movement = _moved(", ".join((*key, name)), name, [q[name] for q in pair], speeds)
            movements += [] if movement is None else [movement]
    names = {key: ", ".join(key) for key in (*before, *now)}
    first, second = (rows[common[0]] for rows in (before, now))
    places = zip(
        [*first.versions.items(), *first.hardware.items()],
        [*second.versions.values(), *second.hardware.values()],
        strict=True,
    )
    return Comparison(
        f"{run}",
        tuple(movements),
        tuple(names[key] for key in before if key not in common),
        tuple(names[key] for key in now if key not in common),
        ", ".join(f"{name} {old} to {new}" for (name, old), new in places if old != new),
    )


def _rows(folder: Path) -> dict[tuple[str, str], Measured]:
    """The finished rows of a folder, by figure and name."""
    try:
        rows = read(folder)
    except VersionError as error:
        raise CheckError(str(error)) from error
    if not rows:
        raise CheckError(
            f"a folder of scripts/bench.sh has a {FILE}; got {folder} without one. Name the folder "
            "that the command printed, or a result file of another benchmark."
        )
    return {(row.figure, row.name): row for row in rows if row.status == "done"}


def _probe_s(rows: Iterable[Measured]) -> float | None:
    """Seconds of the fixed job on the machine; None where it did not run."""
    found = [run["probe_s"] for row in rows for run in row.runs if run["probe_s"]]
    return statistics.median(found) if found else None


def _moved(
    figure: str, name: str, pair: Sequence[Quantity], speeds: Sequence[float | None]
) -> Movement | None:
    """The movement of a quantity; None for what is no figure of its own."""
    before, now = (quantity.median for quantity in pair)
    if name == "ratio" or (is_timed(name) and unit(name) in ("s", "us")):
        noise = _noise(pair)
        if name != "ratio":
            if not all(speeds):
                return Movement(figure, before, now, None)
            before, now = (x / float(s or 1) for x, s in zip((before, now), speeds, strict=True))
        return Movement(figure, before, now, noise if before and now else None)
    if unit(name) in _AMOUNTS and not name.startswith(_NO_FIGURES):
        return Movement(figure, before, now, 0.0, _AMOUNTS[unit(name)])
    return None


def _noise(pair: Sequence[Quantity]) -> float | None:
    """The change that the two spreads allow, as a fraction; None where they are not known."""
    if not all(quantity.median and quantity.is_known for quantity in pair):
        return None
    return _CERTAINTY * math.hypot(*(quantity.spread / quantity.median for quantity in pair))
