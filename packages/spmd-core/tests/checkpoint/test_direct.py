"""A file's bytes, whatever goes past the system's cache."""

import errno
import mmap
import os

import numpy as np
import pytest

from spmd_core.checkpoint import direct
from spmd_core.checkpoint.direct import DirectFile


@pytest.fixture
def pages():
    """Memory that begins with a page."""
    memory = np.frombuffer(mmap.mmap(-1, 4 << 20), np.uint8)
    memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), np.uint8)
    return memory


def written(path, parts):
    """Writes parts, each with 4 bytes behind it; compares what is read, and returns offsets."""
    file = DirectFile(path)
    starts = []
    for part in parts:
        starts.append(file.append(part))
        file.extend(np.frombuffer(b"end.", np.uint8))
    file.finish()
    file.close()
    found = path.read_bytes()
    for start, part in zip(starts, parts):
        assert found[start : start + len(part) + 4] == part.tobytes() + b"end."
    return starts


def test_large_and_small_data_in_turns(tmp_path, pages):
    large = [pages[: 1 << 20], pages[4096 : (3 << 20) + 77], pages[: (128 << 10) + 4095]]
    small = [pages[:1], pages[5:5], pages[3:100_000]]
    unaligned = [pages[64 : 2 << 20]]  # goes through the buffer, which has less room
    starts = written(tmp_path / "file", [*small, *large, *small, *unaligned, *large, *small])
    assert [starts[i] % 4096 for i in (3, 4, 5)] == [0, 0, 0]
    assert starts[:3] == [0, 5, 9]  # small ones lie behind each other
    assert os.path.getsize(tmp_path / "file") % 4096 == 0


def test_an_empty_file(tmp_path):
    assert written(tmp_path / "file", []) == []
    assert os.path.getsize(tmp_path / "file") == 0


def test_large_data_is_written_from_where_it_lies_past_the_cache(tmp_path, pages, monkeypatch):
    given = []
    write = os.pwritev

    def noted(file, parts, offset):
        given.extend((np.frombuffer(part, np.uint8).ctypes.data, len(part)) for part in parts)
        return write(file, parts, offset)

    monkeypatch.setattr(os, "pwritev", noted)
    written(tmp_path / "file", [pages])
    assert (pages.ctypes.data, len(pages)) in given


@pytest.mark.parametrize("when", ["opened", "written"])
def test_a_file_system_without_direct_writes(tmp_path, pages, monkeypatch, when):
    write, change, refused = os.pwritev, direct.fcntl.fcntl, []

    def changed(file, command, flags=0):
        if command == direct.fcntl.F_SETFL and flags & direct._DIRECT and when == "opened":
            refused.append(when)
            raise OSError(errno.EINVAL, "no direct writes")
        return change(file, command, flags)

    def put(file, parts, offset):
        if change(file, direct.fcntl.F_GETFL) & direct._DIRECT:
            refused.append(when)
            raise OSError(errno.EINVAL, "no direct writes")
        return write(file, parts, offset)

    monkeypatch.setattr(direct.fcntl, "fcntl", changed)
    monkeypatch.setattr(os, "pwritev", put)
    written(tmp_path / "file", [pages, pages[:10], pages[:500_000]])
    assert refused == [when] or not direct._DIRECT


@pytest.mark.parametrize("num_bytes", [1, 4096, 5000, 300_001])
def test_writes_that_are_cut_short(tmp_path, pages, monkeypatch, num_bytes):
    write, control = os.pwritev, direct.fcntl.fcntl

    def cut(file, parts, offset):
        flags = control(file, direct.fcntl.F_GETFL)
        if num_bytes % 4096:  # as a disk that is almost full may do
            control(file, direct.fcntl.F_SETFL, flags & ~direct._DIRECT)
        count = write(file, [parts[0][:num_bytes]], offset)
        control(file, direct.fcntl.F_SETFL, flags)
        return count

    monkeypatch.setattr(os, "pwritev", cut)
    end = 8192 if num_bytes == 1 else 1 << 20
    written(tmp_path / "file", [pages[:10], pages[:end], pages[:10]])


def test_errors_of_the_disk_are_raised(tmp_path, pages, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    file = DirectFile(tmp_path / "file")
    with pytest.raises(OSError, match="No space left"):
        file.append(pages)
    file.close()
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")
