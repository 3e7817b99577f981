"""A slice of torch's operator database compiles for TPU and lowers for CUDA; failures are named."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jax import lax
from tiers import crossed, exhaustive

import spmd_core as spmd
from benchmarks.compiles.outcomes import Outcome, Status, examine
from benchmarks.compiles.summary import overloads, summary
from benchmarks.compiles.target import Target
from benchmarks.opinfo import samples
from benchmarks.workers import ROOT
from spmd_core.planner import topology

LIBTPU = pytest.mark.skipif(
    topology.libtpu_version() is None, reason="libtpu is not installed: pip install libtpu"
)
ENTRIES = {op.formatted_name: op for op in samples.entries()}
NAMES = list(ENTRIES)[::40]
# Each third entry in the default tier: how entries are lowered is told by few, and each compiles.
CASES = crossed(NAMES[::3], ["forward", "gradient"]) + [
    exhaustive(name, variant)
    for number, name in enumerate(NAMES)
    for variant in ("forward", "gradient")
    if number % 3
]


@pytest.fixture(scope="module")
def cuda() -> Target:
    return Target("cuda")


def examined(
    op: Any, variant: str, target: Target, *, dtype: torch.dtype = torch.float32
) -> Outcome | None:
    return examine(op, variant, dtype, target, limit=2)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_an_entry_lowers_for_cuda(name: str, variant: str, cuda: Target) -> None:
    outcome = examined(ENTRIES[name], variant, cuda)
    assert outcome is None or outcome.status in (Status.COMPILES, Status.READS, Status.EXCLUDED), (
        outcome
    )


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """What the command stores; in a process of its own, as libtpu refuses the tests' XLA_FLAGS."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.compiles", "--out", str(folder), *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (stored,) = folder.glob("*.json")
    return dict(json.loads(stored.read_text()))


@pytest.mark.exhaustive  # as programs of a planner are
@LIBTPU
@pytest.mark.slow
def test_a_slice_compiles_for_tpu(tmp_path: Path) -> None:
    """What TPUs lack runs on the host: eigenvalues of general matrices."""
    ops = ",".join([*NAMES[::2], "linalg_svd", "linalg_eig"])
    stored = run(
        tmp_path,
        *("--ops", ops),
        *("--dtypes", "float32", "--samples", "1", "--jobs", "1"),
    )
    assert stored["overloads"]["aten::linalg_eig"] == "host"
    assert stored["overloads"]["aten::_linalg_svd"] == "compiles"
    assert "not" not in stored["overloads"].values()


@LIBTPU
@pytest.mark.exhaustive  # as the planner compiles for several
def test_programs_for_four_tpus(tmp_path: Path) -> None:
    ops = ("--ops", "addmm,cumsum,nn_functional_conv2d", "--dtypes", "float32", "--samples", "1")
    stored = run(tmp_path, "--devices", "4", *ops, "--jobs", "1")
    assert {"aten::addmm", "aten::cumsum"} <= stored["overloads"].keys()


def changed(function: Callable[[torch.Tensor], Any]) -> Any:
    """The entry of `exp`, computing something else on the device."""
    op = copy.copy(ENTRIES["exp"])
    op.op = lambda x: function(x) if x.device.type == "xla" else torch.exp(x)
    return op


def test_the_operation_at_fault_is_named(cuda: Target) -> None:
    def schur(x: torch.Tensor) -> torch.Tensor:  # jax has it on CPUs alone
        y = spmd.call_jax(lambda a: lax.linalg.schur(a)[0], (x.sum() * torch.eye(3).to("xla")))
        return y.cos()

    outcome = examined(changed(schur), "forward", cuda)
    assert outcome is not None
    assert outcome.status is Status.FAILS
    (name, reason), *others = outcome.failed.items()
    assert (name, others) == ("jax::<lambda>", [])
    assert "schur" in reason and reason in outcome.reason
    assert {"aten::sum", "aten::cos"} <= set(outcome.compiled)


def test_a_kernel_of_the_cpu_in_a_program_for_cuda_is_found(
    cuda: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.compiles.target.CUDA", "cpu")
    for_cpu = Target("cpu")
    outcome = examined(ENTRIES["linalg_cholesky_ex"], "forward", for_cpu)
    assert outcome is not None
    assert "lapack_spotrf_ffi is no kernel of CUDA's" in outcome.reason


def test_an_error_while_recording_is_found(cuda: Target) -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    outcome = examined(changed(refuse), "forward", cuda)
    assert outcome is not None
    assert (outcome.status, outcome.reason) == (Status.FAILS, "ValueError: no")


def test_reads_are_told_apart(cuda: Target) -> None:
    outcome = examined(ENTRIES["nonzero"], "forward", cuda)
    assert outcome is not None
    assert outcome.status is Status.READS and "aten::ne.Scalar" in outcome.compiled


def test_what_does_not_apply(cuda: Target) -> None:
    assert examine(ENTRIES["exp"], "gradient", torch.int64, cuda, limit=1) is None
    outcome = examined(ENTRIES["empty"], "forward", cuda)
    assert outcome is not None and outcome.status is Status.EXCLUDED


def test_a_topology_with_too_few_devices() -> None:
    with pytest.raises(ValueError, match=r"must have the devices.*has 1, got 2. Name a larger"):
        Target("cpu-1", num_devices=2)


def outcomes() -> list[dict[str, Any]]:
    return [
        vars(Outcome("a", "forward", "float32", compiled=["aten::x", "aten::y"])),
        vars(
            Outcome(
                "b", "forward", "float32", Status.FAILS, 1, "aten::y: no", failed={"aten::y": "no"}
            )
        ),
        vars(Outcome("c", "gradient", "bfloat16", Status.HOST, 1, "aten::z", host=["aten::z"])),
        vars(Outcome("d", "gradient", "bfloat16", Status.FAILS, 1, "aten::y: no")),
    ]


def test_the_table_counts_and_sorts_by_reason() -> None:
    text = summary(outcomes(), target="v4-8", num_devices=1, limit=1).markdown()
    assert "| forward | float32 | 2 | 1 | 0 | 0 | 1 |" in text
    assert "| gradient | bfloat16 | 2 | 0 | 0 | 1 | 1 |" in text
    assert (
        "**does not compile**: aten::y: no: b (forward, float32), d (gradient, bfloat16)." in text
    )
    assert overloads(outcomes()) == {"aten::x": "compiles", "aten::y": "not", "aten::z": "host"}


@pytest.mark.exhaustive  # as an entry is lowered here, and the command compiles for a TPU
def test_the_command_lowers_for_cuda(tmp_path: Path) -> None:
    stored = run(tmp_path, "--target", "cuda", "--ops", "exp,nonzero", "--samples", "1")
    assert stored["overloads"]["aten::exp"] == "compiles"
    assert any("nonzero forward float32: reads values" in line for line in stored["not_compiled"])
