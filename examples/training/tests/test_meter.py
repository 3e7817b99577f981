"""What a meter logs and reports for a recipe of images."""

import json
from pathlib import Path

import pytest
import torch

from examples.training.log import Report, RunLog
from examples.training.meter import Meter


def run_of_images(log_dir: Path, flops_per_item: dict[str, float] | None) -> Report:
    """Three steps of 32 images in eager torch, and an evaluation."""
    report = Report(config={}, num_devices=2, peak_flops=1e12)
    run_log = RunLog(log_dir=str(log_dir), num_steps=3, shows_progress=False)
    meter = Meter(
        report,
        items_per_step=32,
        unit="images",
        flops_per_item=flops_per_item,
        run_log=run_log,
        on_xla=False,
    )
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
    assert lines[-1]["eval/accuracy"] == 0.875
    out = capsys.readouterr().out
    assert " images/s  MFU " in out and "(analytic)" in out
    assert "step     3  evaluation: loss 0.2500, accuracy 0.8750\n" in out
    assert "tokens" not in out


def test_without_flops_there_is_no_mfu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_of_images(tmp_path, None)
    out = capsys.readouterr().out
    assert report.items_per_s and report.mfu == {}
    assert "images/s" in out and "MFU" not in out
