"""Threads: order, errors, ends; a program's end waits for none of them."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from spmd_core.checkpoint.threads import NICE, Threads


def named(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("most", [None, 1, 2])
def test_each_call_is_made_once_and_results_have_the_order_of_calls(most, here):
    threads, made = Threads(3, "ordered"), []

    def call(number):
        made.append(number)
        return number * 2

    found = threads.all([lambda n=n: call(n) for n in range(200)], most, here=here)
    assert found == [*range(0, 400, 2)] and sorted(made) == [*range(200)]
    assert threads.all([], most, here=here) == []
    threads.close()
    assert not named("ordered")


def test_nothing_begins_after_an_error_and_what_goes_on_is_waited_for():
    threads, ended = Threads(2, "failing"), []

    def slow():
        time.sleep(0.1)
        ended.append("slow")

    def fails():
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        threads.all([slow, fails, *[lambda: ended.append("later")] * 50])
    assert ended == ["slow"]
    assert threads.submit(lambda: 7).result() == 7  # they are there for others
    with pytest.raises(OSError, match="full"):
        threads.submit(fails).result()
    threads.close()


def test_threads_begin_with_the_first_call_and_end_when_nobody_has_them():
    threads = Threads(2, "dropped")
    assert threads.all([lambda: 1], here=True) == [1] and not named("dropped")
    threads.start()
    threads.start()
    assert len(named("dropped")) == 2
    del threads
    gc.collect()
    until(lambda: not named("dropped"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux has priorities of threads")
def test_threads_that_give_way():
    own = os.getpriority(os.PRIO_PROCESS, 0)
    threads = Threads(1, "polite", gives_way=True)
    asked = threads.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    assert asked.result() == max(own, NICE) and os.getpriority(os.PRIO_PROCESS, 0) == own
    threads.close()


AT_THE_END = """
import atexit, time
from spmd_core.checkpoint.threads import Threads
threads, slow = Threads(1, "late"), Threads(1, "other")
slow.start()
begun = threads.submit(lambda: time.sleep(0.3) or slow.all([lambda: "done"]))

def ends():
    assert not begun.done()  # nobody waited for it before
    print(begun.result()[0])

atexit.register(ends)
"""


def test_the_end_of_a_program_comes_before_the_end_of_what_goes_on():
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("done", "")
