"""One live run writes into a folder; what a dead one leaves is removed by the next."""

import os

import fresh
import pytest

from spmd_core.checkpoint import lock
from spmd_core.errors import CheckpointError

HOLDER = """
import sys, time
from pathlib import Path
from spmd_core.checkpoint.lock import FolderLock
held = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_lock_is_refused_and_names_the_first(tmp_path):
    first = lock.FolderLock(tmp_path)
    with pytest.raises(CheckpointError, match=rf"which is alive: process {os.getpid()} on "):
        lock.FolderLock(tmp_path)
    first.release()
    first.release()  # once more does nothing
    lock.FolderLock(tmp_path).release()


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_free(tmp_path):
    holder = fresh.Process(["-c", HOLDER, tmp_path], dict(os.environ))
    try:
        holder.until(lambda said: "held" in said)
        with pytest.raises(CheckpointError, match=f"process {holder.pid} on "):
            lock.FolderLock(tmp_path)
    finally:
        holder.end()
    lock.FolderLock(tmp_path).release()


def test_a_holder_that_has_said_nothing_yet(tmp_path):
    first = lock.FolderLock(tmp_path)
    (tmp_path / lock.LOCK_FILE).write_text("")
    with pytest.raises(CheckpointError, match="a process that has just started"):
        lock.FolderLock(tmp_path)
    first.release()


def test_leftovers_go_and_all_else_stays(tmp_path):
    for name in ("3", "4.orbax-checkpoint-tmp", "5.removed", "notes"):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / "a.removed").write_text("a file is no step")
    lock.remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["3", "a.removed", "notes"]


def test_a_kill_while_a_step_is_removed_leaves_no_half(tmp_path, monkeypatch):
    (tmp_path / "3" / "arrays").mkdir(parents=True)

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(lock.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        lock.remove_step(tmp_path / "3")
    assert os.listdir(tmp_path) == ["3.removed"]
    monkeypatch.undo()
    lock.remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == []
