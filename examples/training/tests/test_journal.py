"""A run's record: when it evaluates, saves and ends, and what it leaves."""

import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import spmd_core as spmd
from examples.training.journal import Journal
from examples.training.knobs import knob
from examples.training.meter import Work
from examples.training.resume import SaveError
from examples.training.run_config import RunConfig
from spmd_core.checkpoint import CheckpointManager
from spmd_core.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    device: str = knob("cpu", "device", resumable=True)
    steps: int = knob(5, "steps", resumable=True)
    eval_every: int = knob(2, "steps", resumable=True)
    eval_batches: int = knob(1, "batches", resumable=True)
    log_every: int = knob(1, "steps", resumable=True)
    progress: bool = knob(False, "bar", resumable=True)


@dataclasses.dataclass(frozen=True)
class Data:
    identity: str = "text"
    summary: str = "some text"


def of_run(first: int | None = None, **options: Any) -> Journal:
    """The journal of a run that goes on after step `first`."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**-step)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Journal(
        Config(**options),
        first,
        device=torch.device("cpu"),
        mesh=None,
        work=Work("a line", 1, 4, "tokens", {"6N": 6.0}),
        data=Data(),
        parts=parts,
    )


def followed(
    journal: Journal,
    batches: Iterable[Any],
    *,
    stop_after: int = 0,
    by: Callable[[], None] = spmd.distributed.request_stop,
) -> Any:
    """What a recipe's loop does; the loss of a step is its number."""
    seen = []
    scheduler: Any = journal._scheduler
    scheduler.optimizer.step()
    with journal:
        for step, batch in journal.steps(batches):
            seen.append((step, batch))
            scheduler.step()
            journal.add(torch.tensor(float(step)), torch.tensor(0.5))
            if journal.evaluation_is_due():
                journal.evaluated(loss=step / 2)
            if step == stop_after:
                by()
        return seen, journal.finish()


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def test_a_run_evaluates_saves_and_reports(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": str(tmp_path / "run"), "save_every": 2, "steps": 5}
    seen, report = followed(of_run(**options, results=str(tmp_path / "r.json")), "ab")
    assert seen == [(1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, "a")]  # epoch after epoch
    assert report.losses == [1.0, 2.0, 3.0, 4.0, 5.0] and not report.interrupted
    assert report.lrs == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]  # each before its scheduler's step
    assert report.evals == [{"step": step, "loss": step / 2} for step in (2, 4, 5)]
    assert saved_steps(tmp_path / "run") == [2, 4, 5]
    assert json.loads((tmp_path / "r.json").read_text())["losses"] == report.losses


def test_the_loop_itself_asks_for_batches() -> None:
    """By which a program that the request starts is of the user's line, in plans and warnings."""
    asking = []

    def batches() -> Iterator[None]:
        while True:
            asking.append(sys._getframe(1).f_code.co_name)
            yield

    followed(of_run(eval_batches=0), batches())
    assert asking == ["followed"] * 5


def test_a_resumed_run_has_the_steps_that_are_left(tmp_path: Path) -> None:
    followed(of_run(checkpoint=str(tmp_path)), "ab", stop_after=3)
    seen, report = followed(of_run(first=3, checkpoint=str(tmp_path)), "ab")
    assert [step for step, _ in seen] == [4, 5] and report.resumed_at == 3
    assert saved_steps(tmp_path) == [3, 5]
    seen, report = followed(of_run(first=5, checkpoint=str(tmp_path)), "ab")
    assert (seen, report.losses) == ([], []) and saved_steps(tmp_path) == [3, 5]


def test_evaluations_may_be_left_out() -> None:
    assert followed(of_run(eval_batches=0), "ab")[1].evals == []
    assert followed(of_run(eval_every=0), "ab")[1].evals == [{"step": 5, "loss": 2.5}]


@pytest.mark.parametrize(
    ("by", "why", "code"),
    [
        (spmd.distributed.request_stop, "interrupted", 130),
        (partial(signal.raise_signal, signal.SIGINT), "interrupted", 130),
        (partial(signal.raise_signal, signal.SIGTERM), "preempted", 75),
    ],
)
def test_a_stop_ends_the_run_with_a_save(
    by: Callable[[], None],
    why: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Also in a step in which a save is due.
    journal = of_run(checkpoint=str(tmp_path), save_every=2)
    seen, report = followed(journal, "ab", stop_after=2, by=by)
    assert len(seen) == 2 and report.interrupted and len(report.losses) == 2
    assert saved_steps(tmp_path) == [2] and report.exit_code == code
    assert f"{why}: ending after step 2 of 5" in capsys.readouterr().out
    assert followed(of_run(), "ab")[1].exit_code == 0


@pytest.mark.parametrize("captures", [True, False])
def test_why_a_step_is_recorded_at_each_call_is_said(
    captures: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Config, "recorded_because", lambda _: "it draws masks")
    of_run(device="xla", capture=captures)
    assert ("step   recorded at each call: it draws masks" in capsys.readouterr().out) == captures


def test_a_save_that_fails_on_the_way_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*state: Any) -> None:
        raise CheckpointError("the disk is full.")

    monkeypatch.setattr(CheckpointManager, "save", full)
    with pytest.raises(SaveError, match="the disk is full"):  # of the last step
        followed(of_run(checkpoint=str(tmp_path), save_every=2), "ab")
    out = capsys.readouterr().out
    assert out.count("error: the disk is full. The run goes on.") == 2 and "step     5" in out
