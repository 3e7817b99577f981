"""What processes compare on the host, with a store in memory in place of jax's service."""

import threading
import time
from types import SimpleNamespace

import pytest

import spmd_core as spmd
from spmd_core.runtime import agreement


class Store:
    """What the coordination service's client does, for all processes of this test."""

    def __init__(self):
        self.values, self.is_gone = {}, False

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_delete(self, key):
        del self.values[key]

    def key_value_dir_get(self, folder):
        return [item for item in [*self.values.items()] if item[0].startswith(folder)]

    def blocking_key_value_get(self, key, timeout_in_ms):
        end = time.monotonic() + timeout_in_ms / 1000
        while key not in self.values:
            if self.is_gone:
                raise RuntimeError("UNAVAILABLE")
            if time.monotonic() > end:
                raise RuntimeError("DEADLINE_EXCEEDED")
            time.sleep(0.001)
        return self.values[key]


@pytest.fixture
def store(monkeypatch):
    """A process for each thread, which is named after its number."""
    store = Store()

    class State:
        client = store

        @property
        def process_id(self):
            return int(threading.current_thread().name)

    monkeypatch.setattr(agreement, "_distributed", SimpleNamespace(global_state=State()))
    monkeypatch.setattr(agreement.devices, "num_processes", lambda: 2)
    monkeypatch.setattr(agreement, "_count", PerThread())
    return store


class PerThread:
    """A dict of its own for each thread."""

    def __init__(self):
        self.local = threading.local()

    def get(self, key, default):
        return vars(self.local).get(str(key), default)

    def __setitem__(self, key, value):
        vars(self.local)[str(key)] = value


def in_processes(function, *numbers):
    """The function's results or errors by process, each in a thread."""
    found = {}

    def run(number):
        try:
            found[number] = function(number)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,), name=str(n)) for n in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def disagreement(topic, *texts, group=(0, 1), **options):
    """What a process finds that comes to a series with these texts, and compares the last one."""
    series = agreement.Series(topic, group)
    for text in texts:
        series.add(text)
    return series.disagreement(**options)


def test_texts_are_compared_in_order(store):
    def compare(process):
        series, found = agreement.Series("data", (0, 1)), []
        for text in ("same", f"own {process}", "same"):
            series.add(text)
            found.append(series.disagreement())
        return found

    different = [{}, {0: "own 0", 1: "own 1"}, {}]
    assert in_processes(compare, 0, 1) == {0: different, 1: different}
    assert in_processes(lambda _: disagreement("data", "alone", group=(0,)), 0) == {0: {}}


def test_a_process_that_does_not_come_is_named(store, monkeypatch):
    monkeypatch.setattr(spmd.config, "process_timeout_s", 0.02)
    error = in_processes(lambda _: disagreement("data", "text"), 0)[0]
    assert isinstance(error, spmd.errors.ProcessError) and str(error).startswith(
        "all processes must agree on the data (number 1); got nothing from process 1 within 0.02 s"
    )
    error = in_processes(lambda _: agreement.of_process_0("time", "2"), 1)[1]
    assert isinstance(error, spmd.errors.ProcessError) and str(error).startswith(
        "process 0 decides on the time for all processes; got nothing from it within 0.02 s"
    )


def test_the_first_process_may_be_the_missing_one(store, monkeypatch):
    monkeypatch.setattr(spmd.config, "process_timeout_s", 0.02)
    error = in_processes(lambda _: disagreement("data", "text"), 1)[1]
    assert isinstance(error, spmd.errors.ProcessError) and "nothing from process 0 within" in str(
        error
    )


@pytest.mark.parametrize("process", [0, 1])
def test_a_wait_may_be_given_up(store, process):
    start = time.monotonic()
    error = in_processes(
        lambda _: disagreement("data", "text", is_wanted=lambda: time.monotonic() < start + 0.3),
        process,
    )[process]
    assert isinstance(error, agreement.Abandoned)


@pytest.mark.parametrize("asks", [0, 1])
def test_a_process_that_knows_its_text_answers_when_it_is_asked(store, monkeypatch, asks):
    monkeypatch.setattr(agreement, "_ASK_AFTER_S", 0.01)
    asking = agreement.Series("data", (0, 1))
    known = agreement.Series("data", (0, 1))  # of the other process, which goes on
    for text, other in (("same", "same"), ("new", "known")):
        asking.add(text)
        known.add(other)
    known.add("known")
    is_over = threading.Event()

    def answer():  # as the thread of the watch does
        while not is_over.wait(0.01):
            agreement.answer_questions(store, 1 - asks)

    thread = threading.Thread(target=answer)
    thread.start()
    found = in_processes(lambda _: asking.disagreement(), asks)[asks]
    is_over.set()
    thread.join()
    assert found == {asks: "new", 1 - asks: "known"}
    assert not store.key_value_dir_get("spmd/asked/")
    # What is too long ago is forgotten, and what has not come is not known.
    for _ in range(agreement._NUM_KEPT):
        known.add("known")
    assert known.text(2) is None and known.text(known.count + 1) is None
    known.close("left")
    assert known.text(2) is None and known.text(known.count + 1) == "left"
    assert known.text(known.count) == "known"


def test_an_error_of_the_store_is_not_a_timeout(store):
    store.is_gone = True
    error = in_processes(lambda _: disagreement("data", "text"), 1)[1]
    assert isinstance(error, RuntimeError) and str(error) == "UNAVAILABLE"


def test_topics_come_in_any_order(store):
    both_are_there = threading.Barrier(4)

    def compare(thread):
        # Each process compares two topics at once, in threads; these begin in opposite order.
        process, topic = divmod(thread, 10)
        threading.current_thread().name = str(process)
        both_are_there.wait()
        time.sleep(0.02 * (process == topic))
        return disagreement(f"loop {topic}", f"text of {topic}")

    assert set(map(str, in_processes(compare, 0, 1, 10, 11).values())) == {"{}"}


def test_process_0_decides(store):
    assert in_processes(lambda n: agreement.of_process_0("time", str(n)), 0, 1) == {0: "0", 1: "0"}


def test_one_process_has_nothing_to_agree_on():
    assert disagreement("data", "text") == {}
    assert agreement.of_process_0("time", "2") == "2"
