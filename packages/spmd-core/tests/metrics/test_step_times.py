"""Which intervals between two reads count as step times, and how they are summed up."""

import pytest
import torch

import spmd_core as spmd
from spmd_core.metrics import StepTimes


def times_at(*seconds: float) -> StepTimes:
    return StepTimes(now=iter(seconds).__next__)


def test_the_median_of_the_intervals_is_the_step_time() -> None:
    times = times_at(0.0, 2.0, 12.0, 15.0)
    marks = [times.mark(step=step, in_flight=2, num_compiles=3) for step in (1, 3, 5, 8)]
    assert marks == [None, 1.0, 5.0, 1.0]
    assert times.median_s == 1.0
    assert times.num_steps == 7


def test_an_interval_with_a_compile_or_another_lag_does_not_count() -> None:
    times = times_at(0.0, 1.0, 2.0, 3.0)
    assert times.mark(step=1, in_flight=2, num_compiles=1) is None
    assert times.mark(step=2, in_flight=2, num_compiles=2) is None
    assert times.mark(step=5, in_flight=0, num_compiles=2) is None
    assert times.mark(step=5, in_flight=0, num_compiles=2) is None
    assert times.median_s is None


def test_after_an_evaluation_time_starts_anew() -> None:
    times = times_at(0.0, 100.0, 104.0)
    times.mark(step=4, in_flight=0, num_compiles=1)
    times.resume(step=4, num_compiles=2)
    assert times.mark(step=8, in_flight=0, num_compiles=2) == 1.0


def test_the_spread_is_that_of_the_intervals() -> None:
    times = times_at(0.0, 1.0, 3.0, 6.0, 10.0, 15.0)
    assert times.quartiles_s is None and str(times) == "no step times: too few steps"
    times.mark(step=0, num_compiles=0)
    times.mark(step=1, num_compiles=0)
    assert times.quartiles_s is None
    assert str(times) == "1000 ms over 1 steps in 1 intervals"
    for step in (2, 3, 4, 5):
        times.mark(step=step, num_compiles=0)
    assert times.intervals_s == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert (times.median_s, times.quartiles_s) == (3.0, (2.0, 4.0))
    assert str(times) == "3000 ms (quartiles 2000 and 4000) over 5 steps in 5 intervals"


def test_a_step_that_compiles_is_left_out() -> None:
    times = times_at(0.0, 1.0, 2.0, 3.0)
    times.mark(step=1)
    (torch.ones(3, device="xla") + 41).cpu()  # no other test has this program
    spmd.metrics.count("compiles")
    assert times.mark(step=2) is None
    assert times.mark(step=3) == 1.0
    times.resume(step=3)
    assert times.num_steps == 1


def test_steps_go_on() -> None:
    times = times_at(0.0, 1.0)
    times.mark(step=5)
    with pytest.raises(ValueError, match=r"in ascending order; got step 4 after 5\. Make another"):
        times.mark(step=4)
