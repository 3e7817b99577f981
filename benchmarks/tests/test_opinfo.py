"""A fixed slice of torch's operator database agrees with eager torch; wrong results are found."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import crossed, exhaustive

import spmd_core as spmd
from benchmarks.opinfo import cases, samples
from benchmarks.opinfo.cases import Status, Verdict, examine
from benchmarks.opinfo.summary import summary

ENTRIES = {op.formatted_name: op for op in samples.entries()}
# Every third entry, and every thirtieth for all tiers but the last.
NAMES = [
    name if number % 270 == 0 else exhaustive(name, id=name)
    for number, name in enumerate(ENTRIES)
    if number % 3 == 0
]


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_gives_eager_torchs_values_and_gradients(name: str) -> None:
    """With the first tensor of each sample split over all devices."""
    devices = spmd.global_runtime_device_count()
    mesh = spmd.Mesh(range(devices), (devices,), ("x",))
    for variant in ("forward", "gradient"):
        verdict = examine(ENTRIES[name], variant, torch.float32, mesh=mesh, limit=2)
        if verdict is not None:
            found = None if verdict.status in (Status.PASSED, Status.EXCLUDED) else verdict.status
            assert found == cases.known(name, variant), (
                f"{variant}: {verdict.status}: {verdict.detail}"
            )


@pytest.mark.parametrize(
    ("name", "variant"),
    crossed(
        ["add", "cumsum", "index_fill", "transpose", "sort", "addmm"],
        ["in_place", "out", "view_write", "errors"],
        rounds=2,
    ),
)
def test_the_other_variants(name: str, variant: str) -> None:
    verdict = examine(ENTRIES[name], variant, torch.float32, limit=3)
    assert verdict is None or verdict.status is Status.PASSED, verdict


def judged(op: Any, variant: str, dtype: torch.dtype = torch.float32, *, limit: int = 1) -> Verdict:
    """The verdict on an entry that has this variant for this dtype."""
    verdict = examine(op, variant, dtype, limit=limit)
    assert verdict is not None
    return verdict


def changed(function: Callable[..., Any]) -> Any:
    """The entry of `exp`, computing something else on the device."""
    op = copy.copy(ENTRIES["exp"])
    op.op = lambda x: function(x) if x.device.type == "xla" else torch.exp(x)
    return op


def refuse(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no")


FAULTS = {
    "a value": (lambda x: torch.exp(x) * 1.01, Status.WRONG, "not close"),
    "one element": (
        lambda x: torch.where(
            torch.arange(x.numel(), device="xla").view(x.shape) == 0, 0, torch.exp(x)
        ),
        Status.WRONG,
        "not close",
    ),
    "a shape": (lambda x: torch.exp(x)[None], Status.WRONG, "instead of torch.float32"),
    "a dtype": (lambda x: torch.exp(x).double(), Status.WRONG, "float64"),
    "a number of results": (lambda x: (torch.exp(x), x), Status.WRONG, "2 results instead of 1"),
    "an exception": (refuse, Status.ERROR, "ValueError: no"),
    "noise": (lambda x: torch.exp(x) + torch.rand_like(x), Status.WRONG, "not close"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    function, status, detail = FAULTS[fault]
    verdict = judged(changed(function), "forward", limit=3)
    assert verdict.status is status and detail in verdict.detail


def test_a_wrong_gradient_and_the_host_are_found() -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad / 2

    assert judged(changed(Halved.apply), "gradient").status is Status.WRONG
    with torch.library._scoped_library("spmd_test_opinfo", "FRAGMENT") as library:
        library.define("on_host(Tensor x) -> Tensor")
        library.impl("on_host", torch.exp, "CPU")
        verdict = judged(changed(torch.ops.spmd_test_opinfo.on_host), "forward")
    assert (verdict.status, verdict.detail) == (Status.HOST, "spmd_test_opinfo::on_host")


def test_random_operators_are_compared_in_shape_and_dtype() -> None:
    verdict = judged(ENTRIES["nn_functional_dropout"], "forward", limit=3)
    assert verdict.status is Status.PASSED and verdict.random


def test_what_does_not_apply_has_no_verdict() -> None:
    assert examine(ENTRIES["exp"], "gradient", torch.int64) is None
    assert judged(ENTRIES["empty"], "forward").status is Status.EXCLUDED


def test_the_table_counts_and_names() -> None:
    verdicts = [
        vars(judged(changed(FAULTS[name][0]), "forward")) for name in ("a value", "an exception")
    ]
    verdicts.append(vars(judged(ENTRIES["exp"], "forward")))
    text = summary(verdicts, num_devices=1, limit=1).markdown()
    assert "| forward | float32 | 3 | 1 | 0 | 1 | 1 | 33.3% | 0 | 0 |" in text
    assert (
        "**wrong**: exp, forward, float32: Tensor-likes are not close!" in text
        and "**error**: exp, forward, float32: ValueError: no" in text
    )
