"""A run's record: when it evaluates, saves and ends, and what it leaves."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spmd_core as spmd
from examples.training import resume
from examples.training.journal import Journal
from examples.training.meter import Work
from examples.training.resume import SaveError
from examples.training.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    device: str = "cpu"
    steps: int = 5
    eval_every: int = 2
    eval_batches: int = 1
    log_every: int = 1
    progress: bool = False


@dataclasses.dataclass(frozen=True)
class Data:
    identity: str = "text"
    summary: str = "some text"


def of_run(first: int = 0, **options: Any) -> Journal:
    """The journal of a run that goes on after step `first`."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**-step)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    saved = {
        "step": first,
        "data": "text",
        "random": torch.get_rng_state(),
        "parts": {name: part.state_dict() for name, part in parts.items()},
    }
    return Journal(
        Config(**options),
        saved if first else None,
        device=torch.device("cpu"),
        mesh=None,
        work=Work("a line", 1, 4, "tokens", {"6N": 6.0}),
        data=Data(),
        parts=parts,
    )


def followed(journal: Journal, batches: Iterable[Any], *, stop_after: int = 0) -> Any:
    """What a recipe's loop does; the loss of a step is its number."""
    seen = []
    scheduler: Any = journal._parts["scheduler"]
    scheduler.optimizer.step()
    with journal:
        for step, batch in journal.steps(batches):
            seen.append((step, batch))
            scheduler.step()
            journal.add(torch.tensor(float(step)), torch.tensor(0.5))
            if journal.evaluation_is_due():
                journal.evaluated(loss=step / 2)
            if step == stop_after:
                spmd.distributed.request_stop()
        return seen, journal.finish()


def saved_step(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["step"])


def test_a_run_evaluates_saves_and_reports(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": str(tmp_path / "{step}"), "save_every": 2, "steps": 5}
    seen, report = followed(of_run(**options, results=str(tmp_path / "r.json")), "ab")
    assert seen == [(1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, "a")]  # epoch after epoch
    assert report.losses == [1.0, 2.0, 3.0, 4.0, 5.0] and not report.interrupted
    assert report.lrs == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]  # each before its scheduler's step
    assert report.evals == [{"step": step, "loss": step / 2} for step in (2, 4, 5)]
    assert {name: saved_step(tmp_path / name) for name in "245"} == {"2": 2, "4": 4, "5": 5}
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
    path = tmp_path / "run.pt"
    seen, report = followed(of_run(first=3, checkpoint=str(path)), "ab")
    assert [step for step, _ in seen] == [4, 5] and report.resumed_at == 3
    assert saved_step(path) == 5
    path.unlink()
    seen, report = followed(of_run(first=5, checkpoint=str(path)), "ab")
    assert (seen, report.losses) == ([], []) and not path.exists()


def test_evaluations_may_be_left_out() -> None:
    assert followed(of_run(eval_batches=0), "ab")[1].evals == []
    assert followed(of_run(eval_every=0), "ab")[1].evals == [{"step": 5, "loss": 2.5}]


def test_a_stop_ends_the_run_with_a_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, report = followed(of_run(checkpoint=str(tmp_path / "run.pt")), "ab", stop_after=2)
    assert len(seen) == 2 and report.interrupted and len(report.losses) == 2
    assert saved_step(tmp_path / "run.pt") == 2
    assert "interrupted: ending after step 2 of 5" in capsys.readouterr().out


@pytest.mark.parametrize("captures", [True, False])
def test_why_a_step_is_recorded_at_each_call_is_said(
    captures: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Config, "recorded_because", lambda _: "it draws masks")
    of_run(device="xla", capture=captures)
    assert ("step   recorded at each call: it draws masks" in capsys.readouterr().out) == captures


def test_a_save_that_fails_on_the_way_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: str, **state: Any) -> None:
        raise SaveError("the disk is full.")

    monkeypatch.setattr(resume, "save", full)
    with pytest.raises(SaveError, match="the disk is full"):  # of the last step
        followed(of_run(checkpoint="run.pt", save_every=2), "ab")
    out = capsys.readouterr().out
    assert out.count("error: the disk is full. The run goes on.") == 2 and "step     5" in out
