"""Long work has a line on a terminal, which is erased at its end; a pipe gets nothing."""

import io
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core import progress
from spmd_core.checkpoint import load_checkpoint
from spmd_core.runtime import buffers


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    made = Terminal()
    # pytest puts a stderr of its own in place when the test begins.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))
    monkeypatch.setattr(progress, "_EVERY_S", 0.001)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    return made


def lines(terminal):
    found = terminal.getvalue().split("\r\033[K")
    assert found[-1] == ""  # erased
    return [line for line in found if line]


def wait_for(terminal, text):
    end = time.monotonic() + 10
    while text not in terminal.getvalue() and time.monotonic() < end:
        time.sleep(0.001)
    assert text in terminal.getvalue()


def test_the_line_has_bytes_and_seconds(terminal):
    with progress.shown("loading", total_bytes=4_300_000_000) as advance:
        advance(1_200_000_000)
        wait_for(terminal, "loading: 1.2 of 4.3 GB, 0 s so far")
    assert all(line.startswith("loading: ") for line in lines(terminal))


def test_the_line_fits_the_terminal(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    with progress.shown("saving " + "long/" * 20, total_bytes=2_000_000_000):
        wait_for(terminal, "..")
    (line, *_) = lines(terminal)
    assert len(line) == 39
    assert line.startswith("saving ") and line.endswith("...: 0.0 of 2.0 GB, 0 s so far")


def test_the_innermost_work_has_the_line(terminal):
    with progress.shown("outer"):
        wait_for(terminal, "outer")
        with progress.shown("inner", last=lambda: ", 41 s last time"):
            wait_for(terminal, "inner, 0 s so far, 41 s last time")
            time.sleep(0.01)
            assert lines(SimpleNamespace(getvalue=lambda: terminal.getvalue() + "\r\033[K"))[
                -1
            ].startswith("inner")


def test_short_work_and_work_that_fails(terminal, monkeypatch):
    try:
        with progress.shown("failing"):
            wait_for(terminal, "failing")
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert not progress._works and lines(terminal)
    terminal.truncate(0)
    terminal.seek(0)
    monkeypatch.setattr(progress, "QUIET_S", 60)
    with progress.shown("short"):
        pass
    assert terminal.getvalue() == ""


def test_a_pipe_gets_nothing(monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with progress.shown("piped") as advance:
        advance(3)
        time.sleep(0.01)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=None))
    with progress.shown("without a terminal"):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.one_device
def test_what_is_shown(monkeypatch, tmp_path):
    """Loads, saves, restores and large uploads, each with what it works on."""
    shown = {}

    @contextmanager
    def noted(text, *, total_bytes=0, **others):
        shown[text] = done = [total_bytes, 0]

        def advance(num_bytes):
            done[1] += num_bytes

        yield advance

    monkeypatch.setattr(progress, "shown", noted)
    monkeypatch.setattr(buffers, "_SHOWN_BYTES", 1 << 15)
    model, num_bytes = nn.Linear(64, 64, device="xla"), (64 * 64 + 64) * 4
    spmd.save_safetensors(model, tmp_path / "weights")
    spmd.load_safetensors(model, tmp_path / "weights")
    with spmd.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, {"model": model})
        manager.wait()
        manager.restore({"model": model})
    load_checkpoint(tmp_path / "run", {"model": model})
    (torch.ones(100, 100).to("xla") + 1).cpu()
    programs = [text for text in shown if text.startswith("compiling spmd_")]
    assert programs and {text: done for text, done in shown.items() if text not in programs} == {
        f"saving {tmp_path}/weights": [num_bytes, num_bytes],
        f"loading {tmp_path}/weights": [num_bytes, num_bytes],
        "copying step 3 from the devices": [0, 0],
        f"writing step 3 to {tmp_path}/run": [0, 0],
        f"restoring step 3 from {tmp_path}/run": [0, 0],
        f"loading from {tmp_path}/run": [0, 0],
        "uploading float32[100, 100], 0.0 GB": [0, 0],
    }
