"""Discrete Fourier transforms over any dims: complex or real input, full or one-sided spectra."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from spmd_core.ops.kernels.transforms import transform
from spmd_core.ops.registry import Context, lowering

_DOUBLE = (torch.float64, torch.complex128)
# torch's `fft_norm_mode`, as the integer that its kernels receive.
_NONE, _BY_ROOT_N, _BY_N = 0, 1, 2


def _normalised(x: jax.Array, normalization: int, num_points: int) -> jax.Array:
    """`x`, a transform without any factor over `num_points` points, times the mode's factor."""
    if normalization == _NONE:
        return x
    return x * (1 / (math.sqrt(num_points) if normalization == _BY_ROOT_N else num_points))


def _transform_dim(
    ctx: Context, x: jax.Array, dim: int, kind: lax.FftType, length: int
) -> jax.Array:
    """One transform along `dim`, without any factor.

    XLA transforms the last dims only, and divides inverse transforms by their length.
    """
    x = jnp.moveaxis(x, dim, -1)
    y = transform(
        x, kind, (length,), replicate_last_dims=ctx.replicate_last_dims, platform=ctx.platform
    )
    return jnp.moveaxis(y, -1, dim) * (1 if kind in (lax.FftType.FFT, lax.FftType.RFFT) else length)


def _complex_transform(
    ctx: Context, x: jax.Array, dims: Sequence[int], *, forward: bool
) -> jax.Array:
    """The transform of a complex array, one dim after the other.

    So a dim that is split over devices is gathered for its own transform only.
    """
    for dim in dims:
        x = _transform_dim(
            ctx, x, dim, lax.FftType.FFT if forward else lax.FftType.IFFT, x.shape[dim]
        )
    return x


def _num_points(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[d] for d in dims)


def _has_no_double(args: Any, kwargs: Any, platform: str) -> bool:
    """Whether XLA lacks the transform: TPUs transform single precision alone."""
    return platform == "tpu" and args[0].dtype in _DOUBLE


@lowering("aten._fft_c2c.default", host_when=_has_no_double)
def _fft_c2c(ctx: Context, x: Any, dim: Any, normalization: int, forward: bool) -> jax.Array:
    if 0 in ctx.shape:
        return jnp.zeros(ctx.shape, ctx.dtype)
    return _normalised(
        _complex_transform(ctx, x, dim, forward=forward), normalization, _num_points(x.shape, dim)
    )


@lowering("aten._fft_r2c.default", host_when=_has_no_double)
def _fft_r2c(ctx: Context, x: Any, dim: Any, normalization: int, onesided: bool) -> jax.Array:
    if 0 in ctx.shape:
        return jnp.zeros(ctx.shape, ctx.dtype)
    if onesided:
        spectrum = _complex_transform(
            ctx,
            _transform_dim(ctx, x, dim[-1], lax.FftType.RFFT, x.shape[dim[-1]]),
            dim[:-1],
            forward=True,
        )
    else:
        spectrum = _complex_transform(ctx, x.astype(ctx.dtype), dim, forward=True)
    return _normalised(spectrum, normalization, _num_points(x.shape, dim))


@lowering("aten._fft_c2r.default", host_when=_has_no_double)
def _fft_c2r(ctx: Context, x: Any, dim: Any, normalization: int, last_dim_size: int) -> jax.Array:
    if 0 in ctx.shape:
        return jnp.zeros(ctx.shape, ctx.dtype)
    x = _complex_transform(ctx, x, dim[:-1], forward=False)
    # The meta kernel raises for a spectrum that is too short for last_dim_size; one that is too
    # long is cut, as in torch.
    half = lax.slice_in_dim(x, 0, last_dim_size // 2 + 1, axis=dim[-1])
    signal = _transform_dim(ctx, half, dim[-1], lax.FftType.IRFFT, last_dim_size)
    return _normalised(signal, normalization, _num_points(ctx.shape, dim))
