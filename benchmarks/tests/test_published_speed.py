"""The probe of the machine's speed, and how far the speed moved."""

import numpy as np
import pytest

from benchmarks.published import speed


@pytest.mark.exhaustive
def test_the_job_is_timed_in_its_process() -> None:
    with speed.Probe() as probe:
        assert all(0 < probe.seconds() < 60 for _ in range(2))
    assert probe._process.returncode == 0


def test_a_job_that_ended_is_told() -> None:
    with speed.Probe() as probe:
        probe._process.kill()
        probe._process.wait()
        with pytest.raises(RuntimeError, match=r"must answer; it ended with exit code -9\. Run"):
            probe.seconds()


def test_drift() -> None:
    assert speed.drift([]) == speed.drift([2.0]) == 0
    # Of a normal distribution, its standard deviation; one disturbed probe of many is not heard.
    normal = np.random.default_rng(0).normal(2.0, 0.1, 2000)
    assert speed.drift([*normal]) == pytest.approx(0.05, rel=0.05)
    assert speed.drift([*[1.0] * 9, 5.0]) == 0
