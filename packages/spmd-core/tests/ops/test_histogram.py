"""Histograms against eager torch on the CPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import crossed

import spmd_core
from oracle import check, lower
from spmd_core.ops import histogram, registry  # noqa: F401  (registers the lowerings)
from spmd_core.recording import cpu_kernels

DTYPES = [torch.float32, torch.float64]


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(
    ("weighted", "density", "dtype"), crossed([False, True], [False, True], [*DTYPES])
)
def test_histogram(dtype: torch.dtype, density: bool, weighted: bool) -> None:
    x = values(dtype, 4, 30)
    options = {
        "density": density,
        "weight": values(dtype, 4, 30, seed=1).abs() if weighted else None,
    }
    check("aten.histogram.bin_ct", x, 10, **options)
    check("aten.histogram.bin_ct", x, 7, range=[-1.0, 1.5], **options)
    check(
        "aten.histogram.bins_tensor",
        x,
        torch.tensor([-1, -0.5, 0.1, 0.1, 2], dtype=dtype),
        **options,
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_several_dims(weighted: bool) -> None:
    x = values(torch.float32, 3, 10, 3)
    options = {
        "density": True,
        "weight": values(torch.float32, 3, 10, seed=1).abs() if weighted else None,
    }
    check("aten._histogramdd_bin_edges.default", x, [2, 3, 4], **options)
    check("aten._histogramdd_from_bin_cts.default", x, [2, 3, 4], **options)
    check(
        "aten._histogramdd_from_bin_cts.default",
        x,
        [2, 3, 4],
        range=[-1.0, 1.0, 0.0, 2.0, -2.0, 3.0],
        **options,
    )
    check(
        "aten._histogramdd_from_bin_tensors.default",
        x,
        [torch.linspace(-1, 1, n) for n in (2, 3, 5)],
        **options,
    )


def test_values_on_edges_and_none() -> None:
    steps = torch.arange(9.0)
    check("aten.histogram.bin_ct", steps, 8)
    check("aten.histogram.bin_ct", steps, 4, range=[0.0, 8.0])
    check("aten.histogram.bin_ct", steps, 4, range=[2.0, 2.0])
    check("aten.histogram.bins_tensor", steps, torch.tensor([3.0, 2.0, 1.0]))
    check("aten.histogram.bin_ct", torch.zeros(5), 4)
    check("aten.histogram.bin_ct", torch.zeros(0), 4)
    check("aten.histogram.bin_ct", torch.tensor([0.5, math.nan, math.inf]), 4, range=[0.0, 1.0])


def test_a_range_that_is_not_finite_gives_nan() -> None:
    """Eager torch raises; a program on the device cannot."""
    x = torch.tensor([1.0, math.nan])
    outs = (registry.Out((2,), torch.float32), registry.Out((3,), torch.float32))
    assert all(math.isnan(v) for v in lower("aten.histogram.bin_ct", (x, 2), {}, outs)[0].tolist())
    assert all(math.isnan(v) for v in lower("aten.histc.default", (x, 2), {}, outs[:1])[0].tolist())


def test_on_the_device() -> None:
    x = values(torch.float32, 20, 2)
    on_device = x.to("xla")
    with spmd_core.strict():
        got = torch.histogramdd(on_device, [3, 4])
        edges = torch.histogram(on_device, 5).bin_edges
    right = torch.histogramdd(x, [3, 4])
    torch.testing.assert_close(got.hist.cpu(), right.hist)
    for mine, expected in zip(got.bin_edges, right.bin_edges):
        torch.testing.assert_close(mine.cpu(), expected)
    torch.testing.assert_close(edges.cpu(), torch.histogram(x, 5).bin_edges)


MISTAKES = [
    (NotImplementedError, "not implemented for", lambda x: torch.histogram(x.int(), 3)),
    (RuntimeError, "at least 2 dimensions", lambda x: torch.histogramdd(x[:, 0], [3])),
    (RuntimeError, "must be equal to the innermost dimension", lambda x: torch.histogramdd(x, [3])),
    (
        RuntimeError,
        "should have the same shape as the input tensor",
        lambda x: torch.histogram(x, 3, weight=x[:, 0]),
    ),
    (
        RuntimeError,
        "input tensor and weight tensor should have the same dtype",
        lambda x: torch.histogram(x, 3, weight=x.double()),
    ),
    (RuntimeError, "bins must be > 0", lambda x: torch.histogram(x, 0)),
    (
        RuntimeError,
        "range should have 4 elements",
        lambda x: torch.histogramdd(x, [3, 3], range=[0.0, 1.0]),
    ),
    (RuntimeError, "is not finite", lambda x: torch.histogram(x, 3, range=(0.0, math.inf))),
    (RuntimeError, "min should not exceed max", lambda x: torch.histogram(x, 3, range=(1.0, 0.0))),
    (RuntimeError, "bins tensor should have one dimension", lambda x: torch.histogram(x, x)),
    (
        RuntimeError,
        "input tensor and bins tensors should have the same dtype",
        lambda x: torch.histogram(x, x[:, 0].double()),
    ),
]


@pytest.mark.parametrize(
    ("kind", "message", "call"), MISTAKES, ids=[message for _, message, _ in MISTAKES]
)
@pytest.mark.parametrize("size", ["small", "large"])
def test_refusals(
    kind: type[Exception],
    message: str,
    call: Callable[[torch.Tensor], Any],
    size: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Errors as in eager torch, also for tensors too large for an eager call on stand-ins."""
    x = values(torch.float32, 6, 2)
    with pytest.raises(kind, match=message):
        call(x)
    if size == "large":
        monkeypatch.setattr(cpu_kernels, "ask", lambda *call, **options: cpu_kernels.Answer())
    with pytest.raises(kind, match=message):
        call(x.to("xla"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_histc(dtype: torch.dtype) -> None:
    x = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=dtype) * 10
    check("aten.histc.default", x, 7)
    check("aten.histc.default", x, 5, 2, 8)
    check("aten.histc.default", x.reshape(20, 10), 10, -1, 10)
    check("aten.histc.default", torch.full((4,), 3.0, dtype=dtype), 4)
    check("aten.histc.default", torch.tensor([1.0, 2, 3, float("nan")], dtype=dtype), 4, 1, 3)
    check("aten.histc.default", torch.zeros(0, dtype=dtype), 4)
