"""The effects of the first and second Ctrl-C."""

import signal
import threading
from collections.abc import Iterator

import pytest

from examples.training.timing import StopOnInterrupt


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
