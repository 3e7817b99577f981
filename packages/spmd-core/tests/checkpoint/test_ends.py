"""`CheckpointManager`: saves that rest, and programs that end or are killed while they save."""

import os
import re
import time

import fresh
import pytest
import torch
from tiers import by_tier

from spmd_core.checkpoint import (
    CheckpointManager,
    load_checkpoint,
    lock,
    pace,
)


@pytest.fixture
def endless(monkeypatch):
    """Saves behind others rest for minutes, unless that is ended."""
    monkeypatch.setattr(pace, "_SHARE", 1e-9)
    monkeypatch.setattr(pace, "_PART", 1e9)


@pytest.mark.parametrize("ends", ["wait", "save", "close", "restore", "remove_after"])
def test_whoever_waits_ends_the_rests_of_a_save(tmp_path, endless, ends):
    t = torch.arange(50_000.0)
    start = time.monotonic()
    with CheckpointManager(tmp_path) as saving:
        for step in range(2):
            saving.save(step, {"t": t + step})
        time.sleep(0.2)
        assert saving.all_steps() == [0]
        calls = {
            "wait": saving.wait,
            "save": lambda: saving.save(2, {"t": t}),
            "close": saving.close,
            "restore": lambda: saving.restore({"t": torch.zeros(50_000)}, 1),
            "remove_after": lambda: saving.remove_after(1),
        }
        calls[ends]()
        assert saving.all_steps()[:2] == [0, 1]
    assert time.monotonic() - start < 30
    found = torch.zeros(50_000)
    load_checkpoint(tmp_path, {"t": found}, 1)
    assert torch.equal(found, t + 1)


def test_what_is_not_to_go_on_behind_the_program_never_rests(tmp_path, endless):
    with CheckpointManager(tmp_path, async_=False) as saving:
        for step in range(3):
            saving.save(step, {"t": torch.ones(50_000)})
            assert saving.latest() == step


AT_THE_END = """
import sys, torch
import spmd_core as spmd
from spmd_core.checkpoint import pace
spmd.config.cache_dir = None
spmd.simulate(1)
pace._SHARE, pace._PART = 1e-9, 1e9
manager = spmd.CheckpointManager(sys.argv[1])
for step in range(2):
    manager.save(step, {"t": torch.ones(50_000)})
assert manager.all_steps() == [0]
print("ended")
"""


def test_the_end_of_the_program_ends_the_rests_of_a_save(tmp_path):
    done = fresh.run(["-c", AT_THE_END, tmp_path], dict(os.environ))
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    found = torch.zeros(50_000)
    assert load_checkpoint(tmp_path, {"t": found}).step == 1 and (found == 1).all()


PROGRAM = """
import sys, torch
import spmd_core as spmd
from spmd_core import counters
spmd.config.cache_dir = None  # jaxlib 0.10.0 writes of what it loads to stderr
spmd.simulate(8)
spmd.use_spmd()
from spmd_core.checkpoint import CheckpointManager
manager = CheckpointManager(sys.argv[1], keep=2)
w = spmd.mark_sharding(torch.zeros(64, 1000).to("xla"), spmd.Mesh(range(8), (8,), ("x",)), ("x",))
start = 0
if manager.latest() is not None:
    start = manager.restore({"w": w}).step
    assert (w.cpu() == start).all(), (start, w.cpu().unique())
print("from", start, flush=True)
for step in range(start + 1, start + 1 + int(sys.argv[2])):
    w += 1
    manager.save(step, {"w": w})
    print("after", step - 1, flush=True)  # which is whole: one save is in flight
"""


@pytest.mark.slow
def test_a_program_that_ends_without_close_has_its_last_step(tmp_path):
    for start in (0, 3):
        done = fresh.run(["-c", PROGRAM, tmp_path, 3], dict(os.environ))
        assert done.returncode == 0 and f"from {start}\n" in done.stdout, done.stderr
        assert not done.stderr
    assert sorted(int(n) for n in os.listdir(tmp_path) if n.isdecimal()) == [5, 6]


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_has_whole_steps(tmp_path):
    last = 0
    for number in range(by_tier(3, in_all=6)):
        process = fresh.Process(["-c", PROGRAM, tmp_path, 10_000], dict(os.environ))
        said = process.until(lambda said, n=number: len(said.splitlines()) > 3 + 4 * n)
        said, errors = process.end()
        assert not errors, errors
        start = int(re.search(r"from (\d+)", said)[1])
        assert start >= last  # no step is lost that was said to be whole
        last = int(re.findall(r"after (\d+)", said)[-1])
    with CheckpointManager(tmp_path) as after:
        assert after.latest() >= last
        assert not [name for name in os.listdir(tmp_path) if lock.UNFINISHED in name]
