"""Blocks on a disk: what tensorstore reads of them, files, failures, threads that give way."""

import errno
import os
import threading

import ml_dtypes
import numpy as np
import pytest

from spmd_core.checkpoint import database, disk, ocdbt
from spmd_core.checkpoint.staging import Staged
from spmd_core.checkpoint.store import Reader


def staged(data, chunks, blocks):
    """An array in blocks: `blocks` has a tuple of slices for each."""
    return Staged(data.shape, data.dtype, chunks, [(index, data[index]) for index in blocks])


def whole(data, chunks=None):
    """An array in one block."""
    return staged(data, chunks or data.shape, [tuple(slice(0, n) for n in data.shape)])


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    large = rng.standard_normal((512, 1030)).astype(np.float32)
    rows = [(slice(i, i + 128), slice(0, 1030)) for i in range(0, 512, 128)]
    return {
        # The chunks of a block are not contiguous in it, and the last of a row has less.
        "t.columns": staged(large, (128, 400), rows),
        "t.rows": staged(large, (128, 1030), rows),
        "t.number": whole(np.array(7), ()),
        "t.empty": staged(np.zeros((0, 4), np.int64), (1, 4), [(slice(0, 0), slice(0, 4))]),
        "t.bool": whole(np.arange(5) % 2 == 0),
        "t.complex": whole(np.arange(400).astype(np.complex64) * (1 - 2j), (300,)),
        "t.bf16": whole(np.arange(3000, dtype=np.float32).astype(ml_dtypes.bfloat16)),
        "t.f8": whole(np.arange(30, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn)),
        "t.u8": whole(np.arange(200, dtype=np.uint8)),
        "t.f16": whole(np.arange(200, dtype=np.float16)),
        **{f"t.small.{i}": whole(np.arange(i, dtype=np.int32) * 7) for i in range(1, 300)},
    }


def reader(folder):
    return Reader(folder / "1")


def written(folder, arrays):
    (folder / "1").mkdir()
    disk.write(arrays, folder / "1" / "arrays")


@pytest.mark.parametrize("file_bytes", [1000, 16 << 20])
def test_tensorstore_reads_it(tmp_path, monkeypatch, arrays, file_bytes):
    monkeypatch.setattr(disk, "_FILE_BYTES", file_bytes)
    written(tmp_path, arrays)
    for name, array in arrays.items():
        right = np.zeros(array.shape, array.dtype)
        for index, block in array.blocks:
            right[index] = block
        found = reader(tmp_path).read(name, [slice(0, n) for n in array.shape])
        assert found.dtype == right.dtype and found.tobytes() == right.tobytes(), name
    found = {path.name for path in (tmp_path / "1/arrays/d").iterdir()}
    assert found == {*"0123"[: 4 if file_bytes == 1000 else 1], "nodes"}


def test_without_arrays_there_is_no_database(tmp_path):
    disk.write({}, tmp_path / "arrays")
    assert not (tmp_path / "arrays").exists()


def test_all_is_on_the_disk_when_it_returns(tmp_path, monkeypatch, arrays):
    done, sync = [], os.fsync

    def synced(file):
        done.append(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(disk, "_FILE_BYTES", 1000)
    written(tmp_path, arrays)
    folder = tmp_path / "1" / "arrays"
    ours = [*folder.rglob("*"), folder]
    assert sorted(done) == sorted(map(str, ours))
    assert done[-2:] == [str(folder / "d"), str(folder)]


def test_where_one_file_fails_the_others_end(tmp_path, monkeypatch, arrays):
    monkeypatch.setattr(disk, "_FILE_BYTES", 1000)
    append, failed = disk.DirectFile.append, threading.Event()

    def full(file, data):
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(file, data)

    monkeypatch.setattr(disk.DirectFile, "append", full)
    before = threading.active_count()
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path, arrays)
    assert threading.active_count() == before
    assert not (tmp_path / "1/arrays/manifest.ocdbt").exists()


def test_databases_of_several_processes_are_merged(tmp_path, arrays):
    names = [*arrays]
    folder = tmp_path / "1" / "arrays"
    folder.mkdir(parents=True)
    for number in range(2):
        mine = {name: arrays[name] for name in names[number::2]}
        disk.write(mine, folder / f"process_{number}")
    database.merge(folder, [folder / "process_0", folder / "process_1"])
    for name, array in arrays.items():
        found = reader(tmp_path).read(name, [slice(0, n) for n in array.shape])
        for index, block in array.blocks:
            assert found[index].tobytes() == block.tobytes(), name


def test_a_folder_that_cannot_be_made(tmp_path, arrays):
    (tmp_path / "file").write_text("in its place")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        disk.write(arrays, tmp_path / "file" / "arrays")


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux has priorities of threads")
def test_the_threads_that_write_run_where_nothing_else_does(tmp_path, monkeypatch, arrays):
    own, found = os.getpriority(os.PRIO_PROCESS, 0), []
    checksum = ocdbt.checksum

    def noted(data):
        if threading.current_thread().name.startswith("checkpoint-file"):
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return checksum(data)

    monkeypatch.setattr(ocdbt, "checksum", noted)
    written(tmp_path, arrays)
    assert found and {*found} == {max(own, disk.NICE)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
