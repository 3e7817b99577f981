"""Recipes under a launcher: emulated devices are shared out, and only process 0 writes."""

from pathlib import Path
from typing import Any

import pytest

import spmd_core as spmd
from examples.training import command
from examples.training.knobs import KnobError
from examples.training.log import Report, RunLog


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(spmd, "simulate", lambda number: calls.append(("simulate", number)))
    monkeypatch.setattr(spmd.distributed, "initialize", lambda: calls.append("initialize"))
    for name in command._NUM_PROCESSES:
        monkeypatch.delenv(name, raising=False)
    return calls


def test_devices_are_those_of_all_processes(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    command.start_devices(8)
    assert started == [("simulate", 8)]
    for name in command._NUM_PROCESSES:
        started.clear()
        with monkeypatch.context() as launched:
            launched.setenv(name, "2")
            command.start_devices(8)
            command.start_devices(None)
            assert started == [("simulate", 4), "initialize", "initialize"]
            with pytest.raises(KnobError, match=r"--devices 3 for 2 processes. Pass a multiple of"):
                command.start_devices(3)


def test_only_process_0_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spmd.distributed, "is_master", lambda: False)
    log = RunLog(log_dir=str(tmp_path / "log"), num_steps=2, shows_progress=True)
    log.say("a line")
    log.scalars(1, {"loss": 1.0})
    log.advance()
    log.finish(Report(config={}))
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""
