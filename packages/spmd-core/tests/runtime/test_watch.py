"""The watch over other processes, with a store in memory in place of jax's service."""

import json
import re
import threading
import time

import pytest

import spmd_core as spmd
from spmd_core.runtime import presence, start_log, watch
from spmd_core.runtime.watch import Watch


class Store:
    """What the coordination service's client does, for all processes of this test."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_try_get(self, key):
        if key not in self.values:
            raise RuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def key_value_dir_get(self, folder):
        return [item for item in [*self.values.items()] if item[0].startswith(folder)]

    def blocking_key_value_get(self, key, timeout_in_ms):
        end = time.monotonic() + timeout_in_ms / 1000
        while key not in self.values:
            if time.monotonic() > end:
                raise RuntimeError("DEADLINE_EXCEEDED")
            time.sleep(0.001)
        return self.values[key]


@pytest.fixture
def pair():
    store = Store()
    return Watch(store, 0, 2), Watch(store, 1, 2)


def starts(watch, *names, group=(0, 1), compares=False):
    for what in names:
        watch.note(
            group,
            what.encode(),
            f"train.py:{ord(what[0])}",
            lambda what=what: ["aten::mm of [-1, -2]", what],
            compares=compares,
        )


def look(*watches):
    """What the threads do, a few times each, as one may have to answer the other."""

    def look_often(each):
        for _ in range(10):
            each._look()
            time.sleep(0.005)

    threads = [threading.Thread(target=look_often, args=(each,)) for each in watches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_equal_paths_pass(pair):
    starts(pair[0], *"abcabc")
    starts(pair[1], *"abca")
    look(*pair)
    starts(pair[1], *"bc")
    # The neighbour is here, and has the same.
    starts(pair[1], "d", group=(1,))
    look(*pair)
    assert pair[0]._error is None and pair[1]._error is None


def test_the_first_difference_is_told_in_both(pair):
    starts(pair[0], *"abcde")
    starts(pair[1], *"abxdefg")
    look(*pair)
    for each in pair:
        with pytest.raises(
            spmd.errors.ProcessError,
            match=r"all 2 processes start the same programs with the same numbers; number 3 differs"
            r" from line 2 of its description on: process 0 at train.py:99 has c; process 1 at "
            r"train.py:120 has x. Do not let what is recorded, read or synced",
        ):
            starts(each, "z")


def test_a_new_program_waits_for_the_neighbour(pair, monkeypatch):
    other = threading.Timer(0.05, starts, (pair[1], "a"), {"compares": True})
    other.start()
    starts(pair[0], "a", compares=True)
    other.join()
    monkeypatch.setattr(spmd.config, "process_timeout_s", 0.02)
    with pytest.raises(
        spmd.errors.ProcessError,
        match=r"this one is at number 2, train.py:98, and process 1 started number 1 at train.py:97"
        r" and did not come here within 0.02 s; process 1 does not tell its line: .* lock. Look at"
        r" its output; raise spmd.config.process_timeout_s",
    ):
        starts(pair[0], "b", compares=True)


def test_a_failure_is_told_to_the_others(pair):
    assert watch._said_by(KeyboardInterrupt()) == "KeyboardInterrupt"
    pair[1]._tell({"failed": watch._said_by(ValueError("no such file."))})
    look(pair[0])
    with pytest.raises(
        spmd.errors.ProcessError,
        match=r"process 1 has failed: ValueError: no such file. Look at its output",
    ):
        starts(pair[0], "a")
    third = Watch(pair[0]._client, 2, 3)
    third._read(0, {"failed": pair[0]._error}, [])
    assert third._error == pair[0]._error


def test_a_process_may_end_when_it_has_done_what_the_others_did(pair):
    starts(pair[0], *"ab")
    starts(pair[1], *"ab")
    pair[1].end()
    look(pair[0])
    starts(pair[0], "own", group=(0,))  # a program of this process alone
    starts(pair[0], "c")
    look(pair[0])
    with pytest.raises(
        spmd.errors.ProcessError,
        match=r"process 1 ended after number 2, and this one went on to number 3 at train.py:99. "
        r"Give every process the same number of steps",
    ):
        starts(pair[0], "d")


def test_old_starts_are_forgotten_and_far_ones_wait(pair):
    starts(pair[0], *("a" * 500))
    look(pair[0])
    starts(pair[1], "a")
    look(*pair)
    assert pair[0]._error is None and len(pair[0]._logs[0, 1].starts) == start_log.NUM_DESCRIBED


def test_a_process_that_stays_behind_is_named_in_all_with_its_line(pair, monkeypatch, capsys):
    monkeypatch.setattr(spmd.config, "warn_process_after_s", 0.02)
    monkeypatch.setattr(presence, "_STILL_S", 0.0)
    monkeypatch.setattr(presence, "_EVERY_S", 0.01)
    monkeypatch.setattr(presence.source_lines, "line_of_thread", lambda ident: "train.py:7 (wait)")
    starts(pair[0], *"abc")
    starts(pair[1], *"a")
    look(*pair)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and said[0] == said[1]  # once in each process
    assert said[0] == (
        "spmd_core: process 1 has started 1 programs with the others, and process 0 3, at "
        "train.py:99; process 1 has been at train.py:7 (wait) for 0 s. Look at its output. All end "
        "if it does not come within spmd.config.process_timeout_s, 300 s."
    )
    # When it comes, all is well, and what comes next is another matter.
    starts(pair[1], *"bc")
    look(*pair)
    assert pair[0]._error is None and not capsys.readouterr().err
    monkeypatch.setattr(spmd.config, "process_timeout_s", 0.02)
    starts(pair[0], "d")
    look(*pair)
    for each in pair:
        with pytest.raises(
            spmd.errors.ProcessError,
            match=r"end together; the others have waited for 0.02 s: process 1 has started 3 "
            r"programs.* process 1 has been at train.py:7 .* raise spmd.config.process_timeout_s",
        ):
            starts(each, "e")


def test_a_process_that_tells_no_line(pair, monkeypatch):
    said = presence.whereabouts(pair[0]._client, 1)
    assert said == (
        "process 1 does not tell its line: it was killed, is stopped, or in a call that holds "
        "Python's lock"
    )
    pair[0]._client.key_value_set("spmd/still/1", json.dumps(["train.py:7", 3, 0.0]))
    assert presence.whereabouts(pair[0]._client, 1) == said  # it was there long ago


def test_a_failed_program_asks_who_is_still_there(pair, monkeypatch):
    starts(pair[0], "a")
    starts(pair[1], "a")
    thread = threading.Thread(target=look, args=pair)
    thread.start()
    assert pair[0].failure_of_others(RuntimeError("out of memory")) is None
    thread.join()
    monkeypatch.setattr(watch, "_GRACE_S", 0.05)
    error = pair[0].failure_of_others(RuntimeError("Gloo failed: closed by peer\n"))
    assert re.fullmatch(
        "all processes of a program end together; process 1 does not answer any more: .* start all "
        "again. It was noticed by: Gloo failed: closed by peer",
        str(error),
    )


def test_a_failed_program_waits_for_the_error_of_another_process(pair):
    starts(pair[0], "a")
    pair[1]._tell({"failed": "ValueError: no such file"})
    thread = threading.Thread(target=look, args=pair[:1])
    thread.start()
    error = pair[0].failure_of_others(RuntimeError("Gloo failed: closed by peer"))
    thread.join()
    assert "process 1 has failed: ValueError: no such file. Look at its output" in str(error)


def test_the_line_of_a_thread_is_the_users():
    here, over = threading.Event(), threading.Event()

    def wait():
        here.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    here.wait()
    found = presence.source_lines.line_of_thread(thread.ident)
    over.set()
    thread.join()
    assert re.fullmatch(r".*test_watch.py:[0-9]+ \(wait\)", found)
    assert presence.source_lines.line_of_thread(-1) == "an unknown line"


def test_a_store_that_does_not_answer_is_process_0(pair, monkeypatch, capsys):
    monkeypatch.setattr(watch, "_STORE_S", 0.01)
    monkeypatch.setattr(pair[1]._is_over, "wait", lambda timeout_s: time.sleep(0.02) or late[0] > 2)
    late = [0]

    def say(text):
        late[0] += 1
        print(text)

    monkeypatch.setattr(presence, "say", say)
    thread = threading.Thread(target=pair[1]._run_beside)
    thread.start()
    time.sleep(0.2)
    assert late[0] == 1  # once, while it does not answer
    late[0] = 3
    thread.join()
    assert capsys.readouterr().out.startswith("process 0, which keeps the common store of all")


def test_a_difference_names_processes_with_several_threads(pair):
    starts(pair[0], "a")
    thread = threading.Thread(target=starts, args=(pair[0], "b"))
    thread.start()
    thread.join()
    starts(pair[1], *"xb")
    look(*pair)
    for each in pair:
        with pytest.raises(
            spmd.errors.ProcessError,
            match=r"number 1 differs.*tell its line\)\. 2 threads of process 0 start programs, in "
            r"an order that no other process has: let one thread record and end the steps\.",
        ):
            starts(each, "z")
