"""Ratios of rows whose runs took turns, with an interval of their own."""

import pytest

from benchmarks.published import ratios
from benchmarks.published.rows import Measured


def measured(*rounds: list[float], name: str = "step_s") -> Measured:
    runs = [{"seconds": 1.0, "probe_s": None, "samples": {name: of}} for of in rounds]
    return Measured("gpt2", "x", ["-m", "x"], {}, len(rounds), "abc", {}, {}, runs=runs)


def test_the_machines_drift_cancels() -> None:
    # The second round ran on a machine half as fast.
    ours, theirs = measured([1.0, 9.0, 1.0], [2.0]), measured([2.0], [4.0])
    assert ratios.by_round(ours, theirs, "step_s") == [0.5, 0.5]
    (found,) = ratios.against({"a": (ours, theirs)}).values()
    assert found.median == 0.5 and found.interval == 0


def test_pairs_share_their_variance() -> None:
    one = measured([1.0], [1.0])
    pairs = {"steady": (measured([2.0], [2.0]), one), "moving": (measured([0.9], [1.1]), one)}
    found = ratios.against(pairs)
    # By Student's t, 2.571 for five degrees of freedom: four are of all pairs, whose mean square
    # deviation is half of that of the moving one.
    deviation = 0.02**0.5
    noise = deviation / 2**0.5
    steady = 2.571 * (4 * (noise * 2.0) ** 2 / 5 / 2) ** 0.5
    assert found["steady"].interval == pytest.approx(steady, rel=1e-3)
    moving = 2.571 * ((4 * noise**2 + deviation**2) / 5 / 2) ** 0.5
    assert found["moving"].interval == pytest.approx(moving, rel=1e-3)


def test_one_round_has_no_interval_and_missing_quantities_no_ratio() -> None:
    one, other = measured([1.0], [1.0]), measured([0.9], [1.1])
    pairs = {"moving": (other, one), "once": (measured([3.0]), one)}
    pairs["none"] = (measured([1.0], name="peak_bytes"), one)
    found = ratios.against(pairs)
    assert found["once"].median == 3.0 and found["once"].interval == 0
    assert "none" not in found
