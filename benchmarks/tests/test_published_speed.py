"""The probe of the machine's speed, and how far the speed moved."""

import pytest

from benchmarks.published import speed


def test_a_probe_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SIZE", 8)
    assert 0 < speed.probe_s() < 60


def test_drift() -> None:
    assert speed.drift([]) == speed.drift([2.0]) == 0
    assert speed.drift([2.0, 2.0, 1.0]) == 0.5
    assert speed.drift([1.0, 1.0, 1.25]) == 0.25
