"""Tensors of drawn and of special values, for the tests of families of operations."""

import math

import torch

NAN, INF = math.nan, math.inf
FLOATS = [torch.float32, torch.bfloat16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 100.0, -100.0, 1e-3, NAN, INF, -INF]


def values(
    dtype: torch.dtype,
    low: float = -3.0,
    high: float = 3.0,
    shape: tuple[int, ...] = (3, 5),
    seed: int = 0,
) -> torch.Tensor:
    """Uniformly distributed between the bounds; truth values by their sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
    return x > 0 if dtype is torch.bool else x.to(dtype)


def normal(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of these shapes, normally distributed, drawn from torch's own generator."""
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
