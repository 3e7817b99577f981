"""Pooling against eager torch on the CPU."""

import math
import re
from typing import Any

import pytest
import torch

import spmd_core as spmd
from oracle import check
from spmd_core.ops import pool  # noqa: F401  (registers the lowerings)

A = torch.ops.aten
FLOATS = [torch.float32, torch.bfloat16]


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


# ---- maximum -------------------------------------------------------------------------------------

# kernel, stride, padding, dilation, ceil_mode
MAX_2D: list[tuple[Any, ...]] = [
    ([2, 2], [2, 2], [0, 0], [1, 1], False),
    ([3, 3], [2, 2], [1, 1], [1, 1], False),
    ([3, 2], [2, 1], [1, 0], [1, 2], False),
    ([3, 3], [2, 2], [1, 1], [1, 1], True),
    ([2, 3], [3, 2], [0, 1], [2, 1], True),
    ([2], [], [0], [1], False),
    ([2, 1], [3, 4], [0, 0], [1, 1], False),
]


def test_a_program_keeps_no_positions_of_whole_images() -> None:
    x = torch.zeros(4, 8, 33, 30).to("xla")
    text = spmd.debugging.hlo(torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)[1])
    shapes = re.findall(r"\[([\d,]+)\]\S* constant\(", text)
    assert all(math.prod(map(int, shape.split(","))) < 64 for shape in shapes)


@pytest.mark.parametrize("geometry", MAX_2D)
def test_max_pool2d(geometry: tuple[Any, ...]) -> None:
    for x in (values(torch.float32, 2, 3, 9, 8), values(torch.bfloat16, 3, 8, 9)):
        check("aten.max_pool2d_with_indices.default", x, *geometry)
    x = values(torch.float32, 2, 3, 9, 8)
    out, indices = A.max_pool2d_with_indices(x, *geometry)
    check(
        "aten.max_pool2d_with_indices_backward.default",
        values(torch.float32, *out.shape, seed=1),
        x,
        *geometry,
        indices,
    )


def test_max_pool2d_defaults_and_dtypes() -> None:
    check("aten.max_pool2d_with_indices.default", values(torch.float32, 2, 3, 9, 8), [2, 3])
    check("aten.max_pool2d_with_indices.default", values(torch.int64, 1, 2, 7, 7), *MAX_2D[1])
    x = values(torch.bfloat16, 2, 3, 9, 8)
    out, indices = A.max_pool2d_with_indices(x, *MAX_2D[1])
    check(
        "aten.max_pool2d_with_indices_backward.default",
        values(torch.bfloat16, *out.shape),
        x,
        *MAX_2D[1],
        indices,
    )


def test_max_pool2d_of_equal_values_nan_and_infinity() -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor([[[1.0, 1, 2, 2], [1, nan, 2, 2], [nan, 0, -inf, -inf], [0, 0, -inf, -inf]]])
    for geometry in (([2, 2], [2, 2], [0, 0]), ([3, 3], [1, 1], [1, 1])):
        check("aten.max_pool2d_with_indices.default", x, *geometry)
    check(
        "aten.max_pool2d_with_indices.default", torch.full((1, 3, 3), -inf), [3, 3], [2, 2], [1, 1]
    )


def test_max_pool2d_with_a_large_kernel() -> None:
    x = values(torch.float32, 2, 3, 12, 11)
    check("aten.max_pool2d_with_indices.default", x, [9, 8], [3, 3])
    out, indices = A.max_pool2d_with_indices(x, [9, 8], [3, 3])
    check(
        "aten.max_pool2d_with_indices_backward.default",
        torch.rand_like(out),
        x,
        [9, 8],
        [3, 3],
        [0, 0],
        [1, 1],
        False,
        indices,
    )


@pytest.mark.parametrize(
    "geometry",
    [
        ([2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False),
        ([2, 3, 2], [1, 2, 2], [1, 1, 0], [1, 1, 2], True),
    ],
)
def test_max_pool3d(geometry: tuple[Any, ...]) -> None:
    x = values(torch.float32, 2, 3, 5, 6, 5)
    check("aten.max_pool3d_with_indices.default", x, *geometry)
    out, indices = A.max_pool3d_with_indices(x, *geometry)
    check(
        "aten.max_pool3d_with_indices_backward.default", torch.rand_like(out), x, *geometry, indices
    )


@pytest.mark.parametrize("sizes", [[1, 1], [2, 3], [3, 5], [7, 8], [9, 2]])
def test_adaptive_max_pool2d(sizes: list[int]) -> None:
    x = values(torch.float32, 2, 3, 7, 8)
    check("aten.adaptive_max_pool2d.default", x, sizes)
    check("aten.adaptive_max_pool2d.default", x[0].bfloat16(), sizes)
    out, indices = A.adaptive_max_pool2d(x, sizes)
    check("aten.adaptive_max_pool2d_backward.default", torch.rand_like(out), x, indices)


def test_adaptive_max_pool3d() -> None:
    x = values(torch.float32, 2, 3, 4, 7, 5)
    check("aten.adaptive_max_pool3d.default", x, [2, 3, 4])
    out, indices = A.adaptive_max_pool3d(x, [2, 3, 4])
    check("aten.adaptive_max_pool3d_backward.default", torch.rand_like(out), x, indices)


# ---- mean ----------------------------------------------------------------------------------------

# kernel, stride, padding, ceil_mode, count_include_pad, divisor_override
MEAN_2D: list[tuple[Any, ...]] = [
    ([2, 2], [2, 2], [0, 0], False, True, None),
    ([3, 3], [2, 2], [1, 1], False, True, None),
    ([3, 3], [2, 2], [1, 1], True, True, None),
    ([3, 3], [2, 2], [1, 1], True, False, None),
    ([3, 2], [2, 3], [1, 0], True, False, 4),
    ([2], [], [0], False, True, None),
    ([2, 1], [3, 4], [0, 0], False, True, None),
]


@pytest.mark.parametrize("geometry", MEAN_2D)
def test_avg_pool2d(geometry: tuple[Any, ...]) -> None:
    for x in (
        values(torch.float32, 2, 3, 9, 8),
        values(torch.bfloat16, 3, 8, 9),
        values(torch.int64, 1, 2, 7, 7),
    ):
        check("aten.avg_pool2d.default", x, *geometry)
    for dtype in FLOATS:
        x = values(dtype, 2, 3, 9, 8)
        grad = values(dtype, *A.avg_pool2d(x, *geometry).shape, seed=1)
        check("aten.avg_pool2d_backward.default", grad, x, *geometry)


def test_avg_pool2d_defaults_and_infinity() -> None:
    x = values(torch.float32, 2, 3, 9, 8)
    x[0, 0, 3, 3] = math.inf
    check("aten.avg_pool2d.default", x, [2, 3])


@pytest.mark.parametrize(
    "geometry",
    [
        ([2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None),
        ([2, 3, 2], [1, 2, 2], [1, 1, 0], True, False, None),
    ],
)
def test_avg_pool3d(geometry: tuple[Any, ...]) -> None:
    x = values(torch.float32, 2, 3, 5, 6, 5)
    check("aten.avg_pool3d.default", x, *geometry)
    grad = torch.rand_like(A.avg_pool3d(x, *geometry))
    check("aten.avg_pool3d_backward.default", grad, x, *geometry)


@pytest.mark.parametrize("sizes", [[1, 1], [2, 4], [3, 5], [6, 8], [9, 3]])
def test_adaptive_avg_pool2d(sizes: list[int]) -> None:
    for dtype in FLOATS:
        x = values(dtype, 2, 3, 6, 8)
        check("aten._adaptive_avg_pool2d.default", x, sizes)
        check("aten._adaptive_avg_pool2d.default", x[0], sizes)
        check(
            "aten._adaptive_avg_pool2d_backward.default",
            values(dtype, 2, 3, *sizes, seed=1),
            x,
            atol=6e-2 if dtype is torch.bfloat16 else None,
        )


def test_adaptive_avg_pool2d_keeps_an_infinity_in_its_windows() -> None:
    x = torch.zeros(1, 1, 7)
    x[0, 0, 0] = math.inf
    check("aten._adaptive_avg_pool2d.default", x, [1, 3])


def test_adaptive_avg_pool3d() -> None:
    x = values(torch.float32, 2, 3, 4, 7, 5)
    check("aten._adaptive_avg_pool3d.default", x, [2, 3, 4])
    check(
        "aten._adaptive_avg_pool3d_backward.default",
        values(torch.float32, 2, 3, 2, 3, 4, seed=1),
        x,
    )


@pytest.mark.parametrize("num_dims", [2, 3])
def test_fractional_maximum(num_dims):
    sizes, outs, kernel = (9, 8, 7)[:num_dims], (4, 3, 1)[:num_dims], (2, 3, 2)[:num_dims]
    for x in (
        torch.randn(2, 3, *sizes),
        torch.ones(2, 3, *sizes, dtype=torch.float64),
        torch.randn(3, *sizes),
    ):
        samples = torch.rand(2 if x.dim() == num_dims + 2 else 1, 3, num_dims, dtype=x.dtype)
        name = f"fractional_max_pool{num_dims}d"
        check(f"aten.{name}.default", x, kernel, outs, samples)
        out, indices = getattr(torch.ops.aten, name)(x, kernel, outs, samples)
        check(f"aten.{name}_backward.default", torch.randn_like(out), x, kernel, outs, indices)
