"""The probe of the machine's speed, and how far the speed moved."""

import numpy as np
import pytest

from benchmarks.published import speed


def test_a_probe_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SIZE", 8)
    assert 0 < speed.probe_s() < 60


def test_drift() -> None:
    assert speed.drift([]) == speed.drift([2.0]) == 0
    # Of a normal distribution, its standard deviation; one disturbed probe of many is not heard.
    normal = np.random.default_rng(0).normal(2.0, 0.1, 2000)
    assert speed.drift([*normal]) == pytest.approx(0.05, rel=0.05)
    assert speed.drift([*[1.0] * 9, 5.0]) == 0
