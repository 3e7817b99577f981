"""Upsampling against eager torch on the CPU."""

from typing import Any

import pytest
import torch
from tiers import crossed

from oracle import check
from spmd_core import releases
from spmd_core.ops import registry, upsample  # noqa: F401  (registers the lowerings)

SIZES = {1: (5,), 2: (5, 4), 3: (3, 4, 2)}
SMOOTH = [
    ("upsample_linear1d", 1),
    ("upsample_bilinear2d", 2),
    ("upsample_trilinear3d", 3),
    ("upsample_bicubic2d", 2),
]
# (dtype, factor): integral, fractional and shrinking factors.
CASES = [
    (torch.float32, 2),
    (torch.float32, 1.7),
    (torch.float32, 0.6),
    (torch.bfloat16, 1.7),
    (torch.float64, 3),
]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def check_both(op: str, x: torch.Tensor, sizes: list[int], *options: Any) -> None:
    sixteen = x.dtype is torch.bfloat16
    check(f"aten.{op}.default", x, sizes, *options, **({"atol": 6e-2} if sixteen else {}))
    check(
        f"aten.{op}_backward.default",
        values(x.dtype, *x.shape[:2], *sizes),
        sizes,
        list(x.shape),
        *options,
        **({"atol": 0.2} if sixteen else {}),
    )


@pytest.mark.parametrize(
    ("op", "num_dims"), crossed(["upsample_nearest", "_upsample_nearest_exact"], [1, 2, 3])
)
def test_nearest(op: str, num_dims: int) -> None:
    for dtype, factor in CASES if num_dims == 2 else CASES[:2]:
        sizes = [int(n * factor) for n in SIZES[num_dims]]
        check_both(f"{op}{num_dims}d", values(dtype, 2, 3, *SIZES[num_dims]), sizes)
        if num_dims == 2:
            check_both(
                f"{op}{num_dims}d",
                values(dtype, 2, 3, *SIZES[num_dims]),
                sizes,
                *[float(factor)] * num_dims,
            )


@pytest.mark.parametrize(("case", "align_corners"), crossed(SMOOTH, [False, True]))
def test_smooth(case: tuple[str, int], align_corners: bool) -> None:
    op, num_dims = case
    for dtype, factor in CASES if num_dims == 2 else CASES[:2]:
        sizes = [int(n * factor) for n in SIZES[num_dims]]
        check_both(op, values(dtype, 2, 3, *SIZES[num_dims]), sizes, align_corners)
    check_both(
        op,
        values(torch.float32, 2, 3, *SIZES[num_dims]),
        sizes,
        align_corners,
        *[float(factor)] * num_dims,
    )


def test_smooth_upsampling_to_one_element() -> None:
    check_both("upsample_bilinear2d", values(torch.float32, 1, 1, 4, 4), [1, 1], True)


def test_nearest_of_bytes() -> None:
    x = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 4, 4)
    check("aten.upsample_nearest2d.default", x, [7, 8])


@pytest.mark.parametrize(
    ("size", "align_corners", "mode"),
    crossed([(3, 5), (11, 10), (8, 2)], [False, True], ["bilinear", "bicubic", "lanczos"]),
)
def test_antialiased(mode, align_corners, size):
    name = f"aten._upsample_{mode}2d_aa"
    if releases.overload(f"{name}.default") is None:
        pytest.skip(f"torch {torch.__version__} has no mode {mode}")
    for scales in (
        (None, None),
        (None if size[0] == 8 else size[0] / 8 + 0.01, size[1] / 9 + 0.01),
    ):
        check(f"{name}.default", torch.randn(2, 3, 8, 9), size, align_corners, *scales)
        check(
            f"{name}_backward.default",
            torch.randn(2, 3, *size),
            size,
            (2, 3, 8, 9),
            align_corners,
            *scales,
        )
