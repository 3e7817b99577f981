"""Where the seconds of a first step go."""

import threading

import pytest
import torch

import spmd_core as spmd
from spmd_core import counters
from spmd_core.counters import Activity
from spmd_core.metrics import time_first_step


def step(width: int) -> torch.Tensor:
    return (torch.ones(width, device="xla") * 2).sum()


def test_the_parts_of_a_step_that_compiles() -> None:
    with time_first_step() as first:
        assert first.total_s == 0
        loss = step(5)
        assert loss.item() == 10
    parts = (first.recording_s, first.planning_s, first.tracing_s, first.compiling_s)
    assert all(part > 0 for part in parts) and first.waiting_s >= 0
    assert sum(parts) + first.waiting_s == pytest.approx(first.total_s)
    program = spmd.metrics.programs()[-1]
    assert first.num_programs == 1
    # The same intervals, measured at other moments.
    assert first.tracing_s <= program.trace_s and first.compiling_s <= program.compile_s
    assert "(1 programs compiled)" in str(first)


def test_what_is_pending_is_computed_at_both_ends() -> None:
    before = step(6)
    with time_first_step() as first:
        cuts = spmd.metrics.counter("cuts")
        inside = step(7)
    assert spmd.metrics.counter("cuts") == cuts + 1
    assert first.num_programs == 1 and (before.item(), inside.item()) == (12, 14)


def test_one_block_at_a_time() -> None:
    refused = "one block is timed at a time; got a second one .* End the first block before"
    with time_first_step(), pytest.raises(RuntimeError, match=refused), time_first_step():
        pass
    with time_first_step() as again:
        pass
    assert again.total_s > 0


def test_inner_parts_are_not_the_outers(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(counters.time, "perf_counter", lambda: next(moments))
    with (
        counters.clock() as clock,
        counters.timed(Activity.PLANNING),
        counters.timed(Activity.TRACING),
    ):
        pass
    assert clock.seconds[Activity.RECORDING] == 1 + 5
    assert clock.seconds[Activity.PLANNING] == 2 + 4
    assert clock.seconds[Activity.TRACING] == 3


def test_other_threads_are_not_timed() -> None:
    def body() -> None:
        with counters.timed(Activity.WAITING):
            pass

    with counters.clock() as clock:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert clock.seconds[Activity.WAITING] == 0


def test_an_error_ends_the_block() -> None:
    with pytest.raises(ZeroDivisionError), time_first_step():
        raise ZeroDivisionError
    assert counters._clock is None
