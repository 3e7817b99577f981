"""The effects of the first and second Ctrl-C or SIGTERM."""

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from examples.training.timing import StopOnInterrupt


@pytest.fixture
def handled() -> Iterator[Callable[[int], None]]:
    """Python's own handler of Ctrl-C, for SIGTERM too, whose default ends the process."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield signal.raise_signal
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_raises(
    number: signal.Signals, handled: Callable[[int], None]
) -> None:
    with StopOnInterrupt() as interrupt:
        assert not interrupt.ends_run()
        handled(number)
        assert interrupt.ends_run() and interrupt.has_ended_run
        for other in (signal.SIGINT, signal.SIGTERM):
            with pytest.raises(KeyboardInterrupt):
                handled(other)
    assert signal.getsignal(number) is signal.default_int_handler


def test_other_threads_leave_signals_alone() -> None:
    handlers = []

    def body() -> None:
        with StopOnInterrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
