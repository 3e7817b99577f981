"""The estimate of the time left: earlier runs of a command, and the speed of this machine."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.__main__ import FIGURES
from benchmarks.published.remaining import MOST_AT_ONCE, UNKNOWN_S, Remaining, earlier, minutes
from benchmarks.published.rows import Measured, Row, Settings


def row(name: str, *, is_timed: bool = True) -> Row:
    return Row("gpt2", name, ["-m", name], lambda folder, seconds: {}, is_timed=is_timed)


def measured(name: str, *seconds: float) -> Measured:
    runs: list[dict[str, Any]] = [{"seconds": s, "samples": {}, "probe_s": None} for s in seconds]
    return Measured("gpt2", name, ["-m", name], {}, 1, "abc", {}, {}, runs=runs)


def test_a_command_takes_what_it_took() -> None:
    a, b, new = row("a"), row("b"), row("new")
    remaining = Remaining([measured("a", 8.0, 12.0), measured("b", 40.0), measured("a", 99.0)])
    assert remaining.seconds({a: 1}) == 10
    assert remaining.seconds({a: 3, b: 1}) == 70
    assert remaining.seconds({new: 2}) == 2 * 25  # the mean of those that are known
    # Another machine, half as fast: all that is left takes twice as long.
    remaining.add(a, 20.0)
    assert remaining.seconds({a: 1, b: 1}) == 100
    remaining.add(new, 30.0)
    assert remaining.seconds({new: 1}) == 30
    assert Remaining([]).seconds({new: 1}) == UNKNOWN_S


def test_what_is_not_timed_runs_beside_others() -> None:
    remaining = Remaining([measured("a", 10.0)])
    assert remaining.seconds({row("a", is_timed=False): 4}) == 40 / MOST_AT_ONCE


def test_the_committed_run_knows_the_quick_rows(tmp_path: Path) -> None:
    rows = [row for figure in FIGURES for row in figure.rows(Settings())]
    remaining = Remaining(earlier(tmp_path))
    assert 120 < remaining.seconds({row: row.rounds for row in rows}) < 1200


@pytest.mark.parametrize(
    ("seconds", "text"), [(44, "under a minute"), (46, "1 minute"), (91, "2 minutes")]
)
def test_minutes(seconds: float, text: str) -> None:
    assert minutes(seconds) == text
