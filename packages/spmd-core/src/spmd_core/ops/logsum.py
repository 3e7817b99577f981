"""Sums of numbers that are given as their logarithms: logaddexp, logaddexp2, logcumsumexp.

For complex numbers the formula is torch's own, because torch does not reduce the imaginary part to
(-pi, pi]: it is the larger term's imaginary part, plus the change by the smaller term.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels import loops
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.registry import Context, as_array, lowering


def _is_nan(x: jax.Array) -> jax.Array:
    return jnp.isnan(x.real) | jnp.isnan(x.imag)


def _log_of_infinite(x: jax.Array, y: jax.Array) -> jax.Array:
    """log(e^x + e^y) where both real parts are inf: each part of the sum is infinite or 0."""

    def part(of: Any) -> jax.Array:
        signs = of(x.imag), of(y.imag)
        return sum((jnp.where(s == 0, 0, s * np.inf) for s in signs), jnp.zeros_like(x.real))

    return lax.complex(jnp.full_like(x.real, np.inf), jnp.arctan2(part(jnp.sin), part(jnp.cos)))


def _complex_logaddexp(x: jax.Array, y: jax.Array) -> jax.Array:
    swap = x.real < y.real
    low, high = jnp.where(swap, x, y), jnp.where(swap, y, x)
    low, high = (jnp.where(_is_nan(x), x, jnp.where(_is_nan(y), y, z)) for z in (low, high))
    equal_and_infinite = (low.real == high.real) & jnp.isinf(low.real)
    safe_low, safe_high = (jnp.where(equal_and_infinite, jnp.zeros_like(z), z) for z in (low, high))
    finite = jnp.log1p(jnp.exp(safe_low - safe_high)) + safe_high
    infinite = jnp.where(low.real < 0, low, _log_of_infinite(low, high))
    result = jnp.where(equal_and_infinite, infinite, finite)
    return jnp.where(_is_nan(low), lax.complex(*(jnp.full_like(low.real, np.nan),) * 2), result)


@lowering("aten.logaddexp.default")
def _logaddexp(ctx: Context, x: Any, y: Any) -> jax.Array:
    function = (
        _complex_logaddexp if jnp.issubdtype(ctx.dtype, np.complexfloating) else jnp.logaddexp
    )
    return function(*(as_array(v, opmath(ctx.dtype)) for v in (x, y))).astype(ctx.dtype)


@lowering("aten.logaddexp2.default")
def _logaddexp2(ctx: Context, x: Any, y: Any) -> jax.Array:
    return jnp.logaddexp2(*(as_array(v, opmath(ctx.dtype)) for v in (x, y))).astype(ctx.dtype)


def _complex_logcumsumexp(x: jax.Array, axis: int) -> jax.Array:
    """One element after the other, because the imaginary part depends on the order."""

    def step(so_far: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = _complex_logaddexp(so_far, value)
        return total, total

    along = jnp.moveaxis(x, axis, 0)
    _, sums = loops.scan(step, jnp.full(along.shape[1:], -np.inf, x.dtype), along)
    return jnp.moveaxis(sums, 0, axis)


def _real_logcumsumexp(x: jax.Array) -> jax.Array:
    """Along the last dim, as maxima and sums relative to these."""

    def join(
        left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        largest = jnp.maximum(left[0], right[0])
        shift = jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest))
        sums = [total * jnp.exp(top - shift) for top, total in (left, right)]
        return largest, sums[0] + sums[1]

    largest, total = lax.associative_scan(join, (x, jnp.ones_like(x)), axis=-1)
    return jnp.where(jnp.isfinite(largest), largest + jnp.log(total), largest)


@lowering("aten.logcumsumexp.default", "aten._logcumsumexp.default")
def _logcumsumexp(ctx: Context, x: Any, dim: int) -> jax.Array:
    x = as_array(x, opmath(ctx.dtype))
    if x.ndim == 0:
        return x.astype(ctx.dtype)
    if jnp.iscomplexobj(x):
        return _complex_logcumsumexp(x, axis=dim % x.ndim)
    # The scan slices and concatenates the dim many times. Its result is replicated, too: otherwise
    # the split of a later value would propagate to each step of the scan, which would exchange
    # blocks, and take XLA ten times as long.
    along = ctx.replicate_last_dims(jnp.moveaxis(x, dim, -1), 1)
    sums = ctx.replicate_last_dims(_real_logcumsumexp(along), 1)
    return jnp.moveaxis(sums, -1, dim).astype(ctx.dtype)
