"""Files are written whole or not at all, by one writer each, and special files are refused."""

import os
import re
import subprocess
import sys
import threading
import time

import pytest

from spmd_core import files


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    path = tmp_path / "figures.json"
    files.write_text(path, "old")
    path.chmod(0o640)
    with files.replacing(path) as scratch:
        scratch.write_text("new")
        assert path.read_text() == "old" and scratch.parent == path.parent
    assert path.read_text() == "new" and os.listdir(path.parent) == ["figures.json"]
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "half \ud800")
    assert path.read_text() == "new" and os.listdir(path.parent) == ["figures.json"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "there")
    files.write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text() == "text"


def test_special_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path, "a folder"), (tmp_path / "pipe", "a pipe"), ("/dev/null", "a d")):
        for write in (files.check_writable, lambda path: files.write_text(path, "")):
            with pytest.raises(OSError, match=re.escape(f"{path} is {kind}")):
                write(path)
    assert os.listdir(tmp_path) == ["pipe"]


def test_whether_a_file_can_be_written(tmp_path):
    files.check_writable(tmp_path / "new" / "file")
    assert os.listdir(tmp_path / "new") == []
    (tmp_path / "file").write_text("kept")
    files.check_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises((NotADirectoryError, FileExistsError)):
        files.check_writable(tmp_path / "file" / "below")


def test_names_and_folders_that_take_no_file(tmp_path):
    (tmp_path / "file").write_text("kept")
    for path, error, message in (
        (
            tmp_path / "missing" / "file",
            FileNotFoundError,
            "missing does not exist. Make the folder",
        ),
        (tmp_path / "file" / "below", NotADirectoryError, "file is a file. Make the folder"),
        (tmp_path / "file" / "below" / "it", OSError, "does not exist. Make the folder"),
        (tmp_path / ("a" * 300), OSError, "File name too long. Name another path"),
        ("/proc/new", OSError, "'/proc/new': .*. Name another path"),
        ("a\0b", ValueError, r"null (byte|character).*\. Correct the path"),
    ):
        with pytest.raises(error, match=f"^(\\[Errno|a file is written).*; got .*{message}"):
            files.write_text(path, "")
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "kept"


def test_writers_disturb_each_other_nowhere(tmp_path):
    """Also of one process, which two pods on one volume look like: the last one to end wins."""
    path, num_bytes = tmp_path / "file", 200_000

    def write(letter):
        for _ in range(10):
            files.write_text(path, letter * num_bytes)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "abc"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            text = path.read_text()
            assert len(text) == num_bytes and len(set(text)) == 1
    assert os.listdir(tmp_path) == ["file"]


def test_one_writer_of_a_folder_at_a_time(tmp_path):
    inside = []

    def write(number):
        with files.one_at_a_time(tmp_path):
            inside.append(number)
            time.sleep(0.01)
            inside.append(number)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(5)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert inside[::2] == inside[1::2] and sorted(inside[::2]) == [*range(5)]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    script = (
        "import os, sys\nfrom spmd_core import files\n"
        "with files.replacing(sys.argv[1]) as scratch:\n"
        "    scratch.write_text('half')\n    os._exit(9)\n"
    )
    # Only this module is needed, and not what the package imports.
    script = script.replace(
        "from spmd_core import files",
        "import importlib.util as u; spec = u.spec_from_file_location('files', sys.argv[2]); "
        "files = u.module_from_spec(spec); spec.loader.exec_module(files)",
    )
    command = [sys.executable, "-c", script, tmp_path / "file", files.__file__]
    assert subprocess.run(command, check=False).returncode == 9
    (left,) = os.listdir(tmp_path)
    assert re.fullmatch(r"file\.[0-9a-f]{16}\.part", left)
    other = files.Unfinished(tmp_path / "file.txt")  # of another file: not a leftover of this one
    with files.replacing(tmp_path / "file") as scratch:
        files.check_writable(tmp_path / "file")  # which leaves the unfinished one alone
        scratch.write_text("whole")
    assert sorted(os.listdir(tmp_path)) == sorted(["file", other.path.name])
    other.discard()
    assert os.listdir(tmp_path) == ["file"]
