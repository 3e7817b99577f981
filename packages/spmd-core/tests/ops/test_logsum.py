"""Sums of logarithms against eager torch on the CPU; complex ones agree in the multiple of 2 pi."""

import itertools
import math

import pytest
import torch

from oracle import check
from spmd_core.ops import logsum  # noqa: F401  (registers the lowerings)

NAN, INF = math.nan, math.inf
SPECIAL = [0.0, -0.0, 1.0, -1.0, 700.0, INF, -INF, NAN]
PARTS = [0.0, 1.0, -1.0, INF, -INF, NAN], [0.0, 1.0, -2.5, 10.0]


def values(dtype: torch.dtype, shape: tuple[int, ...] = (4, 5), seed: int = 0) -> torch.Tensor:
    wide = torch.complex64 if dtype.is_complex else torch.float32
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=wide) * 5).to(
        dtype
    )


@pytest.mark.parametrize("op", ["logaddexp", "logaddexp2"])
def test_of_two(op: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        check(f"aten.{op}.default", values(dtype), values(dtype, (5,), 1))
    check(f"aten.{op}.default", torch.tensor(SPECIAL)[:, None], torch.tensor(SPECIAL))
    check(f"aten.{op}.default", torch.empty(0, 5), values(torch.float32, (5,)))
    check(f"aten.{op}.default", torch.tensor(1.5), torch.tensor(2.0))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_of_two_complex_numbers(dtype: torch.dtype) -> None:
    check("aten.logaddexp.default", values(dtype), values(dtype, (5,), 1), rtol=1e-5)
    special = torch.tensor([complex(*parts) for parts in itertools.product(*PARTS)], dtype=dtype)
    both_infinite = (special.real == INF)[:, None] & (special.real == INF)
    x, y = (z[~both_infinite] for z in torch.meshgrid(special, special, indexing="ij"))
    check("aten.logaddexp.default", x, y, rtol=1e-5)


@pytest.mark.parametrize("op", ["logcumsumexp", "_logcumsumexp"])
def test_running(op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        for dim in (0, -1):
            check(f"aten.{op}.default", values(dtype), dim)
    check(f"aten.{op}.default", torch.tensor([-INF, 1.0, -INF, 700.0, INF, 1.0]), 0)
    check(f"aten.{op}.default", torch.tensor(2.0), 0)
    check(f"aten.{op}.default", torch.tensor(2.0 + 9j), 0)
    check(f"aten.{op}.default", torch.empty(0, 3), 0)
