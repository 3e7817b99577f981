"""What stays of steps that are whole."""

import pytest

from spmd_core.checkpoint.retention import Retention, Written
from spmd_core.errors import CheckpointError

STEPS = [Written(step, float(step), {"loss": abs(step - 25.0)}) for step in range(0, 60, 10)]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 10, 20, 30, 40, 50]),
        ({"keep": 2}, [40, 50]),
        ({"keep": 9}, [0, 10, 20, 30, 40, 50]),
        ({"keep": 1, "keep_every": 20}, [0, 20, 40, 50]),
        ({"keep": 1, "keep_for_s": 25.0}, [40, 50]),
        ({"keep": 1, "keep_best": "loss"}, [30, 50]),  # of equal ones the newer
        ({"keep": 1, "keep_best": "-loss"}, [50]),
        ({"keep": 2, "keep_best": "-loss", "keep_every": 30}, [0, 30, 40, 50]),
    ],
    ids=str,
)
def test_what_stays(options, kept):
    removed = Retention(**options).removed([*reversed(STEPS)], now_s=60.0)
    assert [one.step for one in STEPS if one.step not in removed] == kept


def test_a_clock_that_goes_backwards_removes_nothing_young():
    assert Retention(keep=1, keep_for_s=5.0).removed(STEPS, now_s=-100.0) == []


def test_not_a_number_is_never_the_best():
    steps = [Written(0, 0.0, {"loss": float("nan")}), *STEPS, Written(60, 60.0, {})]
    assert 0 in Retention(keep=1, keep_best="loss").removed(steps, now_s=60.0)
    assert 30 not in Retention(keep=1, keep_best="loss").removed(steps, now_s=60.0)


@pytest.mark.parametrize(
    "options", [{"keep": 0}, {"keep_every": -1}, {"keep": 1.5}, {"keep": True}]
)
def test_numbers_that_count_nothing(options):
    with pytest.raises(ValueError, match="is a whole number from 1, or None"):
        Retention(**options)


def test_a_negative_age():
    with pytest.raises(ValueError, match="keep_for_s counts seconds, from 0; got -1"):
        Retention(keep_for_s=-1)


def test_the_metric_that_is_asked_for_is_missing():
    with pytest.raises(CheckpointError, match=r"each save has that metric; got \['accuracy'\]"):
        Retention(keep_best="loss").check({"accuracy": 1.0})
    Retention(keep_best="-loss").check({"loss": 1.0})
    Retention().check({})
