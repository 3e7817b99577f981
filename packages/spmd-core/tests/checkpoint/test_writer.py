"""A step gets its name when all that it has is on the disk."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from spmd_core.checkpoint import database, lock
from spmd_core.checkpoint.folder import whole_steps
from spmd_core.checkpoint.staging import Staged
from spmd_core.checkpoint.store import Reader
from spmd_core.checkpoint.writer import Writer

ARRAYS = {"t.a": Staged((3,), np.dtype("f4"), (3,), [((slice(0, 3),), np.arange(3, dtype="f4"))])}


def test_all_is_on_the_disk_before_a_step_gets_its_name(tmp_path, monkeypatch):
    done = []
    sync, rename = os.fsync, Path.rename

    def synced(file):
        done.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        sync(file)

    def renamed(path, target):
        done.append(Path(target))
        assert Path(target).name == "3"
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    Writer(tmp_path).write(3, {"epoch": 2}, ARRAYS)
    at = done.index(tmp_path / "3")
    unfinished = tmp_path / f"3{lock.UNFINISHED}"
    found = {path.relative_to(tmp_path / "3") for path in (tmp_path / "3").rglob("*")}
    assert {unfinished, *(unfinished / path for path in found)} == {*done[:at]}
    assert done[at + 1 :] == [tmp_path]
    files = [path for path in found if (tmp_path / "3" / path).is_file()]
    assert {str(path) for path in files} == {
        "_CHECKPOINT_METADATA", "arrays/_METADATA", "state/metadata",
        "arrays/manifest.ocdbt", "arrays/d/0", "arrays/d/nodes",
    }  # fmt: skip
    assert Reader(tmp_path / "3").state() == {"epoch": 2}


def test_what_a_failed_save_left_is_written_again(tmp_path, monkeypatch):
    writer = Writer(tmp_path)
    write = database.write

    def half(*arguments):
        write(*arguments)
        raise OSError("a full disk")

    monkeypatch.setattr(database, "write", half)
    with pytest.raises(OSError, match="a full disk"):
        writer.write(3, {"epoch": 2}, ARRAYS)
    assert whole_steps(tmp_path) == []
    monkeypatch.undo()
    writer.write(3, {"epoch": 4}, ARRAYS)
    assert whole_steps(tmp_path) == [3]
    assert Reader(tmp_path / "3").state() == {"epoch": 4}
    assert Reader(tmp_path / "3").read("t.a", [slice(0, 3)]).tolist() == [0, 1, 2]
    tree = json.loads((tmp_path / "3/arrays/_METADATA").read_text())["tree_metadata"]
    assert [*tree] == ["('t', 'a')"]
