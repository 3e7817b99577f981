"""Blocks in a database in a store of objects: transactions, failures, threads that give way."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from spmd_core.checkpoint import database
from spmd_core.checkpoint.remote import folder_at
from spmd_core.checkpoint.staging import Staged
from spmd_core.checkpoint.store import Reader
from spmd_core.checkpoint.threads import NICE, Threads

NONE = Threads(0, "none")  # tensorstore has its own


def staged(data, chunks, blocks):
    """An array in blocks: `blocks` has a tuple of slices for each."""
    return Staged(data.shape, data.dtype, chunks, [(index, data[index]) for index in blocks])


@pytest.fixture
def place(tmp_path):
    return folder_at(f"memory://{tmp_path.name}")


@pytest.fixture
def arrays():
    rows = [(slice(i, i + 16), slice(0, 100)) for i in range(0, 64, 16)]
    large = np.arange(6400, dtype=np.float32).reshape(64, 100)
    return {
        # The chunks of a block are not contiguous in it: tensorstore copies them.
        "t.large": staged(large, (16, 40), rows),
        "t.number": staged(np.array(7), (), [()]),
        "t.empty": staged(np.zeros((0, 4), np.int64), (1, 4), [(slice(0, 0), slice(0, 4))]),
    }


@pytest.mark.parametrize("batch_bytes", [1, 5000, 1 << 20])
def test_what_is_written_in_one_or_in_many_transactions(place, monkeypatch, arrays, batch_bytes):
    monkeypatch.setattr(database, "_BATCH_BYTES", batch_bytes)
    begun = []
    commit = database._Commits.next
    monkeypatch.setattr(
        database._Commits, "next", lambda self: (begun.append(self._bytes), commit(self))
    )
    step = place / "1"
    database.write(
        arrays | {"of.another": Staged((3,), np.dtype("f4"), (1,), [])}, step / "arrays", NONE
    )
    reader = Reader(step)
    for name, array in arrays.items():
        right = np.zeros(array.shape, array.dtype)
        for index, block in array.blocks:
            right[index] = block
        assert np.array_equal(reader.read(name, [slice(0, n) for n in array.shape]), right)
    with pytest.raises(Exception, match=r"of\.another"):
        reader.array("of.another")
    largest = 16 * 40 * 4
    assert max(begun) <= max(batch_bytes, largest) or batch_bytes > 1 << 16
    assert (len(begun) == 1) == (batch_bytes == 1 << 20)


def test_where_a_commit_fails_the_others_are_waited_for():
    ended = []

    class Commit:
        def __init__(self, number):
            self.number = number

        def result(self):
            ended.append(self.number)
            if self.number < 2:
                raise OSError(f"commit {self.number}")

    commits = database._Commits()
    commits._begun.extend(map(Commit, range(4)))
    with pytest.raises(OSError, match="commit 0"):
        commits.finish()
    assert ended == [0, 1, 2, 3]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux has priorities of threads")
def test_the_threads_that_write_run_where_nothing_else_does(place, arrays):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    database.write(arrays, place / "first", NONE)
    time.sleep(0.1)  # a thread has its name a moment after it has begun
    database.write(arrays, place / "second", NONE)
    found = [
        os.getpriority(os.PRIO_PROCESS, int(task.name))
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().startswith("ts_pool")
    ]
    assert found and set(found) == {max(own, NICE)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
