"""Sliding blocks against eager torch on the CPU."""

import pytest
import torch
from tiers import crossed

from oracle import check
from spmd_core.ops import unfold  # noqa: F401  (registers the lowerings)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64]
# (window, dilation, padding, stride)
OPTIONS = [
    ((2, 3), (1, 1), (0, 0), (1, 1)),
    ((2, 2), (2, 1), (1, 2), (2, 3)),
    ((3, 3), (1, 2), (1, 1), (2, 2)),
]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)


@pytest.mark.parametrize(("dtype", "options"), crossed(DTYPES, OPTIONS))
def test_blocks_and_back(dtype: torch.dtype, options: tuple[tuple[int, int], ...]) -> None:
    x = values(dtype, 2, 3, 7, 8)
    check("aten.im2col.default", x, *options)
    check("aten.im2col.default", x[0], *options)
    columns = values(dtype, *torch.ops.aten.im2col(x, *options).shape)
    # torch rounds to bfloat16 after each of up to nine additions.
    loose = {"atol": 6e-2} if dtype is torch.bfloat16 else {}
    check("aten.col2im.default", columns, [7, 8], *options, **loose)
    check("aten.col2im.default", columns[0], [7, 8], *options, **loose)


def test_no_batch() -> None:
    check("aten.im2col.default", torch.rand(0, 3, 7, 8), *OPTIONS[0])
