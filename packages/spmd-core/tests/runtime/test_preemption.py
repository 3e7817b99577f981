"""Tests preemption: what SIGTERM ends, after which step, and with which code."""

import os
import signal

import fresh
import launched
import pytest

import spmd_core as spmd

LOOP = """
import os, signal, sys, time
import spmd_core as spmd
{start}

def save():
    time.sleep(float(sys.argv[1]))
    print("saved", step, flush=True)

with spmd.on_preemption(save, deadline_s=2) as preemption:
    for step in range(400):
        time.sleep(0.01)
        if step == 3 and rank == asked:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # schedulers say it twice
        preemption.check()
print("came to its end")
"""


def test_one_process_saves_after_the_step_and_says_so_by_its_code():
    program = LOOP.format(start="rank = asked = 0")
    done = fresh.run(["-c", program, 0], dict(os.environ))
    assert (done.returncode, done.stdout, done.stderr) == (75, "saved 3\n", "")


def test_what_takes_longer_than_the_deadline_is_ended():
    program = LOOP.format(start="rank = asked = 0")
    done = fresh.run(["-c", program, 60], dict(os.environ), timeout_s=40)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: a program ends within 2 s after SIGTERM; this process")
    assert "Give it more time by deadline_s, or make steps and saves shorter." in done.stderr


def test_a_request_is_as_good_as_a_signal_and_an_error_is_not_hidden():
    def broken():
        raise OSError("the disk is full")

    with spmd.on_preemption(broken) as preemption:
        preemption.check()
        spmd.distributed.request_stop()
        with pytest.raises(OSError, match="the disk is full"):
            preemption.check()
        preemption.check()
        assert callable(signal.getsignal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_several_processes_save_after_the_same_step(tmp_path):
    start = """
import atexit
spmd.config.cache_dir = None
rank, asked, port = int(sys.argv[2]), 1, sys.argv[3]
spmd.simulate(1)
spmd.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
file = open(f"{sys.argv[4]}/{rank}", "w")
atexit.register(lambda: print(step, file=file))
"""
    program = LOOP.format(start=start)
    ended = launched.run(2, lambda rank, port: ["-c", program, 0, rank, port, tmp_path])
    assert [one.code for one in ended] == [75, 75], [one.errors for one in ended]
    steps = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert steps[0] == steps[1] and 3 < int(steps[0]) < 399
