"""Discrete Fourier transforms over any dims: complex to complex, real to complex (whole or one-sided), and one-sided complex to real."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from spmd_core.ops.registry import Context, lowering

# torch's `fft_norm_mode`, as the integer that its kernels receive.
_NONE, _BY_ROOT_N, _BY_N = 0, 1, 2


def _normalised(x: jax.Array, normalization: int, num_points: int) -> jax.Array:
    """`x`, a plain sum over `num_points` terms, times the factor of the mode."""
    if normalization == _NONE:
        return x
    return x * (1 / (math.sqrt(num_points) if normalization == _BY_ROOT_N else num_points))


def _in_order(ctx: Context, x: jax.Array) -> jax.Array:
    """In memory in the order of its dims: a CPU's transforms take no other, and the compiler does not see to it after a collective."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if ctx.platform == "cpu" else x


def _last_dim(ctx: Context, x: jax.Array, dim: int, kind: lax.FftType, length: int) -> jax.Array:
    """One transform along `dim`, which XLA wants to be the last; without any factor, where XLA divides the inverse ones by their length."""
    x = jnp.moveaxis(x, dim, -1)
    # XLA's partitioner aborts the process on a transform over some dims that are split unevenly.
    y = ctx.keep_whole(
        _in_order(ctx, lax.fft(_in_order(ctx, ctx.keep_whole(x, 1)), kind, (length,))), 1
    )
    return jnp.moveaxis(y, -1, dim) * (1 if kind in (lax.FftType.FFT, lax.FftType.RFFT) else length)


def _complex(ctx: Context, x: jax.Array, dims: Sequence[int], *, forward: bool) -> jax.Array:
    """The transform of a complex array, one dim after the other: a dim that is split over devices is gathered for its own pass alone."""
    for dim in dims:
        x = _last_dim(ctx, x, dim, lax.FftType.FFT if forward else lax.FftType.IFFT, x.shape[dim])
    return x


def _num_points(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[d] for d in dims)


@lowering("aten._fft_c2c.default")
def _fft_c2c(ctx: Context, x: Any, dim: Any, normalization: int, forward: bool) -> jax.Array:
    if 0 in ctx.shape:
        return jnp.zeros(ctx.shape, ctx.dtype)
    return _normalised(
        _complex(ctx, x, dim, forward=forward), normalization, _num_points(x.shape, dim)
    )


@lowering("aten._fft_r2c.default")
def _fft_r2c(ctx: Context, x: Any, dim: Any, normalization: int, onesided: bool) -> jax.Array:
    if 0 in ctx.shape:
        return jnp.zeros(ctx.shape, ctx.dtype)
    if onesided:
        spectrum = _complex(
            ctx,
            _last_dim(ctx, x, dim[-1], lax.FftType.RFFT, x.shape[dim[-1]]),
            dim[:-1],
            forward=True,
        )
    else:
        spectrum = _complex(ctx, x.astype(ctx.dtype), dim, forward=True)
    return _normalised(spectrum, normalization, _num_points(x.shape, dim))


@lowering("aten._fft_c2r.default")
def _fft_c2r(ctx: Context, x: Any, dim: Any, normalization: int, last_dim_size: int) -> jax.Array:
    if 0 in ctx.shape:
        return jnp.zeros(ctx.shape, ctx.dtype)
    x = _complex(ctx, x, dim[:-1], forward=False)
    # A shorter spectrum than last_dim_size asks for is an error of the meta kernel; a longer one is cut, as torch cuts it.
    half = lax.slice_in_dim(x, 0, last_dim_size // 2 + 1, axis=dim[-1])
    signal = _last_dim(ctx, half, dim[-1], lax.FftType.IRFFT, last_dim_size)
    return _normalised(signal, normalization, _num_points(ctx.shape, dim))
