"""A compilation that takes long is shown on a terminal, with what it took last time."""

import io
import json
import re
import time
from types import SimpleNamespace

import pytest
import torch

import spmd_core as spmd
from spmd_core import progress
from spmd_core.program import compile_cache, compile_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    made = Terminal()
    # pytest puts a stderr of its own in place when the test begins.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))
    monkeypatch.setattr(progress, "_EVERY_S", 0.001)
    return made


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(spmd.config, "cache_dir", str(tmp_path))
    return tmp_path


def compiled():
    """Compiles a program anew."""
    spmd.sync()
    compile_cache.clear()
    x = torch.ones(3, device="xla")
    (x * 2 + 1).sum()
    y = x.sin()
    spmd.sync()
    return y


def test_a_long_one_has_a_line_that_is_erased(terminal, folder, monkeypatch):
    monkeypatch.setattr(compile_progress, "QUIET_S", 0.0)
    compiled()
    lines = terminal.getvalue().split("\r\033[K")
    assert lines[0] == lines[-1] == ""
    assert re.fullmatch(r"compiling spmd_\d+ops_\d+in: \d+ operations, 0 s so far", lines[1])


def test_the_next_one_says_what_it_took(terminal, folder, monkeypatch):
    monkeypatch.setattr(compile_progress, "QUIET_S", 0.0)
    compiled()
    (kept,) = folder.glob("*.json")
    seconds = dict.fromkeys(json.loads(kept.read_text()), 41.2)
    assert all(re.fullmatch(r"spmd_\d+ops_\d+in on \d+", name) for name in seconds)
    kept.write_text(json.dumps(seconds))
    terminal.truncate(0)
    compiled()
    assert "s so far, 41 s last time" in terminal.getvalue()


@pytest.mark.parametrize("damage", ["{", "[]", '{"spmd": "long"}'])
def test_a_damaged_file_is_replaced(terminal, folder, monkeypatch, damage):
    monkeypatch.setattr(compile_progress, "QUIET_S", 0.0)
    kept = folder / "compile_seconds.json"
    kept.write_text(damage)
    compiled()
    assert "last time" not in terminal.getvalue()
    assert all(isinstance(s, float) for s in json.loads(kept.read_text()).values())


def test_a_short_one_says_and_keeps_nothing(terminal, folder):
    compiled()
    assert terminal.getvalue() == ""
    assert not list(folder.glob("*.json"))


def test_nothing_is_said_without_a_terminal(capfd, folder, monkeypatch):
    monkeypatch.setattr(compile_progress, "QUIET_S", 0.0)
    compiled()
    assert "compiling" not in capfd.readouterr().err  # XLA may write, too


def test_a_failure_ends_the_line(terminal, folder, monkeypatch):
    monkeypatch.setattr(compile_progress, "QUIET_S", 0.0)

    def fails(graph, name, **options):
        time.sleep(0.01)
        raise spmd.errors.ProgramError("no")

    monkeypatch.setattr(compile_cache, "building", fails)
    with pytest.raises(spmd.errors.ProgramError, match="no"):
        compiled()
    assert terminal.getvalue().endswith("\r\033[K")
    assert not list(folder.glob("*.json"))
    monkeypatch.undo()
    spmd.sync()
