"""Every sample of the READMEs and of these pages runs; ARCHITECTURE.md says what happens."""

import os
import re
import signal
from pathlib import Path

import fresh
import pytest
import torch

import spmd_core as spmd
from spmd_core.checkpoint import CheckpointManager, command
from spmd_core.program import compile_cache

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()

# Pages whose samples run in tests of their own, or one by one; one reads what a recipe wrote.
_ELSEWHERE = ("planning", "processes", "checkpoints", "torch_xla", "tensorboard")


def samples():
    for page in (
        ROOT / "README.md",
        ROOT / "packages/spmd-core/README.md",
        ROOT / "packages/spmd-data/README.md",
        ROOT / "docs/guides/planning.md",
    ):
        for i, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S)):
            yield pytest.param(code, id=f"{page.parent.name}-{i}")
    for page in sorted((ROOT / "docs").rglob("*.md")):  # each sample continues the one before
        codes = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
        if codes and page.stem not in _ELSEWHERE:
            yield pytest.param("\n".join(codes), id=page.stem)


@pytest.mark.parametrize("code", list(samples()))
def test_sample_runs(code):
    """In this process, whose eight devices are those that the samples ask for."""
    if spmd.global_runtime_device_count() != 8:
        pytest.skip("the samples have eight devices")
    exec(compile(code, "<sample>", "exec"), {"__name__": "__main__"})


def test_the_samples_for_several_processes_run_in_one(monkeypatch, tmp_path):
    if spmd.global_runtime_device_count() != 8:
        pytest.skip("the samples split over several devices")
    monkeypatch.setattr(spmd.distributed, "initialize", lambda: None)
    w = torch.ones(8, device="xla")
    scope = {"__name__": "__main__", "w": w, "loss": torch.ones(()), "state": {"w": w}}
    spmd.distributed.request_stop()
    *samples, last = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/guides/processes.md").read_text(), re.S
    )
    with CheckpointManager(tmp_path) as scope["manager"]:
        for code in samples:
            exec(compile(code, "<sample>", "exec"), scope)
        with pytest.raises(SystemExit, match="75"):
            exec(compile(last, "<sample>", "exec"), scope)
        assert scope["manager"].all_steps() == [0]
    assert scope["mesh"].shape() == {"data": 2, "fsdp": 4} and scope["step"] == 0


def test_the_samples_of_checkpoints_run(monkeypatch, tmp_path):
    """In their order, commands among them; each continues the one before."""
    if spmd.global_runtime_device_count() != 8:
        pytest.skip("the samples have eight devices")
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    scope = {"__name__": "__main__"}
    page = (ROOT / "docs/guides/checkpoints.md").read_text()
    try:
        for language, code in re.findall(r"```(python|sh)\n(.*?)```", page, re.S):
            if language == "python":
                exec(compile(code, "<sample>", "exec"), scope)
                continue
            for line in code.splitlines():
                program, *arguments = line.removeprefix("python -m ").split()
                assert program == "spmd_core.checkpoint" and command.main(arguments) == 0, line
    finally:
        signal.signal(signal.SIGTERM, before)
    assert {path.name for path in tmp_path.glob("*.*")} == {"model.safetensors", "run.pt", "old.pt"}


def test_the_lines_of_the_tutorial_are_those_of_the_file():
    page = (ROOT / "docs/tutorials/first_gpt2.md").read_text()
    shown = re.findall(r"```py\n(.*?)```", page, re.S)
    file = (ROOT / "examples/minimal.py").read_text()
    assert len(shown) > 5 and [lines for lines in shown if lines not in file] == []


@pytest.mark.exhaustive  # as it runs in this process, and other samples as programs
def test_the_first_sample_runs_as_a_program():
    (code,) = next(samples()).values
    paths = [str(ROOT / "packages" / name / "src") for name in ("spmd-core", "spmd-data")]
    result = fresh.run(["-c", code], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    assert result.returncode == 0, result.stderr[-3000:]


def test_the_architecture_page_tells_the_truth(num_devices):
    """It follows the README's first sample."""
    if num_devices != 8:
        pytest.skip("the sample has eight devices")
    scope = {}
    exec(next(samples()).values[0], scope)
    program, key = compile_cache.newest(), compile_cache.keys()[-1]
    names = [part.name if hasattr(part, "name") else part for part in key.structure]
    assert names[:10] == ["aten::linear", -1, -2, -3, "aten::gelu", 0, "aten::linear", 1, -4, -5]
    assert key.donated == tuple(range(1, 13)) and key.device_ids == tuple(range(8))
    assert (program.record.argument_bytes, program.record.alias_bytes) == (54768, 52480)
    assert "f32[128,16]" in program.compiled.as_text()
    for text in (spmd.debugging.passes(program=program), program.lowered.stage.as_text()):
        _check_shown(text)
    model, x = scope["model"], torch.ones(32, 64, device="xla")
    loss = (model(x) - x).square().mean()
    loss.backward()
    assert f"loss                   {loss._handle.value}\n" in PAGE
    weight = model[0].weight
    assert f"model[0].weight.grad   {weight.grad._handle.value}\n" in PAGE
    assert f"model[0].weight.sharding_spec    {weight.sharding_spec}\n" in PAGE


def _check_shown(text):
    """Compares the blocks of the page that are from a text, in which `...` stands for the rest."""
    if "stablehlo." in text:  # whose values releases of jax number otherwise
        text, page = (re.sub(r"%\d+", "%", one) for one in (text, PAGE))
    else:
        page = PAGE
    lines = text.splitlines()
    found = 0
    for block in re.findall(r"```\n(.*?)```", page, re.S):
        shown = block.splitlines()
        if shown[0] not in {line.strip().partition(" {")[0] for line in lines}:
            continue
        found += 1
        position = 0
        for part in (line.partition("...")[0].strip() for line in shown):
            at = next((i for i in range(position, len(lines)) if part in lines[i]), None)
            assert at is not None, f"{part!r} is not in\n{text}"
            position = at
    assert found, text
