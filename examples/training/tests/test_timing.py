"""Which intervals a step clock counts, and the effects of the first and second Ctrl-C."""

import signal
import threading
from collections.abc import Iterator

import pytest

from examples.training.timing import StepClock, StopOnInterrupt


def clock_at(*seconds: float) -> StepClock:
    return StepClock(now=iter(seconds).__next__)


def test_the_median_of_the_intervals_is_the_step_time() -> None:
    clock = clock_at(0.0, 2.0, 12.0, 15.0)
    marks = [clock.mark(step=step, in_flight=2, num_compiles=3) for step in (1, 3, 5, 8)]
    assert marks == [None, 1.0, 5.0, 1.0]
    assert clock.step_time_s == 1.0
    assert clock.num_timed_steps == 7


def test_an_interval_with_a_compile_or_another_lag_does_not_count() -> None:
    clock = clock_at(0.0, 1.0, 2.0, 3.0)
    assert clock.mark(step=1, in_flight=2, num_compiles=1) is None
    assert clock.mark(step=2, in_flight=2, num_compiles=2) is None
    assert clock.mark(step=5, in_flight=0, num_compiles=2) is None
    assert clock.mark(step=5, in_flight=0, num_compiles=2) is None
    assert clock.step_time_s is None


def test_after_an_evaluation_time_starts_anew() -> None:
    clock = clock_at(0.0, 100.0, 104.0)
    clock.mark(step=4, in_flight=0, num_compiles=1)
    clock.resume(step=4, num_compiles=2)
    assert clock.mark(step=8, in_flight=0, num_compiles=2) == 1.0


@pytest.fixture
def python_interrupts() -> Iterator[None]:
    """Python's own handler of Ctrl-C; a process that a shell starts in the background has none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_interrupts")
def test_the_first_interrupt_asks_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopOnInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_signals_alone() -> None:
    handlers = []

    def body() -> None:
        with StopOnInterrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
