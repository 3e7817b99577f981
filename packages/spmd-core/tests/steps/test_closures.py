"""Closures at the end of a step, the optimizer's update, waiting, and rates."""

import os
import threading
from pathlib import Path

import fresh
import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.program import compile_cache
from spmd_core.steps import closures, loop

pytestmark = pytest.mark.one_device


@pytest.fixture(autouse=True)
def clean():
    yield
    spmd.sync()
    closures.wait_for_closures()


def test_closures_run_in_order_at_the_end_of_the_step():
    seen = []
    x = torch.ones(2).to("xla")
    closures.add_step_closure(lambda t: seen.append(("first", t.tolist())), args=(x,))
    x.add_(1)
    closures.add_step_closure(seen.append, args=["second"])
    assert x.sum().item() == 4 and seen == []  # a read is not the end of a step
    before = spmd.metrics.counter("executions")
    x.add_(1)
    spmd.sync()
    assert (
        seen == [("first", [3.0, 3.0]), "second"]
        and spmd.metrics.counter("executions") == before + 1
    )
    spmd.sync()
    assert len(seen) == 2


def test_a_closure_may_add_another_and_end_a_step():
    seen = []

    def again():
        seen.append(1)
        closures.add_step_closure(seen.append, args=(2,))
        spmd.sync()

    closures.add_step_closure(again)
    spmd.sync()
    assert seen == [1, 2]


def test_an_asynchronous_closure_gets_the_values_of_its_step():
    seen, go = [], threading.Event()

    def log(values, number):
        assert threading.current_thread() is not threading.main_thread() and go.wait(60)
        seen.append((values["x"][0].tolist(), values["x"][0].device.type, number))

    x = torch.zeros(2).to("xla")
    spmd.sync()
    for number in range(3):
        x.add_(1)
        closures.add_step_closure(log, args=({"x": [x]}, number), run_async=True)
        spmd.sync()
    x.mul_(100)
    spmd.sync()
    assert seen == []
    go.set()
    closures.wait_for_closures()
    assert seen == [([1.0, 1.0], "cpu", 0), ([2.0, 2.0], "cpu", 1), ([3.0, 3.0], "cpu", 2)]


def test_the_snapshot_of_an_asynchronous_closure_is_part_of_the_steps_program():
    x = torch.zeros(2).to("xla")
    for _ in range(3):
        x.add_(1)
        closures.add_step_closure(lambda t: t.tolist(), args=(x,), run_async=True)
        before = spmd.metrics.counter("executions")
        spmd.sync()
        assert spmd.metrics.counter("executions") == before + 1
    closures.wait_for_closures()
    # The tensor's own buffer still goes to its next value.
    assert compile_cache.newest().graph.donated == (0,)


def test_the_queue_is_bounded(monkeypatch):
    monkeypatch.setattr(spmd.config, "max_async_closures", 2)
    running, most, go = [], [], threading.Event()

    def count():
        go.wait(60)
        most.append(closures._background._num_waiting)

    def release():
        running.append(closures._background._num_waiting)
        go.set()

    timer = threading.Timer(0.5, release)
    for _ in range(5):
        closures.add_step_closure(count, run_async=True)
    timer.start()
    spmd.sync()  # waits for room until the timer lets the first closure go on
    closures.wait_for_closures()
    assert running == [2] and len(most) == 5 and max(most) <= 2


def test_exceptions_leave_sync_after_the_others_ran():
    seen = []

    def fail(text):
        raise KeyError(text)

    closures.add_step_closure(fail, args=("one",))
    closures.add_step_closure(seen.append, args=(1,))
    with pytest.raises(KeyError, match="one"):
        spmd.sync()
    assert seen == [1]
    closures.add_step_closure(fail, args=("two",))
    closures.add_step_closure(fail, args=("three",))
    with pytest.raises(ExceptionGroup, match="2 closures of one step raised") as caught:
        spmd.sync()
    assert [str(e) for e in caught.value.exceptions] == ["'two'", "'three'"]


def test_the_exception_of_an_asynchronous_closure_is_never_lost():
    def fail():
        raise KeyError("in the background")

    for look in (lambda: closures.add_step_closure(print), spmd.sync, closures.wait_for_closures):
        closures.add_step_closure(fail, run_async=True)
        spmd.sync()
        closures._background.drain()
        with pytest.raises(
            RuntimeError,
            match=r"an asynchronous step closure must not raise; "
            r".*fail raised KeyError: 'in the background'",
        ) as caught:
            look()
        assert isinstance(caught.value.__cause__, KeyError)
        spmd.sync()


def test_an_exception_after_the_last_step_is_printed():
    code = """
import spmd_core as spmd
from spmd_core.steps import closures
spmd.simulate(1)
def fail():
    raise KeyError("too late")
closures.add_step_closure(fail, run_async=True)
closures.add_step_closure(print, args=("done",), run_async=True)
spmd.sync()
"""
    env = {**os.environ, "PYTHONPATH": str(Path(spmd.__file__).parent.parent)}
    result = fresh.run(["-c", code], env)
    assert result.stdout == "done\n"
    assert (
        "no step followed in which to say so" in result.stderr
        and "KeyError: 'too late'" in result.stderr
    )


def test_a_failed_step_takes_its_closures_with_it_and_an_interrupted_one_keeps_them(monkeypatch):
    seen = []
    w = torch.ones(2).to("xla")

    def fail(error):
        def get(key, make_graph, name):
            raise error

        return get

    w.add_(1)
    closures.add_step_closure(seen.append, args=("failed",))
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "cached", lambda key: None)
        patch.setattr(compile_cache, "making", fail(spmd.errors.ProgramError("no")))
        with pytest.raises(spmd.errors.ProgramError, match="no"):
            spmd.sync()
    spmd.sync()
    assert seen == []

    w.add_(1)
    closures.add_step_closure(seen.append, args=(1,))
    closures.add_step_closure(seen.append, args=(2,))
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "cached", lambda key: None)
        patch.setattr(compile_cache, "making", fail(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            spmd.sync()
    spmd.sync()
    assert seen == [1, 2]


def test_the_optimizers_step_with_and_without_a_barrier():
    p = nn.Parameter(torch.ones(2).to("xla"))
    optimizer = torch.optim.SGD([p], lr=0.5)
    (p * 2).sum().backward()
    assert loop.optimizer_step(optimizer) is None and p._handle.value.data is None
    assert loop.optimizer_step(optimizer, barrier=True, optimizer_args={"closure": lambda: 7}) == 7
    assert p._handle.value.data is not None and p.tolist() == [-1, -1]


def test_waiting_computes_only_what_was_started():
    x = torch.ones(2).to("xla") + 1
    loop.wait_device_ops()
    assert x._handle.value.data is None
    before = spmd.metrics.counter("steps")
    loop.unlazy([{"x": x.view(1, 2)}, torch.ones(1), 3, torch.ones(2).to("xla")])
    assert x._handle.value.data is not None and spmd.metrics.counter("steps") == before


def test_rates(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    monkeypatch.delenv("RATE_TRACKER_SMOOTHING", raising=False)
    tracker = loop.RateTracker()
    assert tracker.rate() == tracker.global_rate() == 0
    tracker.add(10)
    now[0] += 2
    assert tracker.rate() == 5 and tracker.rate() == 5  # no time has passed in between
    tracker.add(30)
    now[0] += 2
    assert tracker.rate() == pytest.approx(0.6 * 15 + 0.4 * 5) and tracker.global_rate() == 10
    monkeypatch.setenv("RATE_TRACKER_SMOOTHING", "some")
    with pytest.raises(ValueError, match=r"RATE_TRACKER_SMOOTHING is a number .*; got 'some'"):
        loop.RateTracker()
    monkeypatch.setenv("RATE_TRACKER_SMOOTHING", "0")
    plain = loop.RateTracker()
    plain.add(4)
    now[0] += 1
    assert plain.rate() == 4
    plain.add(2)
    now[0] += 1
    assert plain.rate() == 2
    with pytest.raises(ValueError, match=r"from 0 to below 1; got 1. Use 0"):
        loop.RateTracker(1)
