"""Polygamma, Hurwitz zeta and incomplete gamma functions, with torch's values at the edges."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.registry import Context, as_array, lowering


def _digamma(x: jax.Array) -> jax.Array:
    # torch's poles: nan at each negative integer, at +-0 an infinity of the opposite sign. At -inf
    # there is no limit.
    poles = (x < 0) & (x == jnp.floor(x))
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), jnp.where(poles, jnp.nan, lax.digamma(x)))


def _zeta(s: jax.Array, q: jax.Array) -> jax.Array:
    """Hurwitz' zeta: the sum of (q + k)^-s over k >= 0.

    XLA's function is right for q > 0. For a negative q the sum is cut at zero. With f the
    fractional part of |q|, the terms with q + k > 0 are zeta(s, 1 - f). Those with q + k < 0 are
    the terms of zeta(s, f) up to |q|, times the sign of (-1)^-s.
    """
    s, q = jnp.broadcast_arrays(s, q)
    size = jnp.abs(q)
    fraction = size - jnp.floor(size)
    inside = (q < 0) & (fraction > 0)
    right = lax.zeta(s, jnp.where(inside, 1 - fraction, q))
    sign = jnp.where(jnp.fmod(s, 2) == 0, 1, -1).astype(q.dtype)
    # In this order, because the first two terms cancel exactly where s is odd and f is 1/2, and the
    # third one remains.
    total = (right + sign * lax.zeta(s, jnp.where(inside, fraction, 1))) - sign * lax.zeta(
        s, jnp.where(inside, size + 1, 1)
    )
    value = jnp.where(inside, jnp.where(s == jnp.floor(s), total, jnp.nan), right)
    value = jnp.where(
        jnp.isinf(s) & ~jnp.isnan(q), jnp.where(q < 1, jnp.inf, jnp.where(q == 1, 1, value)), value
    )
    value = jnp.where((s == 1) | ((q <= 0) & (fraction == 0)) | (q == -jnp.inf), jnp.inf, value)
    return jnp.where(s < 1, jnp.nan, value)


def _trigamma(x: jax.Array) -> jax.Array:
    """By reflection left of 1/2 (Abramowitz & Stegun 6.4.7), for torch's values near a pole."""
    reflects = x < 0.5
    sine = jnp.sin(math.pi * jnp.where(reflects, x, 0.5))
    right = _zeta(jnp.full_like(x, 2), jnp.where(reflects, 1 - x, x))
    right = jnp.where(jnp.isposinf(x), 0, right)
    return jnp.where(reflects, math.pi**2 / (sine * sine) - right, right)


@lowering("aten.digamma.default")
def _lower_digamma(ctx: Context, x: Any) -> jax.Array:
    return _digamma(as_array(x, opmath(ctx.dtype))).astype(ctx.dtype)


@lowering("aten.polygamma.default")
def _polygamma(ctx: Context, n: int, x: Any) -> jax.Array:
    x = as_array(x, opmath(ctx.dtype))
    if n < 2:
        return (_trigamma(x) if n else _digamma(x)).astype(ctx.dtype)
    # Abramowitz & Stegun 6.4.10. A factorial that is too large for the dtype is an infinity.
    factorial = jnp.exp(lax.lgamma(jnp.full_like(x, n + 1))) if n > 20 else math.factorial(n)
    return ((1 if n % 2 else -1) * factorial * _zeta(jnp.full_like(x, n + 1), x)).astype(ctx.dtype)


@lowering(
    "aten.special_zeta.default", "aten.special_zeta.other_scalar", "aten.special_zeta.self_scalar"
)
def _special_zeta(ctx: Context, s: Any, q: Any) -> jax.Array:
    dtype = opmath(ctx.dtype)
    return _zeta(as_array(s, dtype), as_array(q, dtype)).astype(ctx.dtype)


def _incomplete(
    ctx: Context, function: Callable[..., jax.Array], a: Any, x: Any, *, at_zero: int
) -> jax.Array:
    """`function` in float64; `at_zero` is its value at x = 0.

    Near a = x = 1000 XLA's error is 3e-4 in float32 and 4e-10 in float64. torch uses Temme's
    expansion there, which XLA does not have.
    """
    a, x = jnp.broadcast_arrays(*(as_array(v, np.dtype(np.float64)) for v in (a, x)))
    inside = (a > 0) & (x > 0) & jnp.isfinite(a) & jnp.isfinite(x)
    value = function(jnp.where(inside, a, 1), jnp.where(inside, x, 1))
    value = jnp.where(
        jnp.isinf(x), 1 - at_zero, jnp.where(jnp.isnan(a) | jnp.isnan(x), jnp.nan, value)
    )
    value = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, at_zero), value)
    value = jnp.where(x == 0, at_zero, value)
    value = jnp.where(a == 0, jnp.where(x > 0, 1 - at_zero, jnp.nan), value)
    return jnp.where((a < 0) | (x < 0), jnp.nan, value).astype(ctx.dtype)


@lowering("aten.igamma.default")
def _igamma(ctx: Context, a: Any, x: Any) -> jax.Array:
    return _incomplete(ctx, lax.igamma, a, x, at_zero=0)


@lowering("aten.igammac.default")
def _igammac(ctx: Context, a: Any, x: Any) -> jax.Array:
    return _incomplete(ctx, lax.igammac, a, x, at_zero=1)
