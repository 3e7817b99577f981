"""Bessel functions of the orders 0 and 1 and the Airy function Ai, by Cephes' approximations."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_core.ops.kernels import cephes
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.registry import Context, as_array, lowering

_Table = tuple[float, ...]


def _polynomial(x: jax.Array, coefficients: _Table) -> jax.Array:
    total = jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total = total * x + c
    return total


def _ratio(x: jax.Array, above: _Table, below: _Table) -> jax.Array:
    return _polynomial(x, above) / _polynomial(x, below)


def _chebyshev(x: jax.Array, coefficients: _Table) -> jax.Array:
    """The sum of c[n] T_n(x / 2) with half of the constant term, by Clenshaw's recurrence.

    The coefficients start with the highest order.
    """
    before, last, now = jnp.zeros_like(x), jnp.zeros_like(x), jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        before, last, now = last, now, x * now - last + c
    return (now - before) / 2


# ---- first and second kind -----------------------------------------------------------------------


def _asymptotic(x: jax.Array, order: int) -> tuple[jax.Array, jax.Array]:
    """J and Y for x > 5 by their asymptotic form (Abramowitz & Stegun 9.2.5 and 9.2.6)."""
    pp, pq, qp, qq = (getattr(cephes, f"ORDER_{order}_{name}") for name in ("PP", "PQ", "QP", "QQ"))
    inverse = 25 / (x * x)
    even, odd = _ratio(inverse, pp, pq), 5 / x * _ratio(inverse, qp, qq)
    phase = x - (2 * order + 1) * math.pi / 4
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    size = math.sqrt(2 / math.pi) / jnp.sqrt(x)
    return (even * cos - odd * sin) * size, (even * sin + odd * cos) * size


def _j0(x: jax.Array) -> jax.Array:
    x = jnp.abs(x)
    y = x * x
    near = (
        (y - 5.78318596294678452118)
        * (y - 30.4712623436620863991)
        * _ratio(y, cephes.J0_RP, cephes.J0_RQ)
    )
    near = jnp.where(x < 1e-5, 1 - y / 4, near)
    return jnp.where(x <= 5, near, _asymptotic(x, 0)[0])


def _j1(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    y = x * x
    near = (
        x
        * (y - 14.6819706421238932572)
        * (y - 49.2184563216946036703)
        * _ratio(y, cephes.J1_RP, cephes.J1_RQ)
    )
    return jnp.where(size <= 5, near, jnp.sign(x) * _asymptotic(size, 1)[0])


def _second_kind(x: jax.Array, near: jax.Array, order: int) -> jax.Array:
    value = jnp.where(x <= 5, near, _asymptotic(x, order)[1])
    return jnp.where(x == 0, -jnp.inf, jnp.where(x < 0, jnp.nan, value))


def _y0(x: jax.Array) -> jax.Array:
    return _second_kind(
        x, _ratio(x * x, cephes.Y0_YP, cephes.Y0_YQ) + 2 / math.pi * jnp.log(x) * _j0(x), 0
    )


def _y1(x: jax.Array) -> jax.Array:
    return _second_kind(
        x,
        x * _ratio(x * x, cephes.Y1_YP, cephes.Y1_YQ) + 2 / math.pi * (_j1(x) * jnp.log(x) - 1 / x),
        1,
    )


def _spherical_j0(x: jax.Array) -> jax.Array:
    y = x * x
    series = _polynomial(
        y, tuple((-1.0) ** n / math.factorial(2 * n + 1) for n in range(6, -1, -1))
    )
    return jnp.where(jnp.isinf(x), 0, jnp.where(jnp.abs(x) < 0.5, series, jnp.sin(x) / x))


# ---- modified ------------------------------------------------------------------------------------


def _i0(x: jax.Array) -> jax.Array:
    return lax.bessel_i0e(x) * jnp.exp(jnp.abs(x))


def _i1(x: jax.Array) -> jax.Array:
    return lax.bessel_i1e(x) * jnp.exp(jnp.abs(x))


def _modified_second_kind(x: jax.Array, order: int, *, scaled: bool) -> jax.Array:
    """K, times exp(x) if `scaled`.

    Up to 2 by the logarithmic series (Abramowitz & Stegun 9.6.13), above by the asymptotic form.
    """
    y = x * x - 2
    log = jnp.log(x / 2)
    if order == 0:
        near = _chebyshev(y, cephes.K0_A) - log * _i0(x)
    else:
        near = _chebyshev(y, cephes.K1_A) / x + log * _i1(x)
    far = _chebyshev(8 / x - 2, cephes.K0_B if order == 0 else cephes.K1_B) / jnp.sqrt(x)
    value = (
        jnp.where(x <= 2, near * jnp.exp(x), far)
        if scaled
        else jnp.where(x <= 2, near, far * jnp.exp(-x))
    )
    return jnp.where(x == 0, jnp.inf, jnp.where(x < 0, jnp.nan, value))


# ---- Airy ----------------------------------------------------------------------------------------

# The number of terms of the series, for |x| up to 2.09: the next is below a float64's last bit.
_NUM_TERMS = 14
# Ai(0) and -Ai'(0): DLMF 9.2.3 and 9.2.4.
_AI_0, _AI_1 = 0.355028053887817239260, 0.258819403792806798405


def _maclaurin(first: int) -> _Table:
    """The coefficients in x^3 of one of the two series of DLMF 9.4.1, the highest order first.

    Each is the previous one over (3n + first - 1)(3n + first).
    """
    terms = [1.0]
    for n in range(1, _NUM_TERMS):
        terms.append(terms[-1] / ((3 * n + first - 1) * (3 * n + first)))
    return tuple(reversed(terms))


def _airy_ai(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    root = jnp.sqrt(size)
    zeta = 2 * size * root / 3
    z = 1 / zeta
    scale = 1 / (math.sqrt(math.pi) * jnp.sqrt(root))
    decay = scale / 2 * _ratio(z, cephes.AIRY_AN, cephes.AIRY_AD) / jnp.exp(zeta)
    phase, y = zeta + math.pi / 4, z * z
    cosine = z * _ratio(y, cephes.AIRY_AGN, cephes.AIRY_AGD)
    wave = scale * (
        jnp.sin(phase) * (1 + y * _ratio(y, cephes.AIRY_AFN, cephes.AIRY_AFD))
        - jnp.cos(phase) * cosine
    )
    cube = x * x * x
    series = _AI_0 * _polynomial(cube, _maclaurin(0)) - _AI_1 * x * _polynomial(cube, _maclaurin(1))
    value = jnp.where(x < -2.09, wave, jnp.where(x >= 2.09, decay, series))
    return jnp.where(jnp.isinf(x), jnp.nan, jnp.where(x > 103.892, 0, value))


_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "airy_ai": _airy_ai,
    "bessel_j0": _j0,
    "bessel_j1": _j1,
    "bessel_y0": _y0,
    "bessel_y1": _y1,
    "modified_bessel_i0": _i0,
    "modified_bessel_i1": _i1,
    "modified_bessel_k0": lambda x: _modified_second_kind(x, 0, scaled=False),
    "modified_bessel_k1": lambda x: _modified_second_kind(x, 1, scaled=False),
    "scaled_modified_bessel_k0": lambda x: _modified_second_kind(x, 0, scaled=True),
    "scaled_modified_bessel_k1": lambda x: _modified_second_kind(x, 1, scaled=True),
    "spherical_bessel_j0": _spherical_j0,
}


def _register(name: str, function: Callable[[jax.Array], jax.Array]) -> None:
    @lowering(f"aten.special_{name}.default")
    def lower(ctx: Context, x: Any) -> jax.Array:
        return function(as_array(x, opmath(ctx.dtype))).astype(ctx.dtype)


for _name, _function in _FUNCTIONS.items():
    _register(_name, _function)
