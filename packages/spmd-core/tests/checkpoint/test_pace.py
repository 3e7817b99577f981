"""A save that rests: for how long, and until when."""

import threading
import time

import pytest

from spmd_core.checkpoint import behind, pace
from spmd_core.checkpoint.behind import Behind
from spmd_core.checkpoint.pace import Pace


@pytest.fixture
def clock(monkeypatch):
    """A time that only rests let pass; the list has them, in seconds."""
    rests = []
    monkeypatch.setattr(pace.time, "monotonic", lambda: sum(rests))
    monkeypatch.setattr(threading.Event, "wait", lambda self, seconds: rests.append(seconds))
    return rests


def test_a_save_takes_its_share_of_a_core(clock):
    of_a_save = Pace(1000, interval_s=1e6)
    for _ in range(10):
        of_a_save.rest(100, 0.02)
    assert sum(clock) == pytest.approx(10 * 0.02 / pace._SHARE)


def test_a_save_that_takes_much_of_the_cores_is_whole_before_the_next_one_is_due(clock):
    of_a_save = Pace(1000, interval_s=8.0)
    for done in range(1, 11):
        of_a_save.rest(100, 5.0)
        assert sum(clock) == pytest.approx(0.75 * 8 * done / 10)  # evenly


def test_nobody_rests_who_is_late(clock):
    of_a_save = Pace(1000, interval_s=8.0)
    clock.append(100.0)
    of_a_save.rest(500, 0.1)
    assert clock == [100.0]


def test_an_end_wakes_those_who_rest():
    of_a_save = Pace(1000, interval_s=1e6)
    resting = [threading.Thread(target=of_a_save.rest, args=(10, 100.0)) for _ in range(3)]
    for thread in resting:
        thread.start()
    assert all(thread.is_alive() for thread in resting)
    of_a_save.end()
    start = time.monotonic()
    for thread in resting:
        thread.join(10)
    of_a_save.rest(10, 1e6)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_saves_behind_steps_of_the_cpus_devices_rest_from_the_second_on(monkeypatch, platform):
    monkeypatch.setattr(behind.devices, "platform", lambda: platform)
    saves, found = Behind(), []
    for step in range(3):
        saves.begin(step, 100, found.append)
        assert saves.step == step
        assert saves.finish() is None and saves.step is None
    saves.begin(3, 0, found.append)  # nothing of it is this process's
    saves.finish()
    assert [each is not None for each in found] == [False, *[platform == "cpu"] * 2, False]
    saves.close()


def test_what_fails_behind_the_program_is_returned():
    saves = Behind()
    saves.begin(1, 100, lambda _: 1 / 0)
    assert isinstance(saves.finish(), ZeroDivisionError)
    saves.close()
