"""What a meter logs and reports for a recipe of images."""

import json
from pathlib import Path

import pytest
import torch

from examples.training.log import Report, RunLog
from examples.training.meter import Meter, Work


def run_of_images(log_dir: Path, flops_per_item: dict[str, float]) -> Report:
    """Three steps of 32 images in eager torch, and an evaluation."""
    report = Report(config={}, num_devices=2, peak_flops=1e12)
    run_log = RunLog(log_dir=str(log_dir), num_steps=3, shows_progress=False)
    work = Work("a network", 1, 32, "images", flops_per_item)
    meter = Meter(report, work=work, run_log=run_log, on_xla=False)
    for step in (1, 2, 3):
        meter.add(step, torch.tensor(1.0 / step), torch.tensor(0.5), 0.1)
        meter.read(up_to=step)
    meter.evaluated(3, loss=0.25, accuracy=0.875)
    report = meter.finished(wall_s=1.0, interrupted=False)
    run_log.finish(report)
    return report


def test_a_meter_counts_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_of_images(tmp_path, {"analytic": 3e9})
    assert report.step_time_s is not None and report.items_per_s is not None
    assert report.unit == "images"
    assert report.items_per_s == pytest.approx(32 / report.step_time_s)
    assert report.mfu == {"analytic": pytest.approx(3e9 * report.items_per_s / 2e12)}
    assert report.losses == pytest.approx([1.0, 1 / 2, 1 / 3])
    assert report.evals == [{"step": 3, "loss": 0.25, "accuracy": 0.875}]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"speed/images_per_s", "mfu/analytic"} <= set(lines[1])
    assert (lines[-1]["loss/eval"], lines[-1]["score/accuracy"]) == (0.25, 0.875)
    out = capsys.readouterr().out
    assert " images/s  MFU " in out and "(analytic)" in out
    assert "step     3  evaluation: loss 0.2500, accuracy 0.8750\n" in out
    assert "tokens" not in out


def test_without_flops_there_is_no_mfu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_of_images(tmp_path, {})
    out = capsys.readouterr().out
    assert report.items_per_s and report.mfu == {}
    assert "images/s" in out and "MFU" not in out


def rows(log_every: int, lag: int, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """The steps of the rows of a run of 12 steps, with an evaluation after the sixth."""
    run_log = RunLog(log_dir="", num_steps=12, shows_progress=False)
    meter = Meter(
        Report(config={}, peak_flops=1e12),
        work=Work("a line", 1, 1, "items"),
        log_every=log_every,
        lag=lag,
        run_log=run_log,
        on_xla=False,
    )
    for step in range(1, 13):
        meter.add(step, torch.tensor(float(step)), torch.tensor(0.5), 0.1)
        if step == 6:
            meter.read(up_to=step)
            meter.evaluated(step, loss=0.25)
        else:
            meter.read_due()
    meter.read(up_to=12)
    meter.finished(wall_s=1.0, interrupted=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert all(float(words[3]) == int(words[1]) for words in lines if words[2] == "loss")
    return [int(words[1]) for words in lines if words[2] == "loss"]


@pytest.mark.parametrize("lag", [0, 2])
def test_each_logged_step_has_a_row(lag: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(1, lag, capsys) == list(range(1, 13))
    assert rows(4, lag, capsys) == [4, 6, 8, 12]
    assert rows(5, lag, capsys) == [5, 6, 10, 12]
    assert rows(100, lag, capsys) == [6, 12]


def test_tensorboard_opens_with_the_losses(tmp_path: Path) -> None:
    run_of_images(tmp_path, {"analytic": 3e9})
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    tags = sorted({tag for line in lines for tag in line if "/" in tag} | {"run/loss"})
    assert tags[:2] == ["loss/eval", "loss/train"]
