"""Stops that several processes agree on, with a store in memory in place of jax's service."""

import random
import signal
import threading
import time

import pytest

import spmd_core as spmd
from spmd_core.runtime import stopping
from spmd_core.runtime.stopping import _Stop


class Store:
    """What the coordination service's client does, for all processes of this test."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return [item for item in [*self.values.items()] if item[0].startswith(folder)]

    def blocking_key_value_get(self, key, timeout_in_ms):
        end = time.monotonic() + timeout_in_ms / 1000
        while key not in self.values:
            assert time.monotonic() < end
            time.sleep(0.001)
        return self.values[key]


class Process:
    """A loop, and the thread that answers beside it."""

    def __init__(self, store, number, count, num_steps, asked_at=None, *, is_preempted=False):
        self.stop, self.stopped_at = _Stop(), []
        self._over = threading.Event()
        self._is_preempted = is_preempted
        self._program = threading.Thread(target=self._run, args=(num_steps, asked_at))
        self._thread = threading.Thread(target=self._answer, args=(store, number, count))

    def start(self):
        self._program.start()
        self._thread.start()

    def _run(self, num_steps, asked_at):
        pauses = random.Random(id(self))
        for step in range(num_steps):
            time.sleep(pauses.random() / 100)
            if step == asked_at:
                self.stop.is_preempted = self._is_preempted
                self.stop.is_requested = True
            if self.stop.is_here():
                self.stopped_at.append(step)
                return

    def _answer(self, store, number, count):
        while not self._over.wait(0.01):
            self.stop.answer(store, number, count)

    def join(self):
        self._program.join()

    def end(self):
        self._over.set()
        self._thread.join()


def stopped(asked, num_steps=100, count=3, preempted=()):
    """Processes that have ended; `asked` says which is asked, and when, `preempted` by SIGTERM."""
    store = Store()
    every = [
        Process(store, i, count, num_steps, asked.get(i), is_preempted=i in preempted)
        for i in range(count)
    ]
    for process in every:
        process.start()
    for process in every:
        process.join()
    for process in every:
        process.end()
    return every


def stops(asked, **options):
    """The steps at which each process stops."""
    return [process.stopped_at for process in stopped(asked, **options)]


@pytest.mark.parametrize("asked", [{0: 10}, {2: 10}, {0: 10, 1: 12, 2: 9}], ids=str)
def test_all_stop_at_the_same_step(asked):
    found = stops(asked)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 1 and min(asked.values()) < found[0][0] < 60


@pytest.mark.parametrize("preempted", [(), (1,)])
def test_all_know_why(preempted):
    every = stopped({1: 10}, preempted=preempted)
    assert [process.stop.was_preempted for process in every] == [bool(preempted)] * 3


def test_nobody_stops_unasked():
    assert stops({}, num_steps=20) == [[], [], []]


def test_a_process_that_says_nothing_drops_the_request(monkeypatch):
    monkeypatch.setattr(stopping, "_ANSWER_S", 0.05)
    store, stop = Store(), _Stop()
    stop.is_requested = True
    stop.answer(store, 0, 2)
    assert not stop.is_here() and not stop.is_requested
    # The next request is another matter, to which both come.
    other = _Stop()
    other.answer(store, 1, 2)
    stop.is_requested = True
    thread = threading.Thread(target=stop.answer, args=(store, 0, 2))
    thread.start()
    while not store.key_value_dir_get("spmd/stop/1/asked/"):
        time.sleep(0.001)
    other.answer(store, 1, 2)
    thread.join()
    # One has been here once before, and the other never.
    assert [stop.is_here(), other.is_here(), other.is_here()] == [True, False, True]


def test_one_process_stops_at_once():
    assert not spmd.distributed.should_stop()
    spmd.distributed.request_stop()
    assert spmd.distributed.should_stop() and not spmd.distributed.should_stop()


@pytest.fixture
def handled():
    """Python's own handler of Ctrl-C, for SIGTERM too, whose default ends the process."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield signal.raise_signal
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_raises(number, handled):
    with spmd.distributed.stop_on_signals():
        assert not spmd.distributed.should_stop()
        handled(number)
        assert spmd.distributed.should_stop()
        for other in (signal.SIGINT, signal.SIGTERM):
            with pytest.raises(KeyboardInterrupt):
                handled(other)
    assert signal.getsignal(number) is signal.default_int_handler


def test_the_last_stop_says_whether_a_scheduler_asked(handled):
    for number, is_preemption in ((signal.SIGTERM, True), (signal.SIGINT, False)):
        with spmd.distributed.stop_on_signals():
            handled(number)
            assert spmd.distributed.should_stop()
        assert spmd.distributed.was_preempted() == is_preemption
    handled_by_nobody = spmd.distributed.request_stop
    handled_by_nobody()
    assert spmd.distributed.should_stop() and not spmd.distributed.was_preempted()


def test_with_a_deadline_a_second_sigterm_changes_nothing(handled):
    with spmd.distributed.stop_on_signals(deadline_s=60):
        handled(signal.SIGTERM)
        handled(signal.SIGTERM)
        assert spmd.distributed.should_stop()
        with pytest.raises(KeyboardInterrupt):
            handled(signal.SIGINT)
    assert not [t for t in threading.enumerate() if isinstance(t, threading.Timer) and t.is_alive()
                and not t.finished.is_set()]  # fmt: skip


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan")])
def test_a_deadline_is_a_positive_number(deadline_s):
    for block in (
        spmd.distributed.stop_on_signals(deadline_s=deadline_s),
        spmd.on_preemption(print, deadline_s=deadline_s),
    ):
        with pytest.raises(ValueError, match="deadline_s is a number"), block:
            pass
    with spmd.on_preemption(print, deadline_s=float("inf")):
        pass


def test_other_threads_leave_signals_alone():
    handlers = []

    def body():
        with spmd.distributed.stop_on_signals():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
