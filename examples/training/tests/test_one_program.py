"""A recipe's captured step has the losses of the recorded one, to the last bit."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import exhaustive

import spmd_core as spmd
from examples.training.one_program import one_program
from examples.training.run_config import RunConfig

STEPS = 5
TEXT = {"max_mb": 0.2}
# One mask a microbatch, forward and again in backward.
UNCAPTURED = {"strategy": "pipeline", "schedule": "1f1b", "dropout": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "knobs"),
    [
        # Captured steps are what the tests of the recipes compare with eager torch.
        exhaustive("gpt2", {**TEXT, "dropout": 0.1, "accumulate": 2}),  # on one device
        exhaustive("gpt2", {**TEXT, "mesh": "fsdp=4,tensor=2", "dropout": 0.1, "accumulate": 2}),
        exhaustive("gpt2", {**TEXT, "mesh": "data=8"}),
        exhaustive("gpt2", {**TEXT, "mesh": "fsdp=8", "strategy": "fsdp", "remat": "full"}),
        exhaustive("gpt2", {**TEXT, "mesh": "fsdp=4,tensor=2", "scan": True, "dropout": 0.1}),
        exhaustive("gpt2", {**TEXT, "mesh": "fsdp=4,tensor=2", "pack": True}),
        exhaustive("gpt2", {**TEXT, "mesh": "fsdp=8"}),
        exhaustive("gpt2", {**TEXT, "mesh": "pipe=2,fsdp=2,tensor=2", "strategy": "pipeline"}),
        exhaustive("llama_tp", {**TEXT, "mesh": "data=4,tensor=2", "dtype": "bf16"}),
        exhaustive("llama_tp", {**TEXT, "mesh": "data=4,tensor=2"}),
        exhaustive("llama_tp", {**TEXT, "mesh": "tensor=8"}),
        exhaustive("llama_tp", {**TEXT, "mesh": "data=4,tensor=2", "scan": True, "dtype": "bf16"}),
        exhaustive("llama_tp", {**TEXT, "mesh": "data=2,tensor=4", "accumulate": 2, "lora": 4}),
        exhaustive("resnet_spatial", {"ema": 0.9}),
        exhaustive("resnet_spatial", {"mesh": "data=2,height=2,width=2", "ema": 0.9}),
    ],
)
def test_captured_losses_are_the_recorded_ones(
    recipe: str,
    knobs: dict[str, Any],
    num_devices: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if num_devices != 8:
        pytest.skip("meshes of 8 devices")
    config, train = (
        importlib.import_module(f"examples.{recipe}.{name}") for name in ("config", "train")
    )
    steps: list[Any] = []

    def noted(config: RunConfig) -> Any:
        def decorate(step: Any) -> Any:
            steps.append(one_program(config)(step))
            return steps[-1]

        return decorate

    monkeypatch.setattr(train, "one_program", noted)
    options = {**config.SMOKE, "steps": STEPS, "warmup": 2, "eval_batches": 1, "progress": False}
    reports = [
        train.run(config.TrainConfig(**{**options, **knobs, "capture": capture}))
        for capture in (True, False)
    ]
    for name in ("losses", "grad_norms", "evals"):
        assert getattr(reports[0], name) == getattr(reports[1], name)
    captured, recorded = steps
    assert captured.recorded + captured.replayed == STEPS and captured.replayed >= 2
    assert not hasattr(recorded, "replayed")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("is_captured", [True, False])
def test_what_cannot_be_captured_is_recorded_and_said(
    is_captured: bool, num_devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if num_devices != 8:
        pytest.skip("meshes of 8 devices")
    config, train = (importlib.import_module(f"examples.gpt2.{x}") for x in ("config", "train"))
    knobs = {**config.SMOKE, **TEXT, **UNCAPTURED, "progress": False}
    knobs |= {"mesh": "pipe=2,fsdp=4", "steps": 1, "warmup": 1, "eval_batches": 0}
    train.run(config.TrainConfig(**knobs, capture=is_captured))
    out = capsys.readouterr().out
    assert ("recorded at each call: a captured step" in out) == is_captured


def test_why_a_recipe_cannot_be_captured() -> None:
    config = importlib.import_module("examples.gpt2.config").TrainConfig
    assert "a captured step" in config(**UNCAPTURED).recorded_because()
    for more in ({"dropout": 0.0}, {"schedule": "gpipe"}):
        assert not config(**{**UNCAPTURED, **more}).recorded_because()


def test_eager_torch_is_left_alone() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert one_program(RunConfig(device="cpu"))(step) is step
    twice = one_program(RunConfig(capture=False))(step)
    assert twice(torch.ones(2, device="xla")).tolist() == [2.0, 2.0]
    captured: Any = one_program(RunConfig())(step)
    for _ in range(3):  # of a shape that no other test has, as programs are kept
        assert (captured(torch.ones(3, 17, 5, device="xla")).cpu() == 2).all()
    assert captured.replayed == 1
    assert spmd.metrics.programs()[-1].name.startswith("train")
