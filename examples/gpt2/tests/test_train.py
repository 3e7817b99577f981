"""The whole script: options and their errors, eager torch, equal losses on all meshes, Ctrl-C."""

import itertools
import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from tiers import exhaustive

import spmd_core as spmd
from examples.gpt2 import comparison
from examples.gpt2.config import (
    SMOKE,
    TrainConfig,
    config_from,
    with_defaults,
)
from examples.gpt2.resolve import parsed_mesh
from examples.gpt2.train import main, run
from examples.training.knobs import KnobError
from examples.training.schedule import lr_factor
from spmd_core.auto import searches
from spmd_core.runtime.disk_cache import ProgramCache

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One cache for all tests, so that the tokenizer is trained only once."""
    return str(tmp_path_factory.mktemp("cache"))


def smoke(cache_dir: str, **knobs: Any) -> TrainConfig:
    return TrainConfig(
        **{**SMOKE, "device": "cpu", "cache_dir": cache_dir, "progress": False, **knobs}
    )


def command(cache_dir: str, *arguments: str) -> list[str]:
    return [
        "-W",
        "error",
        "-m",
        "examples.gpt2.train",
        "--smoke",
        "--no-progress",
        "--cache-dir",
        cache_dir,
        *arguments,
    ]


def environment() -> dict[str, str]:
    paths = [str(ROOT / "packages" / name / "src") for name in ("spmd-core", "spmd-data")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SPMD_STRICT": "1",
        "SPMD_CACHE_DIR": "",
    }


def test_a_run_in_eager_torch_learns_and_reports(
    cache_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_dir, results = tmp_path / "log", tmp_path / "deep" / "results.json"
    code = main(
        [
            "--smoke",
            "--device",
            "cpu",
            "--cache-dir",
            cache_dir,
            "--log-dir",
            str(log_dir),
            "--results",
            str(results),
            "--no-progress",
        ]
    )
    assert code == 0
    report = json.loads(results.read_text())
    assert json.loads((log_dir / "report.json").read_text()) == report
    assert (
        len(report["losses"]) == len(report["grad_norms"]) == len(report["lrs"]) == SMOKE["steps"]
    )
    assert report["losses"][-1] < report["losses"][0] - 0.3
    assert [evaluation["step"] for evaluation in report["evals"]] == [6, 12]
    assert report["evals"][-1]["perplexity"] == pytest.approx(
        2.718281828 ** report["evals"][-1]["loss"]
    )
    assert set(report["mfu"]) == {"6N", "6N+12LdS", "6N+6LdS"}
    assert report["peak_source"].startswith("measured")
    assert report["unit"] == "tokens"
    assert report["items_per_s"] == pytest.approx(8 * 64 / report["step_time_s"])
    lines = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    tags = {"loss/train", "optimizer/lr", "optimizer/grad_norm", "speed/step_time_s", "mfu/6N"}
    assert tags <= set(lines[1])
    events = b"".join(path.read_bytes() for path in log_dir.glob("events.out.tfevents.*"))
    assert b"loss/train" in events and b"_hparams_" in events and b"run/eval_loss" in events
    out = capsys.readouterr().out
    assert "evaluation: loss" in out
    assert "tokens/s" in out


def test_a_run_repeats_itself(cache_dir: str) -> None:
    first, second, other = (run(smoke(cache_dir, steps=3, seed=seed)).losses for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_bf16_and_dropout_are_close_to_fp32(cache_dir: str) -> None:
    fp32, bf16, dropped = (
        run(smoke(cache_dir, steps=3, eval_batches=0, **knobs)).losses
        for knobs in ({}, {"dtype": "bf16"}, {"dropout": 0.1})
    )
    assert bf16 == pytest.approx(fp32, abs=0.03)
    assert bf16 != fp32
    assert dropped == pytest.approx(fp32, abs=0.2)
    assert dropped != fp32


def test_recomputation_does_not_change_losses(cache_dir: str) -> None:
    kept, again, products = (
        run(smoke(cache_dir, steps=3, eval_batches=0, dropout=0.1, remat=policy)).losses
        for policy in ("none", "full", "products")
    )
    assert again == pytest.approx(kept, rel=1e-5)
    assert products == pytest.approx(kept, rel=1e-5)


def test_the_model_reads_nothing_on_the_host() -> None:
    # Private to torch: only this test depends on it.
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415

    from examples.gpt2.model import build_model  # noqa: PLC0415
    from examples.gpt2.presets import PRESETS  # noqa: PLC0415

    class Recorder(TorchDispatchMode):
        names: set[str] = set()  # noqa: RUF012

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.add(str(func))
            return func(*args, **(kwargs or {}))

    model = build_model(PRESETS["smoke"], vocab_size=512, dropout=0.0)
    with Recorder() as recorder:
        model(torch.zeros(2, 16, dtype=torch.int64))
    assert "aten.addmm.default" in recorder.names
    assert (
        not {"aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.equal.default"}
        & recorder.names
    )


def check_equal(report: Any, expected: Any) -> None:
    """The figures of eager torch; through four updates, sums in another order deviate."""
    assert report.losses == pytest.approx(expected.losses, rel=2e-4)
    assert report.grad_norms == pytest.approx(expected.grad_norms, rel=2e-3)
    assert report.evals[-1]["loss"] == pytest.approx(expected.evals[-1]["loss"], rel=2e-4)


SHORT = {"steps": 4, "eval_every": 0, "eval_batches": 1}


@pytest.fixture(scope="module")
def expected(cache_dir: str) -> Any:
    """A short run in eager torch."""
    return run(smoke(cache_dir, **SHORT))


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("pipeline", "pipe=2,fsdp=2,tensor=2"),
        # `test_one_program.py` trains on one device, `test_packed.py` with ddp, the odd sizes below
        # have a split along fsdp, and the Llama recipe has tensor parallelism and a scan.
        exhaustive("spmd --scan", "fsdp=4,tensor=2"),
        exhaustive("fsdp", "data=2,fsdp=4"),
        exhaustive("spmd", ""),
        exhaustive("ddp", "data=2"),
        exhaustive("spmd", "fsdp=4,tensor=2"),
        exhaustive("spmd", "data=2,fsdp=4"),
        exhaustive("fsdp", "fsdp=8"),
        exhaustive("ddp", "data=8"),
    ],
)
def test_every_strategy_and_mesh_has_the_losses_of_eager_torch(
    strategy: str,
    mesh: str,
    cache_dir: str,
    expected: Any,
    on_devices: Callable[..., Any],
    num_devices: int,
) -> None:
    if num_devices != 8:
        pytest.skip("the meshes are of eight devices")
    taken = math.prod(int(axis.partition("=")[2]) for axis in mesh.split(",") if axis)
    part = {"mesh_devices": taken} if mesh and taken < 8 else {}
    strategy, _, scan = strategy.partition(" ")
    knobs = {**SHORT, **part, "device": "xla", "mesh": mesh, "strategy": strategy}
    knobs["scan"] = bool(scan)
    report = on_devices(run, smoke(cache_dir, **knobs))
    check_equal(report, expected)
    assert report.num_devices == taken
    # The steps, and the evaluation; the first step of a pipeline also stacks the stages.
    assert report.compiles == (3 if strategy == "pipeline" else 2)
    assert report.peak_bytes > report.argument_bytes > 0
    kinds = {c["kind"] for c in report.collectives}
    expected_kinds = {
        "": set(),
        "data=2": {"all-reduce"},
        "data=8": {"all-reduce"},
    }.get(mesh, {"all-gather", "all-reduce"}) | {
        "fsdp": {"reduce-scatter"},
        "pipeline": {"reduce-scatter", "collective-permute"},
    }.get(strategy, set())
    if strategy == "pipeline":
        assert report.bubble == {
            "measured": pytest.approx(1 / 3),
            "formula": pytest.approx(1 / 3),
        }
    assert kinds >= expected_kinds and bool(kinds) == bool(mesh)
    assert all(c["moved_bytes"] > 0 and c["number"] > 0 for c in report.collectives)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, exhaustive(True)])
@pytest.mark.usefixtures("finding_a_mesh")
def test_a_mesh_that_is_found_has_the_losses_of_eager_torch(
    scan: bool,
    cache_dir: str,
    expected: Any,
    num_devices: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    knobs = {"mesh": "auto", "scan": scan}
    with spmd.strict():
        report = run(smoke(cache_dir, device="xla", steps=4, eval_batches=0, **knobs))
    assert report.losses == pytest.approx(expected.losses, rel=2e-4)
    assert report.grad_norms == pytest.approx(expected.grad_norms, rel=2e-3)
    assert report.num_devices == math.prod(report.mesh.values()) == num_devices
    # Of captured steps; the second one finds marks of the parameters of loops.
    assert report.compiles == 1 + scan
    assert bool(report.collectives) == (num_devices > 1)
    out = capsys.readouterr().out
    axes = ",".join(f"{axis}={size}" for axis, size in report.mesh.items())
    assert f"on {num_devices} xla device(s) mesh auto" in out
    assert out.count(f"mesh   auto: {axes}, found for the first step") == 1


@pytest.mark.exhaustive  # test_searches.py takes what was found from the disk in a new process
@pytest.mark.usefixtures("finding_a_mesh")
def test_weights_that_are_drawn_on_the_device_have_one_seed_for_all_meshes(
    cache_dir: str, num_devices: int
) -> None:
    knobs: dict[str, Any] = {"device": "xla", "init": "device", "steps": 3, "eval_batches": 0}
    expected = run(smoke(cache_dir, mesh=f"fsdp={num_devices}", **knobs))
    report = run(smoke(cache_dir, mesh="auto", **knobs))
    assert report.losses == pytest.approx(expected.losses, rel=1e-5)
    assert report.compiles == expected.compiles + 1  # the draws, which the first step begins with


@pytest.mark.slow
@pytest.mark.usefixtures("finding_a_mesh")
def test_a_run_that_resumes_on_a_mesh_that_is_found_searches_nothing(
    cache_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide, calls = searches.decide, []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return decide(*args, **options)

    monkeypatch.setattr(searches, "decide", counted)
    monkeypatch.setattr(searches, "_kept", {})
    monkeypatch.setattr(searches, "_folder", lambda: ProgramCache(tmp_path / "cache"))
    whole = run(smoke(cache_dir, device="xla", mesh="auto", steps=4, eval_batches=0))
    assert len(calls) == 1
    monkeypatch.setattr(searches, "_kept", {})  # as in another process
    knobs = {"device": "xla", "mesh": "auto", "steps": 4, "eval_batches": 0}
    knobs["checkpoint"] = str(tmp_path / "run")
    saved = run(smoke(cache_dir, **knobs, save_every=2))
    resumed = run(smoke(cache_dir, **knobs, resume="2"))
    assert len(calls) == 1
    assert saved.losses == whole.losses and resumed.losses == whole.losses[2:]
    assert resumed.mesh == whole.mesh


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fsdp"}, "--strategy fsdp too, which shards over axes"),
        ({"strategy": "pipeline"}, "--strategy pipeline too, which shards over axes"),
        ({"microbatches": 4}, "--microbatches 4 too, which is about a pipeline"),
        ({"schedule": "gpipe"}, "--schedule gpipe too, which is about a pipeline"),
        ({"mesh_devices": 3}, "--mesh-devices 3 too, which gives a part of the devices"),
        ({"pack": True}, "--pack too, which reads in each process"),
    ],
)
def test_what_a_mesh_that_is_found_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KnobError) as error:
        with_defaults(TrainConfig(mesh="auto", devices=4, **options))
    said = str(error.value)
    assert said.startswith("--mesh auto finds the mesh and the shardings for the first step; got ")
    assert f"got {message}" in said and "for instance --mesh fsdp=4." in said
    assert f"Leave out {message.split()[0]}, or name the axes" in said


# Three of eight devices; a vocabulary, a sequence and parts of a batch that nothing divides.
ODD = {"vocab": 509, "pad_vocab": 1, "seq": 63, "batch": 12, "accumulate": 2}


@pytest.mark.parametrize(
    ("strategy", "mesh", "taken"),
    [
        ("spmd", "fsdp=3", 3),
        exhaustive("fsdp", "fsdp=3", 3),
        exhaustive("ddp", "data=3", 3),
        exhaustive("spmd", "fsdp=3,tensor=2", 6),
    ],
)
def test_odd_sizes_have_the_losses_of_eager_torch(
    strategy: str,
    mesh: str,
    taken: int,
    cache_dir: str,
    on_devices: Callable[..., Any],
    num_devices: int,
) -> None:
    if num_devices != 8:
        pytest.skip("the meshes are parts of eight devices")
    knobs = {**SHORT, **ODD}
    right = run(smoke(cache_dir, **knobs))
    where = {"device": "xla", "mesh_devices": taken, "mesh": mesh, "strategy": strategy}
    report = on_devices(run, smoke(cache_dir, **knobs, **where))
    check_equal(report, right)
    assert report.num_devices == taken


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        exhaustive("fsdp", "fsdp=8"),
        exhaustive("spmd", "fsdp=8"),
        exhaustive("ddp", "data=8"),
    ],
)
def test_accumulated_gradients_are_reduced_once(
    strategy: str, mesh: str, cache_dir: str, on_devices: Callable[..., Any], num_devices: int
) -> None:
    if num_devices != 8:
        pytest.skip("the meshes are of eight devices")
    knobs = {"steps": 3, "eval_batches": 0, "batch": 32, "dtype": "bf16", "device": "xla"}
    whole, parts = (
        on_devices(run, smoke(cache_dir, **knobs, mesh=mesh, strategy=strategy, accumulate=number))
        for number in (1, 4)
    )
    assert parts.losses == pytest.approx(whole.losses, rel=2e-3)
    assert parts.compiles == whole.compiles == 2

    def reduced(report: Any) -> float:
        reductions = ("reduce-scatter", "all-reduce")
        return sum(c["moved_bytes"] for c in report.collectives if c["kind"] in reductions)

    # Forward looks the positions up in a table that marks split: an all-reduce for each part.
    assert reduced(parts) <= reduced(whole) * (1.2 if strategy == "spmd" else 1.01)


@pytest.mark.slow
def test_the_sample_of_the_readme(num_devices: int, capsys: pytest.CaptureFixture[str]) -> None:
    if num_devices != 8:
        pytest.skip("the sample has eight devices")
    (sample,) = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "examples" / "gpt2" / "README.md").read_text(),
        flags=re.DOTALL,
    )
    exec(sample, {})
    printed = capsys.readouterr().out.splitlines()
    loss, tokens_per_s, share, peak_bytes = map(float, printed[-1].split())
    assert loss < 6.0
    assert min(tokens_per_s, share, peak_bytes) > 0


@pytest.mark.parametrize(("number", "code"), [exhaustive(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_ctrl_c_or_sigterm_ends_with_a_report_and_a_save(
    number: signal.Signals, code: int, cache_dir: str, tmp_path: Path
) -> None:
    arguments = [
        "--device",
        "cpu",
        "--steps",
        "1000000",
        "--eval-every",
        "0",
        "--log-dir",
        str(tmp_path),
        "--checkpoint",
        str(tmp_path / "run"),
    ]
    process = fresh.Process(command(cache_dir, *arguments), environment(), folder=ROOT)
    try:
        process.until(lambda said: "\nstep     3" in said, 60)
        os.kill(process.pid, number)
        assert process.wait(60) == code
    finally:
        said, _ = process.end()
    assert ("preempted: " if code == 75 else "interrupted: ") + "ending after step" in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["interrupted"] is True
    assert len(report["losses"]) >= 3
    assert (tmp_path / "run" / str(len(report["losses"])) / "state").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--device", "cpu", "--mesh", "fsdp=8"],
            "a mesh needs the xla device; got --device cpu with --mesh 'fsdp=8'",
        ),
        (
            ["--device", "cpu", "--seq", "999"],
            "--seq must not pass the preset's position table; got 999 for smoke with 128 positions",
        ),
        (["--device", "cpu", "--batch", "-1"], "--batch must be at least 0; got -1"),
        (["--device", "cpu", "--mesh", "auto"], "got --device cpu with --mesh 'auto'"),
        (["--mesh", "auto", "--pack"], "got --pack too, which reads"),
        (
            ["--devices", "8"],
            "without a mesh one device computes; got --devices 8 and no --mesh. "
            "Add for instance --mesh fsdp=8",
        ),
        (["--device", "cpu", "--save-every", "2"], "got 2 and no --checkpoint"),
        (["--device", "cpu", "--accumulate", "0"], "--accumulate must be at least 1; got 0"),
        (
            ["--device", "cpu", "--accumulate", "3"],
            "--batch must divide by --accumulate; got 8 and 3. Pass for instance --batch 9",
        ),
        (
            ["--device", "cpu", "--mesh-devices", "3"],
            "got 3 and no --mesh. Add for instance --mesh fsdp=3",
        ),
        (
            ["--device", "cpu", "--resume", "run.pt"],
            "a saved step, or auto; got 'run.pt'. Leave it",
        ),
        (["--device", "cpu", "--resume", "3"], "got 3 and no --checkpoint. Add for instance"),
        (
            ["--strategy", "ddp"],
            "--strategy ddp splits the batch over a mesh; got none. Add for instance --mesh data=8",
        ),
        (
            ["--device", "cpu", "--data", "./missing.txt"],
            "got './missing.txt', which is neither a file nor a folder",
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
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("strategy", "axis", "message"),
    [
        ("ddp", "fsdp", "with --strategy ddp mesh axes must be among data; got ['fsdp']"),
        ("fsdp", "tensor", "must be among data, fsdp; got ['tensor']"),
        ("fsdp", "data", "--strategy fsdp needs a mesh axis fsdp"),
        ("spmd", "model", "must be among data, fsdp, tensor; got ['model']"),
        ("pipeline", "fsdp", "--strategy pipeline needs a mesh axis pipe"),
    ],
)
def test_a_strategy_takes_its_axes(
    strategy: str, axis: str, message: str, num_devices: int
) -> None:
    spmd.use_spmd()
    config = TrainConfig(strategy=strategy, mesh=f"{axis}={num_devices}", batch=8)
    with pytest.raises(KnobError, match=re.escape(message)):
        parsed_mesh(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 3}, "x --accumulate x --microbatches; got 8 for 12"),
        ({"schedule": "circular", "rounds": 3}, "got 6 for the 2 of smoke. Take a smaller pipe"),
        ({"mesh_devices": 8}, "takes all devices; got --mesh-devices 8. Leave it out"),
    ],
)
def test_a_pipeline_must_fit_the_batch_the_layers_and_the_devices(
    options: dict[str, Any], message: str, num_devices: int
) -> None:
    if num_devices != 8:
        pytest.skip("the numbers are those of 8 devices")
    spmd.use_spmd()
    config = TrainConfig(
        preset="smoke", strategy="pipeline", mesh="pipe=2,fsdp=4", batch=8, **options
    )
    with pytest.raises(KnobError, match=re.escape(message)):
        parsed_mesh(config)


@pytest.mark.exhaustive  # as checkpoint/test_manager.py, on whole recipes
@pytest.mark.slow
def test_a_pipeline_resumes_without_stages(
    cache_dir: str, tmp_path: Path, num_devices: int
) -> None:
    if num_devices != 8:
        pytest.skip("the meshes are of eight devices")
    knobs: dict[str, Any] = {"eval_batches": 0, "checkpoint": str(tmp_path), "keep": 0}
    pipeline = {"device": "xla", "strategy": "pipeline", "mesh": "pipe=2,fsdp=4"}
    whole = run(smoke(cache_dir, eval_batches=0, steps=4)).losses
    first = run(smoke(cache_dir, steps=4, save_every=2, **pipeline, **knobs)).losses
    assert first == pytest.approx(whole, rel=2e-4)
    others: list[dict[str, Any]] = [{"device": "cpu"}, {"device": "xla", "mesh": "fsdp=8"}]
    for other in others:
        rest = run(smoke(cache_dir, steps=4, resume="2", **other, **knobs))
        assert rest.resumed_at == 2 and rest.losses == pytest.approx(whole[2:], rel=2e-4)


def test_a_mesh_must_fit_the_batch_the_heads_and_the_devices(num_devices: int) -> None:
    spmd.use_spmd()
    mesh = f"fsdp={num_devices}"
    if num_devices > 1:
        with pytest.raises(KnobError, match=f"got 5 for {num_devices}. Pass for instance --batch"):
            parsed_mesh(TrainConfig(mesh=mesh, batch=5))
    assert parsed_mesh(TrainConfig(mesh=mesh, batch=num_devices))
    with pytest.raises(KnobError, match=f"got {num_devices + 1} of {num_devices}. Pass at most"):
        parsed_mesh(TrainConfig(mesh=mesh, mesh_devices=num_devices + 1, batch=8))
    if num_devices == 8:
        message = "tensor=8 for the 12 heads of 124M. Pass one of tensor=1, 2, 3, 4, 6, 12"
        with pytest.raises(KnobError, match=message):
            parsed_mesh(TrainConfig(preset="124M", mesh="tensor=8", batch=8))
        part = parsed_mesh(TrainConfig(mesh="fsdp=3", mesh_devices=3, batch=3))
        assert part is not None and part.size() == 3


def test_help_has_a_line_for_every_knob(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_from(["--help"])
    out = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in out for name in TrainConfig.__dataclass_fields__)
    assert "auto: the mesh and the shardings are found for the first step" in " ".join(out.split())


def test_smoke_only_changes_defaults() -> None:
    config = config_from(["--smoke", "--steps", "3", "--mesh", "fsdp=8"])
    assert (config.preset, config.steps, config.mesh) == ("smoke", 3, "fsdp=8")
    assert config_from([]) == TrainConfig()


def test_the_preset_fills_what_was_left_open() -> None:
    config = with_defaults(TrainConfig(preset="350M", lr=1e-3))
    assert (config.batch, config.seq, config.vocab, config.lr, config.min_lr) == (
        8,
        1024,
        50257,
        1e-3,
        1e-4,
    )
    with pytest.raises(KnobError, match="--log-every must be at least 1; got 0"):
        with_defaults(TrainConfig(log_every=0))


def test_the_learning_rate_rises_then_falls_to_its_floor() -> None:
    factors = [lr_factor(step, steps=100, warmup=10, floor=0.1) for step in range(101)]
    assert factors[0] == 0.1
    assert factors[9] == factors[10] == 1.0
    assert all(a > b for a, b in itertools.pairwise(factors[10:]))
    assert factors[100] == pytest.approx(0.1)
    assert lr_factor(0, steps=1, warmup=0, floor=0.1) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "fsdp=8", "--devices", "8"], "a comparison chooses --mesh, --strategy"),
        (["--strategy", "ddp"], "got another --strategy or --device"),
        (["--devices", "1"], "a comparison needs at least two devices; got 1"),
    ],
)
def test_options_that_a_comparison_chooses_itself(
    arguments: list[str], message: str, cache_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert comparison.main(["--smoke", "--cache-dir", cache_dir, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_comparison_runs_every_strategy(cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def compared(module: str, variants: Any, *, common: Any, folder: Path) -> None:
        seen.update({v.name: v.options for v in variants}, common=common)

    monkeypatch.setattr("examples.gpt2.comparison.compare", compared)
    assert comparison.main(["--smoke", "--devices", "8", "--cache-dir", cache_dir]) == 0
    assert seen.pop("common") == ["--smoke", "--devices", "8", "--cache-dir", cache_dir]
    assert seen["one device"] == ["--devices", "1"]
    assert seen["spmd fsdp=4,tensor=2"][-1] == "fsdp=4,tensor=2"
    assert seen["pipeline pipe=2,fsdp=4"][-1] == "pipe=2,fsdp=4"
    assert len(seen) == 8


def test_a_run_resumes_exactly(cache_dir: str, tmp_path: Path) -> None:
    knobs = {"steps": 4, "eval_every": 2, "accumulate": 2, "checkpoint": str(tmp_path)}
    whole = run(smoke(cache_dir, save_every=2, **knobs))
    rest = run(smoke(cache_dir, resume="2", **knobs))
    assert rest.resumed_at == 2
    assert rest.losses == whole.losses[2:]
    assert rest.lrs == whole.lrs[2:]
    assert rest.evals == whole.evals[1:]
    assert run(smoke(cache_dir, **knobs)).losses == []


def test_a_save_that_fails_on_the_way_does_not_end_the_run(
    cache_dir: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*state: Any) -> None:
        raise spmd.errors.CheckpointError("the disk is full.")

    monkeypatch.setattr(spmd.CheckpointManager, "save", full)
    arguments = ["--save-every", "2", "--checkpoint", str(tmp_path), "--device", "cpu"]
    arguments += ["--steps", "3"]
    code = main(
        ["--smoke", "--eval-batches", "0", "--cache-dir", cache_dir, "--no-progress", *arguments]
    )
    out = capsys.readouterr()
    assert "error: the disk is full. The run goes on." in out.out
    assert "step     3" in out.out
    assert out.err == "error: the disk is full.\n"
    assert code == 1


def test_parts_of_a_batch_have_the_losses_of_the_whole(cache_dir: str) -> None:
    whole, parts = (
        run(smoke(cache_dir, steps=3, eval_batches=0, accumulate=number)).losses
        for number in (1, 4)
    )
    assert parts == pytest.approx(whole, rel=1e-5)


def test_a_longer_run_goes_on_from_a_finished_one(
    cache_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A rate that does not decay does not depend on the number of steps.
    knobs: dict[str, Any] = {"eval_batches": 0, "lr": 1e-3, "min_lr": 1e-3}
    whole = run(smoke(cache_dir, **knobs, steps=4))
    knobs |= {"checkpoint": str(tmp_path / "run")}
    first, rest = (run(smoke(cache_dir, **knobs, steps=steps)) for steps in (2, 4))
    assert first.losses + rest.losses == whole.losses
    out = capsys.readouterr().out
    assert out.count("run has none yet, and a new run begins") == 1
    assert "resume after step 2 of 4; the saved run had 2 steps, and the learning rate" in out


@pytest.mark.parametrize("name", ["jobset.yaml", "slurm.sbatch"])
def test_the_launch_files_start_and_restart_a_run(name: str) -> None:
    text = (ROOT / "docs" / "launch" / name).read_text().replace("\\\n", " ")
    found = re.search(
        r"python -m examples\.gpt2\.train((?:\s+-?[-\w=,./]+)+?)\s*(?:\n\s+env:|\|\|)", text
    )
    assert found is not None
    config = with_defaults(config_from(found[1].split()))
    assert config.resume == "auto" and config.checkpoint and config.save_every
    assert config.deadline <= 120  # the time that both files give a run after SIGTERM
    assert "75" in text  # the code by which a run asks to be started again
    if name == "jobset.yaml":  # on what the pods share
        assert config.checkpoint.startswith("/runs/") and "mountPath: /runs\n" in text
