"""Every sample of the READMEs and of these pages runs; ARCHITECTURE.md says what happens."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spmd_core as spmd
from spmd_core.program import compile_cache
from spmd_core.program.ir import Graph

ROOT = Path(__file__).parents[4]


def samples():
    for page in (
        ROOT / "README.md",
        ROOT / "packages/spmd-core/README.md",
        ROOT / "packages/spmd-data/README.md",
        ROOT / "docs/planning.md",
    ):
        for i, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S)):
            yield pytest.param(code, id=f"{page.parent.name}-{i}")
    page = (ROOT / "docs/wrong_or_slow.md").read_text()  # each sample continues the one before
    yield pytest.param(
        "\n".join(re.findall(r"```python\n(.*?)```", page, re.S)), id="wrong-or-slow"
    )


@pytest.mark.parametrize("code", list(samples()))
def test_sample_runs(code):
    """In this process, whose eight devices are those that the samples ask for."""
    if spmd.global_runtime_device_count() != 8:
        pytest.skip("the samples have eight devices")
    exec(compile(code, "<sample>", "exec"), {"__name__": "__main__"})


def test_the_samples_for_several_processes_run_in_one(monkeypatch):
    if spmd.global_runtime_device_count() != 8:
        pytest.skip("the samples split over several devices")
    monkeypatch.setattr(spmd.distributed, "initialize", lambda: None)
    scope = {"__name__": "__main__", "w": torch.ones(8, device="xla"), "loss": torch.ones(())}
    before = signal.getsignal(signal.SIGTERM)
    spmd.distributed.request_stop()
    try:
        page = (ROOT / "docs/processes.md").read_text()
        for code in re.findall(r"```python\n(.*?)```", page, re.S):
            exec(compile(code, "<sample>", "exec"), scope)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert scope["mesh"].shape() == {"data": 2, "fsdp": 4} and scope["step"] == 0


@pytest.mark.slow
def test_the_first_sample_runs_as_a_program():
    (code,) = next(samples()).values
    paths = [str(ROOT / "packages" / name / "src") for name in ("spmd-core", "spmd-data")]
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def test_the_architecture_page_tells_the_truth():
    if spmd.global_runtime_device_count() != 8:
        pytest.skip("the page's program has eight devices")
    page = (ROOT / "ARCHITECTURE.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.S).group(1)
    scope = {}
    exec(code, scope)
    w, y = scope["w"], scope["y"]
    assert w.sharding_spec == "{devices=[4,2]0,1,2,3,4,5,6,7}"
    key = compile_cache.keys()[-1]
    names = [part.name if hasattr(part, "name") else part for part in key.structure]
    assert names == ["aten::mm", -1, -2, "aten::relu", 0, "aten::mul.Tensor", -2]
    assert key.donated == (1,) and key.device_ids == tuple(range(8)) and len(key.outputs) == 2
    program = compile_cache.newest()
    assert f"```\n{Graph.of(program.graph).text()}```" in page
    passes = spmd.debugging.passes(program=program)
    assert passes == f"recorded:\n{Graph.of(program.graph).text()}"  # none changes it
    text = program.lowered_text()
    for fragment in (
        'sdy.mesh @mesh = <["fsdp"=4, "tensor"=2]>',
        "tensor<1xf64>",
        "aliasing_output = 0",
        "precision = [HIGHEST, HIGHEST]",
    ):
        assert fragment in text
    assert (program.record.argument_bytes, program.record.alias_bytes) == (3080, 1024)
    assert "all-reduce" in program.compiled.as_text() and "f32[8,32]" in program.compiled.as_text()
    torch.testing.assert_close(
        y.cpu(), torch.relu(scope["x"].cpu() @ (w.cpu() * 2)), rtol=1e-4, atol=1e-4
    )
