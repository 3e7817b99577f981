"""The whole script: equal losses on all meshes, learning, resuming, options and their errors."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import exhaustive

import spmd_core as spmd
from examples.resnet_spatial.config import SMOKE, TrainConfig, config_from, with_defaults
from examples.resnet_spatial.data import DataError
from examples.resnet_spatial.resolve import parsed_mesh
from examples.resnet_spatial.train import main, run
from examples.training.knobs import KnobError
from examples.training.log import Report
from examples.training.resume import ResumeError

ROOT = Path(__file__).parents[3]


def smoke(**knobs: Any) -> TrainConfig:
    return TrainConfig(**{**SMOKE, "device": "cpu", "progress": False, **knobs})


def child(*arguments: str, devices: int = 0, mesh: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the script in a process of its own."""
    paths = [str(ROOT / "packages" / name / "src") for name in ("spmd-core", "spmd-data")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SPMD_STRICT": "1"}
    command = [sys.executable, "-W", "error", "-m", "examples.resnet_spatial.train", "--smoke"]
    command += ["--no-progress", "--devices", str(devices), "--mesh", mesh, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def report_of(path: Path, *arguments: str, devices: int, mesh: str) -> dict[str, Any]:
    done = child(*arguments, "--results", str(path), devices=devices, mesh=mesh)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Involuntary full rematerialization" not in done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# 56 pixels end in 7 rows.
@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        # A resumed run below is on this mesh, and compared with eager torch as well.
        exhaustive(8, "data=2,height=2,width=2"),
        exhaustive(1, ""),
        exhaustive(8, "height=8"),
        exhaustive(8, "height=4,width=2"),
    ],
)
def test_every_mesh_has_the_losses_of_eager_torch(
    devices: int, mesh: str, on_devices: Callable[..., Any], num_devices: int
) -> None:
    if num_devices != 8:
        pytest.skip("the meshes are of eight devices")
    options = {"steps": 3, "image_size": 56, "batch": 4, "eval_batches": 1, "ema": 0.9}
    expected = run(smoke(**options))
    report = on_devices(run, smoke(**options, device="xla", mesh=mesh))
    assert report.losses == pytest.approx(expected.losses, rel=1e-4)
    assert report.grad_norms == pytest.approx(expected.grad_norms, rel=1e-3)
    for name in ("loss", "ema_loss"):
        assert report.evals[-1][name] == pytest.approx(expected.evals[-1][name], rel=1e-3)
    assert report.num_devices == devices
    kinds = {c["kind"] for c in report.collectives}
    assert kinds == ({"collective-permute", "all-reduce"} if mesh else set())
    assert report.peak_bytes > 0 and report.program_flops > 0
    # The copies for the average, the steps, and the two evaluations.
    assert report.compiles == 4


@pytest.mark.exhaustive  # what finds a mesh is shared with the other recipes
@pytest.mark.usefixtures("finding_a_mesh")
def test_a_mesh_that_is_found_has_the_losses_of_eager_torch(
    num_devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"steps": 3, "batch": 8, "eval_batches": 1, "ema": 0.9}
    expected = run(smoke(**options))
    with spmd.strict():
        report = run(smoke(**options, device="xla", mesh="auto"))
    assert report.losses == pytest.approx(expected.losses, rel=1e-4)
    for name in ("loss", "ema_loss"):
        assert report.evals[-1][name] == pytest.approx(expected.evals[-1][name], rel=1e-3)
    assert report.num_devices == num_devices
    axes = ",".join(f"{axis}={size}" for axis, size in report.mesh.items())
    assert f"mesh   auto: {axes}, found for the first step" in capsys.readouterr().out


def test_a_run_in_eager_torch_learns_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"model": "small", "steps": 60, "batch": 64, "lr": 0.2, "warmup": 15, "eval_every": 0}
    report = run(smoke(**options, ema=0.9, channels_last=True, log_dir=str(tmp_path)))
    (last,) = report.evals[-1:]
    assert last["top1"] > 0.85 and last["top5"] > 0.98 and last["ema_top1"] > 0.85
    assert report.losses[-1] < report.losses[0] - 0.8
    assert report.unit == "images" and set(report.mfu) == {"3 x forward"}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"score/top1", "score/top5"} <= set().union(*lines)
    assert json.loads((tmp_path / "report.json").read_text())["num_params"] == report.num_params
    out = capsys.readouterr().out
    assert "shapes of 32 x 32" in out and "images/s" in out
    tags = tensorboard_tags(tmp_path)
    assert {"loss/train", "score/top1", "images"} <= tags


def tensorboard_tags(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import (  # noqa: PLC0415
        EventAccumulator,
    )

    events = EventAccumulator(str(folder))
    events.Reload()
    return {*events.Tags()["scalars"], *events.Tags()["images"]}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("devices", "mesh"), [(1, ""), (8, "data=2,height=2,width=2")])
def test_over_95_percent_on_the_shapes(devices: int, mesh: str, tmp_path: Path) -> None:
    options = ["--model", "small", "--batch", "64", "--lr", "0.2", "--steps", "120"]
    options += ["--warmup", "20", "--eval-every", "0", "--log-every", "10"]
    report = report_of(tmp_path / "r.json", *options, devices=devices, mesh=mesh)
    assert report["evals"][-1]["top1"] > 0.95


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """The losses of a short run."""
    return run(smoke(steps=3, eval_batches=0)).losses


@pytest.mark.parametrize(
    "knobs", [{"dtype": "bf16"}, {"channels_last": True}, {"label_smoothing": 0.3}, {"clip": 0.1}]
)
def test_options_of_the_computation(knobs: dict[str, Any], plain: list[float]) -> None:
    other = run(smoke(steps=3, eval_batches=0, **knobs)).losses
    if "channels_last" in knobs:
        assert other == pytest.approx(plain, rel=1e-5)
    else:
        assert other != plain
        assert other == pytest.approx(plain, abs=0.3)


def resumed(path: Path, **knobs: Any) -> tuple[Report, Report, Report]:
    """A whole run, its first half, and the second half that goes on from it."""
    options = {"steps": 4, "ema": 0.5, "eval_every": 0, **knobs}
    whole = run(smoke(**options))
    first = run(smoke(**options, checkpoint=str(path), save_every=2))
    return whole, first, run(smoke(**options, checkpoint=str(path), resume="2"))


def test_a_run_resumes_exactly(tmp_path: Path, folder: Callable[..., Path]) -> None:
    for data in ("shapes", str(folder(per_class=4))):
        whole, first, second = resumed(tmp_path / f"run-{Path(data).name}", data=data)
        assert whole.losses == first.losses
        assert second.resumed_at == 2
        assert second.losses == whole.losses[2:]
        assert second.evals[-1] == whole.evals[-1]


def test_a_run_resumes_on_another_mesh(
    tmp_path: Path, on_devices: Callable[..., Any], num_devices: int
) -> None:
    if num_devices != 8:
        pytest.skip("the mesh is of eight devices")
    # Of 56 pixels, which end in 7 rows and columns.
    options = {"steps": 4, "ema": 0.5, "eval_every": 0, "image_size": 56, "batch": 4}
    options |= {"eval_batches": 1}
    whole = run(smoke(**options, checkpoint=str(tmp_path), save_every=2))
    there = {"device": "xla", "mesh": "data=2,height=2,width=2"}
    report = on_devices(run, smoke(**options, **there, checkpoint=str(tmp_path), resume="2"))
    assert report.losses == pytest.approx(whole.losses[2:], rel=1e-4)
    assert report.grad_norms == pytest.approx(whole.grad_norms[2:], rel=1e-3)
    for name in ("loss", "ema_loss"):
        assert report.evals[-1][name] == pytest.approx(whole.evals[-1][name], rel=1e-3)
    assert {c["kind"] for c in report.collectives} == {"collective-permute", "all-reduce"}


def test_a_saved_run_of_other_options(tmp_path: Path) -> None:
    run(smoke(steps=1, eval_batches=0, checkpoint=str(tmp_path)))
    with pytest.raises(ResumeError, match=re.escape("--momentum 0.5, and 0.9 in")):
        run(smoke(steps=1, momentum=0.5, checkpoint=str(tmp_path)))


def test_a_full_disk_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        options = ["--device", "cpu", "--steps", "1", "--no-progress"]
        code = main(["--smoke", *options, "--checkpoint", str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, previous)
    assert code == 1
    assert "step 1 could not be written to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--mesh", "height=8"], "a mesh needs the xla device"),
        (["--device", "cpu", "--mesh", "auto"], "got --device cpu with --mesh 'auto'"),
        (["--device", "cpu", "--batch", "-1"], "--batch must be at least 1; got -1"),
        (["--device", "cpu", "--ema", "1"], "--ema is a share, at least 0 and below 1; got 1.0"),
        (["--device", "cpu", "--image-size", "8"], "images of shapes need at least 16 rows"),
        (["--device", "cpu", "--data", "./missing"], "got 'missing'"),
        (["--devices", "8"], "got --devices 8 and no --mesh. Add for instance --mesh height=8"),
        (["--device", "cpu", "--save-every", "2"], "got 2 and no --checkpoint"),
        (["--device", "cpu", "--resume", "none"], "a saved step, or auto; got 'none'. Leave it"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--smoke", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ") and "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("knobs", "error", "message"),
    [
        ({"mesh": "rows=ALL"}, KnobError, "mesh axes must be among data, height, width; got"),
        ({"mesh": "height=3"}, KnobError, "Add --devices 3, which emulates them"),
        ({"mesh": "data=ALL", "batch": 9}, KnobError, "--batch must divide by the mesh axis data"),
        (
            {"mesh": "height=ALL", "image_size": 1, "data": "fake"},
            KnobError,
            "--image-size must be at least the mesh axis height; got 1 for height=",
        ),
    ],
)
def test_meshes_that_cannot_work(
    knobs: dict[str, Any], error: type[Exception], message: str, num_devices: int
) -> None:
    if num_devices == 1 and "ALL" in knobs["mesh"] and "rows" not in knobs["mesh"]:
        pytest.skip("needs several devices")
    spmd.use_spmd()
    mesh = knobs["mesh"].replace("ALL", str(num_devices))
    with pytest.raises(error, match=re.escape(message)):
        parsed_mesh(with_defaults(smoke(**{**knobs, "mesh": mesh, "device": "xla"})))


def test_an_image_that_breaks_in_a_run(folder: Callable[..., Path]) -> None:
    root = folder()
    (root / "ring" / "0.png").write_bytes(b"")
    with pytest.raises(DataError, match=re.escape("ring/0.png is not")):
        run(smoke(data=str(root), steps=4))
    assert len(run(smoke(data=str(root), steps=4, skip_unreadable=True)).losses) == 4


def test_help_has_a_line_for_every_knob(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_from(["--help"])
    out = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in out for name in TrainConfig.__dataclass_fields__)
    assert "auto: the mesh and the shardings are found for the first step" in " ".join(out.split())


def test_smoke_only_changes_defaults() -> None:
    config = config_from(["--smoke", "--steps", "3", "--mesh", "height=8"])
    assert (config.model, config.steps, config.mesh) == ("smoke", 3, "height=8")
    assert config_from([]) == TrainConfig()


def test_seeds_decide() -> None:
    first, second, other = (run(smoke(steps=2, eval_batches=0, seed=s)).losses for s in (1, 1, 2))
    assert first == second != other
    assert torch.tensor(first).isfinite().all()
