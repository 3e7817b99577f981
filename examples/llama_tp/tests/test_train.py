"""The whole script: equal losses for all plans, resuming, options and their errors."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tiers import exhaustive

import spmd_core as spmd
from examples.llama_tp import comparison
from examples.llama_tp.config import SMOKE, TrainConfig, config_from
from examples.llama_tp.resolve import parsed_mesh, with_defaults
from examples.llama_tp.train import main, run
from examples.training.knobs import KnobError

ROOT = Path(__file__).parents[3]
SHORT = {"steps": 4, "eval_every": 0, "eval_batches": 1}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One cache for all tests, so that the tokenizer is trained only once."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def expected(cache_dir: str) -> Any:
    """A short run in eager torch."""
    return run(smoke(cache_dir, device="cpu"))


def smoke(cache_dir: str, **knobs: Any) -> TrainConfig:
    return TrainConfig(**{**SMOKE, **SHORT, "cache_dir": cache_dir, "progress": False, **knobs})


def check_equal(report: Any, expected: Any) -> None:
    assert report.losses == pytest.approx(expected.losses, rel=1e-5)
    assert report.grad_norms == pytest.approx(expected.grad_norms, rel=2e-3)
    assert report.evals[-1]["loss"] == pytest.approx(expected.evals[-1]["loss"], rel=1e-5)


@pytest.mark.one_device
def test_one_device_has_the_losses_of_eager_torch(
    cache_dir: str, expected: Any, num_devices: int
) -> None:
    mesh = "" if num_devices == 1 else f"tensor={num_devices}"
    parallel = {"sequence_parallel": bool(mesh), "loss_parallel": bool(mesh)}
    report = run(smoke(cache_dir, mesh=mesh, **parallel))
    check_equal(report, expected)
    # The steps, and the evaluation.
    assert report.compiles == 2
    assert report.losses[-1] < report.losses[0]


@pytest.mark.exhaustive  # test_weights.py compares a run on a mesh that is found, too
@pytest.mark.usefixtures("finding_a_mesh")
@pytest.mark.parametrize("scan", [False, True])
def test_a_mesh_that_is_found_has_the_losses_of_eager_torch(
    cache_dir: str,
    expected: Any,
    num_devices: int,
    capsys: pytest.CaptureFixture[str],
    scan: bool,
) -> None:
    with spmd.strict():
        report = run(smoke(cache_dir, mesh="auto", scan=scan))
    check_equal(report, expected)
    assert report.num_devices == math.prod(report.mesh.values()) == num_devices
    assert report.compiles == 2  # of captured steps, and of the evaluation
    assert bool(report.collectives) == (num_devices > 1)
    out = capsys.readouterr().out
    axes = ",".join(f"{axis}={size}" for axis, size in report.mesh.items())
    assert f"on {num_devices} xla device(s) mesh auto" in out
    assert out.count(f"mesh   auto: {axes}, found for the first step") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel": True}, "--sequence-parallel too, which splits activations"),
        ({"loss_parallel": True}, "--loss-parallel too, which splits the logits"),
    ],
)
def test_what_a_mesh_that_is_found_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KnobError) as error:
        with_defaults(TrainConfig(mesh="auto", devices=4, **options))
    said = str(error.value)
    assert said.startswith("--mesh auto finds the mesh and the shardings for the first step; got ")
    assert f"got {message}" in said and "for instance --mesh tensor=4." in said
    assert f"Leave out {message.split()[0]}, or name the axes" in said


@pytest.mark.parametrize(
    "knobs",
    [
        exhaustive({"mesh": "data=2,tensor=4"}),
        exhaustive(
            {"mesh": "data=2,tensor=4", "sequence_parallel": True, "loss_parallel": True},
        ),
        exhaustive(
            {"mesh": "data=2,fsdp=2,tensor=2", "sequence_parallel": True, "accumulate": 2},
        ),
        exhaustive({"mesh": "fsdp=2,tensor=4", "sequence_parallel": True, "remat": "full"}),
        {
            "mesh": "data=2,fsdp=2,tensor=2",
            "loss_parallel": True,
            "accumulate": 2,
            "remat": "full",
            "scan": True,
        },
        exhaustive({"mesh": "data=2,context=4"}),
        # As `test_shardings.py` has the gradients of this mesh.
        exhaustive(
            {"mesh": "fsdp=2,context=2,tensor=2", "sequence_parallel": True, "remat": "full"}
        ),
    ],
    ids=[
        "TP",
        "SP and loss",
        "HSDP",
        "FSDP, recomputed",
        "a loop",
        "CP",
        "FSDP, CP and SP, recomputed",
    ],
)
def test_every_plan_has_the_losses_of_eager_torch(
    knobs: dict[str, Any], cache_dir: str, expected: Any, num_devices: int
) -> None:
    if num_devices != 8:
        pytest.skip("the meshes are those of 8 devices")
    report = run(smoke(cache_dir, **knobs))
    check_equal(report, expected)
    assert report.num_devices == 8
    kinds = {(c["kind"], c["axes"]) for c in report.collectives}
    split = knobs.get("sequence_parallel", False)
    if "tensor" in knobs["mesh"]:
        assert (("reduce-scatter" if split else "all-reduce"), "tensor") in kinds
    if "context" in knobs["mesh"]:
        assert ("collective-permute", "context") in kinds
        assert ("all-gather", "context") not in kinds


@pytest.mark.parametrize("device", ["cpu", exhaustive("xla")])
def test_bf16_is_close_to_fp32(
    device: str, cache_dir: str, expected: Any, num_devices: int
) -> None:
    """On devices `test_one_program.py` trains in bf16, too."""
    mesh = f"tensor={num_devices}" if device == "xla" else ""
    report = run(smoke(cache_dir, device=device, mesh=mesh, dtype="bf16", eval_batches=0))
    assert report.losses == pytest.approx(expected.losses, abs=0.03)
    assert report.losses != expected.losses


@pytest.mark.exhaustive  # as the others, and test_minimal.py
def test_a_run_resumes_on_another_mesh(
    cache_dir: str, tmp_path: Path, expected: Any, num_devices: int
) -> None:
    path = str(tmp_path)
    run(smoke(cache_dir, mesh=f"tensor={num_devices}", checkpoint=path, save_every=2))
    rest = run(smoke(cache_dir, device="cpu", checkpoint=path, resume="2"))
    assert rest.resumed_at == 2
    assert rest.losses == pytest.approx(expected.losses[2:], rel=2e-4)


def test_the_command_line(cache_dir: str, tmp_path: Path) -> None:
    results = tmp_path / "r.json"
    arguments = ["--steps", "3", "--eval-batches", "0", "--device", "cpu", "--no-progress"]
    arguments += ["--cache-dir", cache_dir, "--log-dir", str(tmp_path), "--results", str(results)]
    assert main(["--smoke", *arguments]) == 0
    report = json.loads(results.read_text())
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert len(report["losses"]) == 3 and set(report["mfu"]) == {"6N", "6N+12LdS", "6N+6LdS"}


def test_the_sample_of_the_readme(num_devices: int, capsys: pytest.CaptureFixture[str]) -> None:
    if num_devices != 8:
        pytest.skip("the sample has eight devices")
    text = (ROOT / "examples" / "llama_tp" / "README.md").read_text()
    (sample,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(sample, {})
    loss, per_s, peak = map(float, capsys.readouterr().out.splitlines()[-1].split())
    assert loss < 6.2 and min(per_s, peak) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--device", "cpu", "--mesh", "tensor=8"],
            "a mesh needs the xla device; got --device cpu",
        ),
        (["--device", "cpu", "--batch", "-1"], "--batch must be at least 0; got -1"),
        (["--devices", "8"], "got --devices 8 and no --mesh. Add for instance --mesh tensor=8"),
        (["--device", "cpu", "--save-every", "2"], "got 2 and no --checkpoint"),
        (["--device", "cpu", "--accumulate", "3"], "got 8 and 3. Pass for instance --batch 9"),
        (
            ["--device", "cpu", "--resume", "run.pt"],
            "a saved step, or auto; got 'run.pt'. Leave it",
        ),
        (
            ["--device", "cpu", "--sequence-parallel"],
            "--sequence-parallel splits over a mesh axis tensor; got --mesh ''",
        ),
        (
            ["--device", "cpu", "--batch", "4000"],
            "the text must fill one training batch of 4000 blocks",
        ),
    ],
)
def test_what_cannot_work_is_said_in_a_line(
    arguments: list[str], message: str, cache_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--smoke", "--cache-dir", cache_dir, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"mesh": "model=8"}, "mesh axes must be among data, fsdp, context, tensor; got ['model']"),
        ({"mesh": "data=8", "batch": 12}, "got 12 for 8. Pass for instance --batch 16"),
        ({"mesh": "data=8", "loss_parallel": True}, "--loss-parallel splits over a mesh axis"),
        (
            {"mesh": "tensor=8", "preset": "125M"},
            "tensor=8 for the 12 heads of 125M. Pass one of tensor=1, 2, 3, 4, 6, 12, or another",
        ),
        (
            {"mesh": "tensor=8", "sequence_parallel": True, "seq": 1023},
            "must divide --seq; got tensor=8 for 1023 tokens. Pass for instance --seq 1024",
        ),
        (
            {"mesh": "data=2,context=4", "seq": 1020},
            "got 1020 tokens for 8 parts. Pass for instance --seq 1024",
        ),
        (
            {"mesh": "context=4,tensor=2", "sequence_parallel": True, "seq": 1036},
            "got 1036 tokens for 16 parts. Pass for instance --seq 1040",
        ),
    ],
)
def test_a_mesh_must_fit(knobs: dict[str, Any], message: str, num_devices: int) -> None:
    if num_devices != 8:
        pytest.skip("the numbers are those of 8 devices")
    spmd.use_spmd()
    with pytest.raises(KnobError, match=re.escape(message)):
        parsed_mesh(with_defaults(TrainConfig(**{"preset": "debug", **knobs})))


def test_help_has_a_line_for_every_knob(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_from(["--help"])
    out = capsys.readouterr().out
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    assert all(f"--{name.replace('_', '-')}" in out for name in names)
    assert "auto: the mesh and the shardings are found for the first step" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss-parallel"], "a comparison chooses --mesh, the plans"),
        (["--devices", "3"], "a comparison needs an even number of devices; got 3"),
    ],
)
def test_what_a_comparison_refuses(
    arguments: list[str], message: str, cache_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert comparison.main(["--smoke", "--cache-dir", cache_dir, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_comparison_runs_every_plan(cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def compared(module: str, variants: Any, *, common: Any, folder: Path) -> None:
        seen.update({v.name: v.options for v in variants})

    monkeypatch.setattr("examples.llama_tp.comparison.compare", compared)
    assert comparison.main(["--smoke", "--devices", "8", "--cache-dir", cache_dir]) == 0
    assert seen["one device"] == ["--devices", "1"]
    loss = ["--sequence-parallel", "--loss-parallel"]
    assert seen["TP"] == ["--devices", "8", "--mesh", "data=2,tensor=4"]
    assert seen["HSDP x TP"] == ["--devices", "8", "--mesh", "data=2,fsdp=2,tensor=2", *loss]
    assert len(seen) == 7
