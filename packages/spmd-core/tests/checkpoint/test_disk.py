"""Blocks on a disk: what tensorstore reads of them, files, failures, threads that give way."""

import errno
import mmap
import os
import threading

import ml_dtypes
import numpy as np
import pytest

from spmd_core.checkpoint import database, disk, ocdbt
from spmd_core.checkpoint.pace import Pace
from spmd_core.checkpoint.staging import Staged
from spmd_core.checkpoint.store import Reader
from spmd_core.checkpoint.tensorstore_arrays import TensorstoreArrays
from spmd_core.checkpoint.threads import NICE, Threads


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


@pytest.fixture(scope="module")
def threads():
    made = Threads(disk.NUM_FILES, "checkpoint-file", gives_way=True)
    yield made
    made.close()


def reader(folder, *, by_tensorstore):
    made = Reader(folder / "1")
    if by_tensorstore:
        made._found = TensorstoreArrays(folder / "1" / "arrays")
    return made


def written(folder, arrays, threads, pace=None):
    (folder / "1").mkdir()
    disk.write(arrays, folder / "1" / "arrays", threads, pace)


def compare(folder, arrays):
    """What tensorstore reads, and what this package does, with what was written."""
    for name, array in arrays.items():
        right = np.zeros(array.shape, array.dtype)
        for index, block in array.blocks:
            right[index] = block
        for by_tensorstore in (True, False):
            source = reader(folder, by_tensorstore=by_tensorstore)
            found = source.read(name, [slice(0, n) for n in array.shape])
            assert isinstance(source._found, TensorstoreArrays) == by_tensorstore
            assert found.dtype == right.dtype and found.tobytes() == right.tobytes(), name


@pytest.mark.parametrize("piece_bytes", [4096, 4 << 20])
@pytest.mark.parametrize("file_bytes", [1000, 16 << 20])
def test_tensorstore_reads_it(tmp_path, monkeypatch, arrays, threads, file_bytes, piece_bytes):
    monkeypatch.setattr(disk, "_FILE_BYTES", file_bytes)
    monkeypatch.setattr(disk, "_PIECE_BYTES", piece_bytes)
    written(tmp_path, arrays, threads)
    few = [name for name in arrays if not name.startswith("t.small")]
    compare(tmp_path, {name: arrays[name] for name in [*few, "t.small.1", "t.small.299"]})
    found = {path.name for path in (tmp_path / "1/arrays/d").iterdir()}
    assert found == {*"0123"[: 4 if file_bytes == 1000 else 1], "nodes"}


@pytest.mark.parametrize("is_aligned", [True, False])
def test_pieces_of_a_chunk_lie_behind_each_other(tmp_path, monkeypatch, threads, is_aligned):
    monkeypatch.setattr(disk, "_PIECE_BYTES", 256 << 10)
    memory = np.frombuffer(mmap.mmap(-1, 4 << 20), np.uint8)
    memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), np.uint8)
    start = 0 if is_aligned else 64
    arrays = {
        f"t.{size}": whole(memory[start : start + size])
        for size in ((1 << 20) + 4099, 256 << 10, (512 << 10) + 1, (700 << 10) + 5, 5000)
    }
    written(tmp_path, arrays, threads)
    compare(tmp_path, arrays)


def test_each_piece_is_told_to_the_pace(tmp_path, monkeypatch, arrays, threads):
    monkeypatch.setattr(disk, "_FILE_BYTES", 1000)
    told, calls = [], Pace(1, 0.0)
    monkeypatch.setattr(calls, "rest", lambda num_bytes, cpu_s: told.append((num_bytes, cpu_s)))
    written(tmp_path, arrays, threads, calls)
    chunks = sum(chunk.num_bytes for chunk in disk._chunks(arrays))
    assert sum(num_bytes for num_bytes, _ in told) == chunks
    assert all(cpu_s >= 0 for _, cpu_s in told)


def test_without_arrays_there_is_no_database(tmp_path, threads):
    disk.write({}, tmp_path / "arrays", threads)
    assert not (tmp_path / "arrays").exists()


def test_all_is_on_the_disk_when_it_returns(tmp_path, monkeypatch, arrays, threads):
    done, sync = [], os.fsync

    def synced(file):
        done.append(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(disk, "_FILE_BYTES", 1000)
    written(tmp_path, arrays, threads)
    folder = tmp_path / "1" / "arrays"
    ours = [*folder.rglob("*"), folder]
    assert sorted(done) == sorted(map(str, ours))
    assert done[-2:] == [str(folder / "d"), str(folder)]


def test_where_one_file_fails_the_others_end(tmp_path, monkeypatch, arrays, threads):
    monkeypatch.setattr(disk, "_FILE_BYTES", 1000)
    append, failed = disk.DirectFile.append, threading.Event()

    def full(file, data):
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(file, data)

    monkeypatch.setattr(disk.DirectFile, "append", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path, arrays, threads)
    assert not (tmp_path / "1/arrays/manifest.ocdbt").exists()


def test_databases_of_several_processes_are_merged(tmp_path, monkeypatch, arrays, threads):
    monkeypatch.setattr(ocdbt, "_NODE_BYTES", 3000)  # several levels
    folder = tmp_path / "1" / "arrays"
    folder.mkdir(parents=True)
    few = {name: array for name, array in arrays.items() if not name.startswith("t.small.2")}
    for number in range(2):
        mine = {name: few[name] for name in [*few][number::2]}
        disk.write(mine, folder / f"process_{number}", threads)
    database.merge(folder, [folder / "process_0", folder / "process_1"])
    compare(tmp_path, few)


def test_a_database_that_is_damaged_is_not_merged(tmp_path, arrays, threads):
    disk.write(arrays, tmp_path / "process_0", threads)
    nodes = tmp_path / "process_0" / "d" / "nodes"
    nodes.write_bytes(nodes.read_bytes()[:-9] + b"\xff" + nodes.read_bytes()[-8:])
    with pytest.raises(ValueError, match="d/nodes is not what its checksum says"):
        database.merge(tmp_path, [tmp_path / "process_0"])


def test_a_folder_that_cannot_be_made(tmp_path, arrays, threads):
    (tmp_path / "file").write_text("in its place")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        disk.write(arrays, tmp_path / "file" / "arrays", threads)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux has priorities of threads")
def test_the_threads_that_write_run_where_nothing_else_does(tmp_path, monkeypatch, arrays, threads):
    own, found = os.getpriority(os.PRIO_PROCESS, 0), []
    checksum = ocdbt.checksum

    def noted(*arguments):
        if threading.current_thread().name.startswith("checkpoint-file"):
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return checksum(*arguments)

    monkeypatch.setattr(ocdbt, "checksum", noted)
    written(tmp_path, arrays, threads)
    assert found and {*found} == {max(own, NICE)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
