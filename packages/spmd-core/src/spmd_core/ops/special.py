"""Functions of the error integral that XLA lacks, and the orthogonal polynomials."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels import cephes
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.registry import Context, as_array, lowering

# ---- error integral ------------------------------------------------------------------------------


def _ratio(x: jax.Array, above: tuple[float, ...], below: tuple[float, ...]) -> jax.Array:
    def polynomial(coefficients: tuple[float, ...]) -> jax.Array:
        total = jnp.full_like(x, coefficients[0])
        for c in coefficients[1:]:
            total = total * x + c
        return total

    return polynomial(above) / polynomial(below)


def _erfcx(x: jax.Array) -> jax.Array:
    """exp(x^2) erfc(x), without the overflow of the first factor where x is large."""
    size = jnp.abs(x)
    middle = jnp.clip(size, 1, 8)
    far = jnp.maximum(size, 8)
    # Beyond 1e8 the polynomials would overflow, and the leading term 1/(x sqrt(pi)) is exact in
    # float64.
    tail = jnp.where(
        far > 1e8,
        1 / (far * math.sqrt(math.pi)),
        _ratio(jnp.minimum(far, 1e8), cephes.ERFCX_R, cephes.ERFCX_S),
    )
    near = jnp.exp(jnp.minimum(size, 1) ** 2) * lax.erfc(size)
    right = jnp.where(
        size < 1, near, jnp.where(size < 8, _ratio(middle, cephes.ERFCX_P, cephes.ERFCX_Q), tail)
    )
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, 2 * jnp.exp(x * x) - right, right))


def _log_ndtr(x: jax.Array) -> jax.Array:
    t = x / math.sqrt(2)
    return jnp.where(x < -1, jnp.log(_erfcx(-t) / 2) - t * t, jnp.log1p(-lax.erfc(t) / 2))


def _ndtri(p: jax.Array) -> jax.Array:
    """The quantile of the normal distribution.

    A rational function around 1/2, and another one, of sqrt(-2 log p), in the tails.
    """
    edge = math.exp(-2)
    upper = p > 1 - edge
    tail = jnp.where(upper, 1 - p, p)
    d = tail - 0.5
    centre = math.sqrt(2 * math.pi) * (
        d + d * d * d * _ratio(d * d, cephes.NDTRI_P0, cephes.NDTRI_Q0)
    )
    x = jnp.sqrt(-2 * jnp.log(jnp.where(tail > 0, tail, edge)))
    z = 1 / x
    correction = z * jnp.where(
        x < 8,
        _ratio(z, cephes.NDTRI_P1, cephes.NDTRI_Q1),
        _ratio(z, cephes.NDTRI_P2, cephes.NDTRI_Q2),
    )
    far = x - jnp.log(x) / x - correction
    value = jnp.where(tail > edge, centre, jnp.where(upper, far, -far))
    value = jnp.where(p == 0, -jnp.inf, jnp.where(p == 1, jnp.inf, value))
    return jnp.where((p >= 0) & (p <= 1), value, jnp.nan)


_UNARY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "erfcx": _erfcx,
    "log_ndtr": _log_ndtr,
    "ndtri": _ndtri,
}


def _register_unary(name: str, function: Callable[[jax.Array], jax.Array]) -> None:
    @lowering(f"aten.special_{name}.default")
    def lower(ctx: Context, x: Any) -> jax.Array:
        return function(as_array(x, opmath(ctx.dtype))).astype(ctx.dtype)


for _name, _function in _UNARY.items():
    _register_unary(_name, _function)


# ---- orthogonal polynomials ----------------------------------------------------------------------
# The recurrences are those of Abramowitz & Stegun, table 22.7. torch gives 0 for a negative degree,
# and the exact values at the ends of the interval.

_Recurrence = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


def _evaluate_recurrence(
    x: jax.Array, n: jax.Array, first: jax.Array, following: _Recurrence
) -> jax.Array:
    """P_n(x) from P_0 = 1 and P_1 = `first`, where `following(k, x, P_k, P_(k-1))` is P_(k+1).

    One loop to the largest degree in the tensor. It ends early if all elements that have not
    reached their degree are NaN; torch's loop ends in the same way for each element.
    """

    def is_active(k: jax.Array, value: jax.Array) -> jax.Array:
        return (k < n) & ~jnp.isnan(value)

    def step(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        k, last, now = state
        active = is_active(k, now)
        new = following(k.astype(x.dtype), x, now, last)
        return k + 1, jnp.where(active, now, last), jnp.where(active, new, now)

    start = (jnp.ones((), n.dtype), jnp.ones_like(x), first)
    _, _, value = lax.while_loop(lambda state: is_active(state[0], state[2]).any(), step, start)
    return jnp.where(n < 0, 0, jnp.where(n == 0, jnp.ones_like(x), value))


def _alternating(n: jax.Array, dtype: np.dtype) -> jax.Array:
    return (1 - 2 * (n % 2)).astype(dtype)


def _chebyshev(kind: str, x: jax.Array, n: jax.Array) -> jax.Array:
    """A Chebyshev polynomial of the given kind ("t", "u", "v" or "w") and degree `n`.

    As in torch, high degrees inside the interval are computed from the angle (Abramowitz & Stegun
    22.3.15, 22.3.16), and all others by the recurrence.
    """
    count = n.astype(x.dtype)
    odd_weight = 2 * count + 1  # the value of the third and fourth kind at one end
    sign = _alternating(n, x.dtype)
    angle = jnp.arccos(jnp.clip(x, -1, 1))
    half = angle / 2
    ones = jnp.ones_like(x)
    first, right, left, trigonometric = {
        "t": (x, ones, sign, jnp.cos(count * angle)),
        "u": (2 * x, count + 1, sign * (count + 1), jnp.sin((count + 1) * angle) / jnp.sin(angle)),
        "v": (2 * x - 1, ones, sign * odd_weight, jnp.cos((count + 0.5) * angle) / jnp.cos(half)),
        "w": (2 * x + 1, odd_weight, sign, jnp.sin((count + 0.5) * angle) / jnp.sin(half)),
    }[kind]
    by_angle = (n > (6 if kind == "t" else 8)) & (jnp.abs(x) < 1)
    at_end = jnp.abs(x) == 1
    by_recurrence = _evaluate_recurrence(
        x,
        jnp.where(by_angle | at_end, jnp.minimum(n, 1), n),
        first,
        lambda k, x, now, last: 2 * x * now - last,
    )
    value = jnp.where(by_angle, trigonometric, by_recurrence)
    return jnp.where(n < 0, 0, jnp.where(at_end, jnp.where(x > 0, right, left), value))


def _shifted_chebyshev(kind: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    # The shifted polynomials are the others at 2x - 1.
    return lambda x, n: _chebyshev(kind, 2 * x - 1, n)


def _hermite(factor: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def hermite(x: jax.Array, n: jax.Array) -> jax.Array:
        # torch gives nan above these degrees, to avoid an overflow.
        limit = 128 if x.dtype == np.float32 else 512
        value = _evaluate_recurrence(
            x,
            jnp.minimum(n, limit),
            factor * x,
            lambda k, x, now, last: factor * (x * now - k * last),
        )
        return jnp.where(n > limit, jnp.nan, value)

    return hermite


def _laguerre(x: jax.Array, n: jax.Array) -> jax.Array:
    value = _evaluate_recurrence(
        x, n, 1 - x, lambda k, x, now, last: ((2 * k + 1 - x) * now - k * last) / (k + 1)
    )
    return jnp.where((x == 0) & (n >= 0), 1, value)


def _legendre(x: jax.Array, n: jax.Array) -> jax.Array:
    value = _evaluate_recurrence(
        x, n, x, lambda k, x, now, last: ((2 * k + 1) * x * now - k * last) / (k + 1)
    )
    at_end = (jnp.abs(x) == 1) & (n >= 0)
    return jnp.where(at_end, jnp.where(x > 0, jnp.ones_like(x), _alternating(n, x.dtype)), value)


_POLYNOMIALS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    **{f"chebyshev_polynomial_{kind}": partial(_chebyshev, kind) for kind in "tuvw"},
    **{f"shifted_chebyshev_polynomial_{kind}": _shifted_chebyshev(kind) for kind in "tuvw"},
    "hermite_polynomial_h": _hermite(2),
    "hermite_polynomial_he": _hermite(1),
    "laguerre_polynomial_l": _laguerre,
    "legendre_polynomial_p": _legendre,
}


def _register_polynomial(name: str, function: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    @lowering(
        *(f"aten.special_{name}.{overload}" for overload in ("default", "x_scalar", "n_scalar"))
    )
    def lower(ctx: Context, x: Any, n: Any) -> jax.Array:
        dtype = opmath(ctx.dtype)
        x, n = jnp.broadcast_arrays(
            as_array(x, dtype), as_array(as_array(n, dtype), np.dtype(np.int64))
        )
        return function(x, n).astype(ctx.dtype)


for _name, _polynomial in _POLYNOMIALS.items():
    _register_polynomial(_name, _polynomial)
