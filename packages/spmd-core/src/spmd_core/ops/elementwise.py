"""Elementwise arithmetic: functions of one number, of two, and of complex numbers."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels.precision import is_inexact, is_sixteen_bit, opmath
from spmd_core.ops.kernels.traits import CHOICE, COMPUTED
from spmd_core.ops.registry import Context, Number, as_array, lowering


def _rounded(ctx: Context, function: Callable[..., jax.Array], *operands: Any) -> jax.Array:
    """`function` of the operands in torch's compute dtype, rounded once to the result dtype."""
    dtype = opmath(ctx.dtype)
    return function(*(as_array(x, dtype) for x in operands)).astype(ctx.dtype)


# ---- one operand ---------------------------------------------------------------------------------


def _exp2(x: jax.Array) -> jax.Array:
    """2^x, exact for integer x. XLA computes exp(x log 2), whose float32 error is 4e-6 at 100."""
    if jnp.iscomplexobj(x):
        return jnp.exp2(x)
    integer = jnp.round(jnp.clip(x, -2000, 2000))
    return jnp.where(
        jnp.abs(x) < 2000,
        jnp.ldexp(jnp.exp((x - integer) * math.log(2)), integer.astype(np.int32)),
        jnp.exp2(x),
    )


def _unless_integer(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: function(x) if is_inexact(x.dtype) else x


def _entropy(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, jnp.zeros_like(x), jnp.where(x < 0, -jnp.inf, -x * jnp.log(x)))


def _sgn(x: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(x):
        return _sign(x)
    size = jnp.abs(x)
    return jnp.where(
        size == 0, jnp.zeros_like(x), x / jnp.where(size == 0, jnp.ones_like(size), size)
    )


def _sign(x: jax.Array) -> jax.Array:
    if x.dtype == np.bool_:
        return x
    # Not jnp.sign, which gives nan for nan; torch gives 0.
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _sinc(x: jax.Array) -> jax.Array:
    # Not jnp.sinc, which gives 0 for infinity since jax 0.12; torch gives nan.
    angle = np.pi * x
    return jnp.where(x == 0, 1, jnp.sin(angle) / angle)


_UNARY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "ceil": _unless_integer(jnp.ceil),
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "deg2rad": lambda x: x * (math.pi / 180),
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "exp": jnp.exp,
    "exp2": _exp2,
    "expm1": jnp.expm1,
    "floor": _unless_integer(jnp.floor),
    "frac": lambda x: x - jnp.trunc(x),
    "i0": lambda x: lax.bessel_i0e(x) * jnp.exp(jnp.abs(x)),
    "lgamma": lax.lgamma,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "neg": jnp.negative,
    "rad2deg": lambda x: x * (180 / math.pi),
    "reciprocal": lambda x: 1 / x,
    "round": _unless_integer(jnp.round),
    "rsqrt": lax.rsqrt,
    "sgn": _sgn,
    "sigmoid": lambda x: jax.nn.sigmoid(x) if not jnp.iscomplexobj(x) else 1 / (1 + jnp.exp(-x)),
    "sign": _sign,
    "sin": jnp.sin,
    "sinc": _sinc,
    "sinh": jnp.sinh,
    "special_entr": _entropy,
    "special_i0e": lax.bessel_i0e,
    "special_i1": lambda x: lax.bessel_i1e(x) * jnp.exp(jnp.abs(x)),
    "special_i1e": lax.bessel_i1e,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "trunc": _unless_integer(jnp.trunc),
}


def _register_unary(op: str, function: Callable[[jax.Array], jax.Array]) -> None:
    @lowering(f"aten.{op}.default")
    def lower(ctx: Context, x: Any) -> jax.Array:
        return _rounded(ctx, function, x)


for _op, _unary in _UNARY.items():
    _register_unary(_op, _unary)


@lowering("aten.abs.default")
def _abs(ctx: Context, x: Any) -> jax.Array:
    return x if x.dtype == np.bool_ else jnp.abs(x)


_PREDICATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
    "isposinf": lambda x: x == jnp.inf,
    "isneginf": lambda x: x == -jnp.inf,
}


def _register_predicate(op: str, function: Callable[[jax.Array], jax.Array]) -> None:
    @lowering(f"aten.{op}.default")
    def lower(ctx: Context, x: Any) -> jax.Array:
        return function(x) if is_inexact(x.dtype) else jnp.zeros(x.shape, np.bool_)


for _op, _predicate in _PREDICATES.items():
    _register_predicate(_op, _predicate)


@lowering("aten.signbit.default")
def _signbit(ctx: Context, x: Any) -> jax.Array:
    return jnp.signbit(x) if is_inexact(x.dtype) else (x < jnp.zeros_like(x))


def _rounds_integers(args: Any, kwargs: Any, platform: str) -> bool:
    return kwargs["decimals"] < 0 and not (
        args[0].dtype.is_floating_point or args[0].dtype.is_complex
    )


@lowering("aten.round.decimals", host_when=_rounds_integers)
def _round_decimals(ctx: Context, x: Any, *, decimals: int) -> jax.Array:
    if not is_inexact(x.dtype):
        return x
    ten = as_array(10.0 ** abs(decimals), opmath(ctx.dtype))
    return _rounded(
        ctx, lambda x: jnp.round(x * ten) / ten if decimals >= 0 else jnp.round(x / ten) * ten, x
    )


@lowering("aten.nan_to_num.default")
def _nan_to_num(
    ctx: Context,
    x: Any,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> jax.Array:
    if not is_inexact(x.dtype):
        return x
    if jnp.iscomplexobj(x):
        parts = (_nan_to_num(ctx, part, nan, posinf, neginf) for part in (lax.real(x), lax.imag(x)))
        return lax.complex(*parts)
    limits = jnp.finfo(x.dtype)
    high = limits.max if posinf is None else as_array(posinf, x.dtype)
    low = limits.min if neginf is None else as_array(neginf, x.dtype)
    finite = jnp.where(x == jnp.inf, high, jnp.where(x == -jnp.inf, low, x))
    return jnp.where(jnp.isnan(x), as_array(nan or 0.0, x.dtype), finite)


# ---- two operands, computed and returned in the promoted dtype -----------------------------------


def _fmod(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.rem(*jnp.broadcast_arrays(a, b))


def _divide_floor(a: jax.Array, b: jax.Array) -> jax.Array:
    """Python's floor division.

    For floats floor(a / b) would be wrong by one where a / b rounds up to an integer.
    """
    if not is_inexact(a.dtype):
        return jnp.floor_divide(a, b)
    a, b = jnp.broadcast_arrays(a, b)
    remainder = lax.rem(a, b)
    quotient = (a - remainder) / b
    quotient = jnp.where((remainder != 0) & ((b < 0) != (remainder < 0)), quotient - 1, quotient)
    floor = jnp.floor(quotient)
    floor = jnp.where(quotient - floor > 0.5, floor + 1, floor)
    floor = jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(a), a / b), floor)
    return jnp.where(b == 0, a / b, floor)


def _divide_trunc(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = jnp.broadcast_arrays(a, b)
    if not is_inexact(a.dtype):
        return lax.div(a, b)
    # Without the barrier, XLA replaces a division by a broadcast scalar with a product with its
    # reciprocal, whose last bit may change the truncation.
    return jnp.trunc(a / lax.optimization_barrier(b))


def _xlog(log: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda x, y: jnp.where((x == 0) & ~jnp.isnan(y), jnp.zeros_like(x), x * log(y))


def _heaviside(x: jax.Array, at_zero: jax.Array) -> jax.Array:
    return jnp.where(x == 0, at_zero, (x > 0).astype(at_zero.dtype))


def _ignoring_nan(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def skip(a: jax.Array, b: jax.Array) -> jax.Array:
        return (
            jnp.where(jnp.isnan(a), b, jnp.where(jnp.isnan(b), a, function(a, b)))
            if is_inexact(a.dtype)
            else function(a, b)
        )

    return skip


def _shift_right(a: jax.Array, b: jax.Array) -> jax.Array:
    shift = (
        lax.shift_right_logical
        if jnp.issubdtype(a.dtype, np.unsignedinteger)
        else lax.shift_right_arithmetic
    )
    return shift(*jnp.broadcast_arrays(a, b))


def _shift_left(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.shift_left(*jnp.broadcast_arrays(a, b))


def _integer_power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """Powers modulo 2**bits, by squaring.

    For a negative exponent only the bases 1 and -1 have an integer power; the others give 0.
    """
    base, exponent = jnp.broadcast_arrays(base, exponent)
    one = jnp.ones_like(base)

    def square(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        result, factor, rest = state
        return jnp.where(rest & 1 == 1, result * factor, result), factor * factor, rest >> 1

    positive = lax.while_loop(
        lambda state: jnp.any(state[2] > 0),
        square,
        (one, base, jnp.maximum(exponent, jnp.zeros_like(exponent))),
    )[0]
    if jnp.issubdtype(exponent.dtype, np.unsignedinteger):
        return positive
    inverse = jnp.where(
        base == 1,
        one,
        jnp.where(base == -1, jnp.where(exponent & 1 == 1, -one, one), jnp.zeros_like(one)),
    )
    return jnp.where(exponent < 0, inverse, positive)


def _power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    return jnp.power(base, exponent) if is_inexact(base.dtype) else _integer_power(base, exponent)


_BINARY: dict[str, tuple[Callable[[jax.Array, jax.Array], jax.Array], tuple[str, ...]]] = {
    "__lshift__": (_shift_left, ("Scalar", "Tensor")),
    "__rshift__": (_shift_right, ("Scalar", "Tensor")),
    "atan2": (jnp.arctan2, ("default",)),
    "bitwise_and": (jnp.bitwise_and, ("Scalar", "Scalar_Tensor", "Tensor")),
    "bitwise_left_shift": (_shift_left, ("Scalar_Tensor", "Tensor", "Tensor_Scalar")),
    "bitwise_or": (jnp.bitwise_or, ("Scalar", "Scalar_Tensor", "Tensor")),
    "bitwise_right_shift": (_shift_right, ("Scalar_Tensor", "Tensor", "Tensor_Scalar")),
    "bitwise_xor": (jnp.bitwise_xor, ("Scalar", "Scalar_Tensor", "Tensor")),
    "copysign": (jnp.copysign, ("Scalar", "Tensor")),
    "div": (lambda a, b: a / b, ("Scalar", "Tensor")),
    "floor_divide": (_divide_floor, ("Scalar", "default")),
    "fmax": (_ignoring_nan(jnp.maximum), ("default",)),
    "fmin": (_ignoring_nan(jnp.minimum), ("default",)),
    "fmod": (_fmod, ("Scalar", "Tensor")),
    "gcd": (jnp.gcd, ("default",)),
    "heaviside": (_heaviside, ("default",)),
    "hypot": (jnp.hypot, ("default",)),
    "lcm": (jnp.lcm, ("default",)),
    "ldexp": (lambda a, b: a * _exp2(b), ("Tensor",)),
    "maximum": (jnp.maximum, ("default",)),
    "minimum": (jnp.minimum, ("default",)),
    "mul": (jnp.multiply, ("Scalar", "Tensor")),
    "pow": (_power, ("Scalar", "Tensor_Tensor")),
    "remainder": (jnp.remainder, ("Scalar", "Scalar_Tensor", "Tensor")),
    "special_xlog1py": (_xlog(jnp.log1p), ("default", "other_scalar", "self_scalar")),
    "xlogy": (_xlog(jnp.log), ("Scalar_Other", "Scalar_Self", "Tensor")),
}
# These operations need no float32 for 16-bit operands: the result is one of the operands, or is
# rounded once in either dtype.
_ROUNDED_ONCE = ("maximum", "minimum", "mul")
_EXTREMES = ("fmax", "fmin", "maximum", "minimum")


def _register_binary(
    op: str, function: Callable[..., jax.Array], overloads: tuple[str, ...]
) -> None:
    @lowering(
        *(f"aten.{op}.{overload}" for overload in overloads),
        traits=CHOICE if op in _EXTREMES else COMPUTED,
    )
    def lower(ctx: Context, a: Any, b: Any) -> jax.Array:
        if op in _ROUNDED_ONCE and all(
            isinstance(x, jax.Array) and x.dtype == ctx.dtype for x in (a, b)
        ):
            return function(a, b)
        return _rounded(ctx, function, a, b)


for _op, (_function, _overloads) in _BINARY.items():
    _register_binary(_op, _function, _overloads)


@lowering("aten.nextafter.default")
def _nextafter(ctx: Context, a: Any, b: Any) -> jax.Array:
    # Not in float32, whose neighbors are closer.
    return jnp.nextafter(a.astype(ctx.dtype), b.astype(ctx.dtype))


def _round_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    limits = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=limits.nexp, mantissa_bits=limits.nmant)


@lowering("aten.div.Scalar_mode", "aten.div.Tensor_mode")
def _div_mode(ctx: Context, a: Any, b: Any, *, rounding_mode: str | None) -> jax.Array:
    def trunc(x: jax.Array, y: jax.Array) -> jax.Array:
        # torch truncates the 16-bit quotient: 1 / 0.1 is 10 in bfloat16, but a little less in
        # float32. XLA may drop a conversion to 16 bits and back, hence reduce_precision.
        return (
            _divide_trunc(x, y)
            if not is_sixteen_bit(ctx.dtype)
            else jnp.trunc(_round_bits(x / y, ctx.dtype))
        )

    function = {None: lambda x, y: x / y, "floor": _divide_floor, "trunc": trunc}[rounding_mode]
    return _rounded(ctx, function, a, b)


def _add_scaled(ctx: Context, a: Any, b: Any, alpha: Any, sign: int) -> jax.Array:
    """a + sign * alpha * b. The sum of booleans is `or`; their alpha must be a boolean too."""
    plain = not isinstance(alpha, Number) and alpha == 1
    if ctx.dtype == np.bool_:
        a, b = as_array(a, ctx.dtype), as_array(b, ctx.dtype)
        return a | (b if plain else b & as_array(alpha, ctx.dtype))
    combine = jnp.add if sign > 0 else jnp.subtract
    if plain:
        same = all(isinstance(x, jax.Array) and x.dtype == ctx.dtype for x in (a, b))
        return combine(a, b) if same else _rounded(ctx, combine, a, b)
    return _rounded(ctx, lambda x, y, scale: combine(x, y * scale), a, b, alpha)


@lowering("aten.add.Tensor", "aten.add.Scalar")
def _add(ctx: Context, a: Any, b: Any, alpha: Any = 1) -> jax.Array:
    return _add_scaled(ctx, a, b, alpha, +1)


@lowering("aten.sub.Tensor", "aten.sub.Scalar")
def _sub(ctx: Context, a: Any, b: Any, alpha: Any = 1) -> jax.Array:
    return _add_scaled(ctx, a, b, alpha, -1)


@lowering("aten.rsub.Tensor", "aten.rsub.Scalar")
def _rsub(ctx: Context, a: Any, b: Any, alpha: Any = 1) -> jax.Array:
    return _add_scaled(ctx, b, a, alpha, -1)


@lowering("aten.pow.Tensor_Scalar", static=("exponent",))
def _pow_scalar(ctx: Context, base: Any, exponent: Any) -> jax.Array:
    if ctx.dtype == np.bool_:
        return as_array(base, ctx.dtype) | (not exponent)
    if not is_inexact(ctx.dtype):
        return lax.integer_pow(as_array(base, ctx.dtype), int(exponent))
    if not isinstance(exponent, complex):
        if exponent == 0.5:
            return _rounded(ctx, jnp.sqrt, base)
        if exponent == -0.5:
            return _rounded(ctx, lax.rsqrt, base)
        if exponent == int(exponent if math.isfinite(exponent) else 0) and abs(exponent) <= 4:
            return _rounded(ctx, lambda x: lax.integer_pow(x, int(exponent)), base)
    return _rounded(ctx, jnp.power, base, exponent)


# ---- interpolation -------------------------------------------------------------------------------


@lowering("aten.lerp.Scalar", "aten.lerp.Tensor")
def _lerp(ctx: Context, start: Any, end: Any, weight: Any) -> jax.Array:
    def interpolate(a: jax.Array, b: jax.Array, w: jax.Array) -> jax.Array:
        # From the nearer end, so that weight 1 gives exactly `end`.
        from_start = jnp.abs(w) < 0.5
        return jnp.where(from_start, a, b) + jnp.where(from_start, w, w - 1) * (b - a)

    return _rounded(ctx, interpolate, start, end, weight)


@lowering("aten.addcmul.default")
def _addcmul(ctx: Context, x: Any, a: Any, b: Any, *, value: Any = 1) -> jax.Array:
    return _rounded(ctx, lambda x, a, b, scale: x + scale * a * b, x, a, b, value)


@lowering("aten.addcdiv.default")
def _addcdiv(ctx: Context, x: Any, a: Any, b: Any, *, value: Any = 1) -> jax.Array:
    return _rounded(ctx, lambda x, a, b, scale: x + scale * a / b, x, a, b, value)


# ---- complex numbers -----------------------------------------------------------------------------


@lowering("aten.complex.default")
def _complex(ctx: Context, real: Any, imag: Any) -> jax.Array:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@lowering("aten.polar.default")
def _polar(ctx: Context, size: Any, angle: Any) -> jax.Array:
    size, angle = jnp.broadcast_arrays(size, angle)
    return lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


@lowering("aten._conj.default", "aten._conj_physical.default", "aten.conj_physical.default")
def _conj(ctx: Context, x: Any) -> jax.Array:
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


@lowering("aten.angle.default")
def _angle(ctx: Context, x: Any) -> jax.Array:
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return _rounded(
        ctx, lambda x: jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0.0).astype(x.dtype)), x
    )


@lowering("aten.frexp.Tensor")
def _frexp(ctx: Context, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mantissa, exponent = jnp.frexp(x.astype(opmath(x.dtype)))
    return mantissa.astype(ctx.dtype), jnp.where(jnp.isfinite(mantissa), exponent, 0).astype(
        np.int32
    )
