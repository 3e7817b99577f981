"""Chunks from a disk: damage, files that are many, and databases that tensorstore must read."""

import json

import numpy as np
import pytest
import tensorstore as ts
import torch

from spmd_core.checkpoint import disk, disk_arrays, ocdbt, store
from spmd_core.checkpoint.disk_arrays import DiskArrays
from spmd_core.checkpoint.index_reading import OtherFormError
from spmd_core.checkpoint.staging import Staged
from spmd_core.checkpoint.tensorstore_arrays import TensorstoreArrays
from spmd_core.checkpoint.threads import Threads
from spmd_core.errors import CheckpointError


@pytest.fixture
def data():
    return np.random.default_rng(0).standard_normal((100, 700)).astype(np.float32)


@pytest.fixture
def step(tmp_path, data):
    """A step of one array, in chunks of which each has several pieces."""
    blocks = [((slice(i, i + 20), slice(0, 700)), data[i : i + 20]) for i in range(0, 100, 20)]
    (tmp_path / "3").mkdir()
    threads = Threads(1, "write")
    array = Staged(data.shape, data.dtype, (20, 700), blocks)
    disk.write({"t": array}, tmp_path / "3" / "arrays", threads)
    threads.close()
    return tmp_path / "3"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(disk_arrays, "_PIECE_BYTES", 10_000)


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("max_files", [0, 64])
def test_chunks_are_read_by_any_number_of_threads(step, monkeypatch, data, num_threads, max_files):
    monkeypatch.setattr(DiskArrays, "num_threads", num_threads)
    monkeypatch.setattr(disk_arrays, "_MAX_FILES", max_files)
    reader = store.Reader(step)
    for _ in range(5):
        assert np.array_equal(reader.read("t", [slice(3, 95), slice(1, 699)]), data[3:95, 1:699])
    assert isinstance(reader._found, DiskArrays)
    assert len(reader._found._files) == min(max_files, 1)


def test_reads_that_are_cut_short(step, monkeypatch, data):
    read = disk_arrays.os.preadv

    def cut(file, parts, offset):
        return read(file, [parts[0][:777]], offset)

    monkeypatch.setattr(disk_arrays.os, "preadv", cut)
    found = store.Reader(step).read("t", [slice(0, 100), slice(0, 700)])
    assert np.array_equal(found, data)


@pytest.mark.parametrize("call", ["read", "check"])
def test_damage_is_told_with_the_chunk(step, call):
    path, index = step / "arrays" / "d" / "0", [slice(0, 100), slice(0, 700)]
    content = path.read_bytes()

    def used():
        reader = store.Reader(step)
        if call == "read":
            reader.read("t", index)
        else:
            reader.check("t", [(tuple(index), torch.empty(100, 700, device="meta"))])

    # Of the third chunk: its first and its last byte, and its checksum.
    places = DiskArrays(step / "arrays")._index[b"t/c/2/0"]
    for place in (places.offset, places.offset + places.length - 5, places.offset + 56_003):
        changed = bytearray(content)
        changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"t: t/c/2/0 is not what its checksum says\."):
            used()
    path.write_bytes(content[: places.offset + 30_000])
    with pytest.raises(CheckpointError, match=r"t: a file ends early"):
        used()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"t: .*No such file.*d/0"):
        used()


def test_what_is_missing_is_told(step):
    arrays = DiskArrays(step / "arrays")
    with pytest.raises(FileNotFoundError, match=r"arrays has no array 'other'"):
        arrays.array("other")
    arrays.array("t")
    with pytest.raises(FileNotFoundError, match=r"arrays has no chunk t/c/9/0"):
        arrays.chunk("t", (9, 0))
    arrays._index[b"t/c/1/0"] = b"short"
    with pytest.raises(ValueError, match=r"t/c/1/0 has 5 bytes, and not those of a chunk"):
        arrays.chunk("t", (1, 0))


def test_memory_is_used_again(step):
    arrays, seen = DiskArrays(step / "arrays"), []
    arrays.array("t")
    for number in range(5):
        arrays.chunk("t", (number, 0), lambda block: seen.append(block.ctypes.data))
        arrays.chunk("t", (number, 0))
    assert len({*seen}) == 1


def _by_tensorstore(folder, data, codecs):
    """Writes an array as others do."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": f"file://{folder}/", "path": "t/"},
        "metadata": {
            "shape": data.shape,
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [20, 700]}},
            "codecs": codecs,
        },
    }
    ts.open(spec, create=True).result().write(data).result()


def test_databases_of_others_are_read_by_tensorstore(tmp_path, data):
    folder = tmp_path / "1" / "arrays"
    _by_tensorstore(folder, data, disk.CODECS)
    reader = store.Reader(tmp_path / "1")
    assert np.array_equal(reader.read("t", [slice(3, 95), slice(1, 699)]), data[3:95, 1:699])
    assert isinstance(reader._found, TensorstoreArrays)


@pytest.mark.parametrize(
    "change",
    [
        {"codecs": disk.CODECS[:1]},
        {"data_type": "r16"},
        {"chunk_key_encoding": {"name": "v2"}},
        {"chunk_grid": {"name": "rectangular", "configuration": {}}},
    ],
)
def test_arrays_of_other_forms_are_not_guessed(step, change):
    arrays = DiskArrays(step / "arrays")
    text = json.loads(arrays._index[b"t/zarr.json"])
    arrays._index[b"t/zarr.json"] = json.dumps(text | change).encode()
    with pytest.raises(OtherFormError):
        arrays.array("t")
    arrays._index[b"t/zarr.json"] = ocdbt.Place("d/0", 0, 2000)
    with pytest.raises(OtherFormError):
        arrays.array("t")


def test_a_reader_goes_on_by_tensorstore_where_an_array_has_another_form(step, monkeypatch, data):
    def refuse(self, name):
        raise OtherFormError

    monkeypatch.setattr(DiskArrays, "array", refuse)
    reader = store.Reader(step)
    assert np.array_equal(reader.read("t", [slice(0, 100), slice(0, 700)]), data)
    assert isinstance(reader._found, TensorstoreArrays)
