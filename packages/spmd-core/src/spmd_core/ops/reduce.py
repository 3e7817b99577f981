"""Reductions over dims, vector norms, and cumulative operations along a dim."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels import index_rules
from spmd_core.ops.kernels.precision import is_inexact, opmath, reduced_dims
from spmd_core.ops.kernels.traits import CHOICE, Compared, Parts, Traits
from spmd_core.ops.registry import Context, as_array, lowering

_BOOL = np.dtype(np.bool_)
_INT64 = np.dtype(np.int64)


# ---- sums and products ---------------------------------------------------------------------------


def _accumulator(ctx: Context, x: jax.Array) -> jax.Array:
    """`x` in the dtype in which torch accumulates a result of ctx's dtype."""
    return as_array(x, opmath(ctx.dtype))


def _count(x: jax.Array, dims: tuple[int, ...]) -> int:
    return math.prod(x.shape[d] for d in dims)


@lowering("aten.sum.default")
def _sum(ctx: Context, x: Any, *, dtype: Any = None) -> jax.Array:
    return _sum_dims(ctx, x, None)


@lowering("aten.sum.dim_IntList", traits=Traits(parts=Parts.SUM))
def _sum_dims(
    ctx: Context, x: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    return jnp.sum(_accumulator(ctx, x), axis=reduced_dims(dim, x.ndim), keepdims=keepdim).astype(
        ctx.dtype
    )


@lowering("aten.nansum.default")
def _nansum(
    ctx: Context, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    kept = jnp.where(jnp.isnan(x), jnp.zeros_like(x), x) if is_inexact(x.dtype) else x
    return _sum_dims(ctx, kept, dim, keepdim)


@lowering("aten.mean.default")
def _mean(ctx: Context, x: Any, *, dtype: Any = None) -> jax.Array:
    return _mean_dims(ctx, x, None)


@lowering("aten.mean.dim")
def _mean_dims(
    ctx: Context, x: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    dims = reduced_dims(dim, x.ndim)
    total = jnp.sum(_accumulator(ctx, x), axis=dims, keepdims=keepdim)
    return (total / as_array(_count(x, dims), total.dtype)).astype(ctx.dtype)


@lowering("aten.prod.default")
def _prod(ctx: Context, x: Any, *, dtype: Any = None) -> jax.Array:
    return jnp.prod(_accumulator(ctx, x)).astype(ctx.dtype)


@lowering("aten.prod.dim_int")
def _prod_dim(
    ctx: Context, x: Any, dim: int, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    return jnp.prod(_accumulator(ctx, x), axis=reduced_dims(dim, x.ndim), keepdims=keepdim).astype(
        ctx.dtype
    )


@lowering("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def _count_nonzero(ctx: Context, x: Any, dim: Any = None) -> jax.Array:
    return jnp.sum(x != jnp.zeros_like(x), axis=reduced_dims(dim, x.ndim), dtype=_INT64)


# ---- logic ---------------------------------------------------------------------------------------


def _register_logic(op: str, function: Callable[..., jax.Array]) -> None:
    @lowering(f"aten.{op}.default", f"aten.{op}.dim")
    def over_dim(ctx: Context, x: Any, dim: Any = None, keepdim: bool = False) -> jax.Array:
        # as_array: for a uint8 tensor the result is uint8.
        return as_array(
            function(as_array(x, _BOOL), axis=reduced_dims(dim, x.ndim), keepdims=keepdim),
            ctx.dtype,
        )

    @lowering(f"aten.{op}.dims")
    def over_dims(ctx: Context, x: Any, dim: Any = None, keepdim: bool = False) -> jax.Array:
        if dim is not None and not dim:  # here an empty list means no dim, unlike in a sum
            return as_array(as_array(x, _BOOL), ctx.dtype)
        return over_dim(ctx, x, dim, keepdim)


_register_logic("any", jnp.any)
_register_logic("all", jnp.all)


@lowering("aten._is_all_true.default")
def _is_all_true(ctx: Context, x: Any) -> jax.Array:
    return jnp.all(x)


@lowering("aten._is_any_true.default")
def _is_any_true(ctx: Context, x: Any) -> jax.Array:
    return jnp.any(x)


# ---- extrema: NaN is the extremum where there is one; of equal values the first counts -----------


_WITH_POSITIONS = Traits(compared=Compared.ELEMENTS, bounds=index_rules.positions(1))


def _extremum(x: jax.Array, dims: tuple[int, ...], keepdim: bool, largest: bool) -> jax.Array:
    return (jnp.max if largest else jnp.min)(x, axis=dims, keepdims=keepdim)


def _position(x: jax.Array, dim: int | None, keepdim: bool, largest: bool) -> jax.Array:
    """The index of the extremum along `dim`, or in the flattened array for None."""
    if x.ndim == 0:
        return jnp.zeros((), _INT64)
    if x.dtype == _BOOL:
        x = x.astype(np.uint8)
    flat = x.reshape(-1) if dim is None else x
    found = (lax.argmax if largest else lax.argmin)(
        flat, 0 if dim is None else dim % x.ndim, _INT64
    )
    if not keepdim:
        return found
    return found.reshape((1,) * x.ndim) if dim is None else jnp.expand_dims(found, dim % x.ndim)


def _register_extremum(name: str, largest: bool) -> None:
    @lowering(f"aten.a{name}.default", traits=CHOICE)
    def over_dims(ctx: Context, x: Any, dim: Any = None, keepdim: bool = False) -> jax.Array:
        return _extremum(x, reduced_dims(dim, x.ndim), keepdim, largest)

    @lowering(f"aten.{name}.default", traits=CHOICE)
    def over_all(ctx: Context, x: Any) -> jax.Array:
        return _extremum(x, reduced_dims(None, x.ndim), False, largest)

    @lowering(f"aten.{name}.dim", traits=_WITH_POSITIONS)
    def with_position(
        ctx: Context, x: Any, dim: int, keepdim: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        return _extremum(x, reduced_dims(dim, x.ndim), keepdim, largest), _position(
            x, dim, keepdim, largest
        )

    @lowering(
        f"aten.arg{name}.default",
        traits=Traits(compared=Compared.ELEMENTS, bounds=index_rules.positions(0)),
    )
    def position(ctx: Context, x: Any, dim: int | None = None, keepdim: bool = False) -> jax.Array:
        return _position(x, dim, keepdim, largest)


_register_extremum("max", largest=True)
_register_extremum("min", largest=False)


@lowering("aten.aminmax.default", traits=CHOICE)
def _aminmax(
    ctx: Context, x: Any, *, dim: int | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    dims = reduced_dims(dim, x.ndim)
    return _extremum(x, dims, keepdim, False), _extremum(x, dims, keepdim, True)


@lowering("aten.trace.default")
def _trace(ctx: Context, x: Any) -> jax.Array:
    # A comparison of positions and not a gather of the diagonal: each device sums its own shard.
    diagonal = lax.broadcasted_iota(np.int32, x.shape, 0) == lax.broadcasted_iota(
        np.int32, x.shape, 1
    )
    x = _accumulator(ctx, x)
    return jnp.sum(jnp.where(diagonal, x, jnp.zeros_like(x))).astype(ctx.dtype)


def _float64_bits(x: jax.Array) -> jax.Array:
    """The bits of the floats as float64, as uint64.

    Narrower floats are converted by integer operations, because TPUs cannot give a float64's bits.
    """
    if x.dtype == np.float64:
        return lax.bitcast_convert_type(x, np.uint64)
    bits = lax.bitcast_convert_type(x.astype(np.float32), np.uint32).astype(np.uint64)
    sign, exponent, fraction = bits >> 31, (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # A subnormal is normalized: its leading bit becomes the implicit one.
    shift = jnp.where((exponent == 0) & (fraction != 0), lax.clz(fraction) - 40, 0)
    fraction = (fraction << shift) & 0x7FFFFF
    wide = jnp.where(
        exponent == 0xFF, 0x7FF, exponent + jnp.uint64(897) - jnp.maximum(shift, exponent > 0)
    )
    wide = jnp.where((bits << 33) == 0, 0, wide)
    return (sign << 63) | (wide << 52) | (fraction << 29)


@lowering("aten.hash_tensor.default")
def _hash_tensor(
    ctx: Context, x: Any, dim: Any = (), *, keepdim: bool = False, mode: int = 0
) -> jax.Array:
    """The exclusive or of the values: floats as float64, integers sign-extended to 64 bits."""
    if mode != 0:
        raise RuntimeError(
            f"Unknown hash_tensor mode: {mode}; the only one is 0, the exclusive or."
        )
    bits = (
        _float64_bits(x)
        if is_inexact(x.dtype)
        else x.astype(np.int64 if jnp.issubdtype(x.dtype, np.signedinteger) else np.uint64).astype(
            np.uint64
        )
    )
    dims = reduced_dims(dim, x.ndim)
    if ctx.num_devices == 1:
        return lax.reduce(bits, np.uint64(0), lax.bitwise_xor, dims).reshape(ctx.shape)
    # XLA has no exclusive or across devices, but a sum: the result is the parity of each bit's sum.
    places = jnp.arange(64, dtype=np.uint64)
    counts = jnp.sum(
        ((bits[..., None] >> places) & 1).astype(np.uint32), axis=dims, dtype=np.uint32
    )
    return jnp.sum((counts & 1).astype(np.uint64) << places, axis=-1, dtype=np.uint64).reshape(
        ctx.shape
    )


# ---- moments -------------------------------------------------------------------------------------


def _moments(x: jax.Array, dim: Any, correction: Any, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    """Variance (in two passes, real) and mean, both in torch's compute dtype."""
    dims = reduced_dims(dim, x.ndim)
    count = _count(x, dims)
    x = as_array(x, opmath(x.dtype))
    mean = jnp.sum(x, axis=dims, keepdims=True) / as_array(count, x.dtype)
    squares = jnp.square(jnp.abs(x - mean))
    # For at most `correction` values the divisor is 0, which gives nan or inf as in torch.
    divisor = max(count - (1 if correction is None else correction), 0)
    variance = jnp.sum(squares, axis=dims, keepdims=keepdim) / as_array(divisor, squares.dtype)
    return variance, mean if keepdim else lax.squeeze(mean, dims)


@lowering("aten.var.correction", static=("correction",))
def _var(
    ctx: Context, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> jax.Array:
    return _moments(x, dim, correction, keepdim)[0].astype(ctx.dtype)


@lowering("aten.std.correction", static=("correction",))
def _std(
    ctx: Context, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> jax.Array:
    return jnp.sqrt(_moments(x, dim, correction, keepdim)[0]).astype(ctx.dtype)


@lowering("aten.var_mean.correction", static=("correction",))
def _var_mean(
    ctx: Context, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    variance, mean = _moments(x, dim, correction, keepdim)
    return variance.astype(ctx.dtype), mean.astype(x.dtype)


@lowering("aten.std_mean.correction", static=("correction",))
def _std_mean(
    ctx: Context, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    variance, mean = _moments(x, dim, correction, keepdim)
    return jnp.sqrt(variance).astype(ctx.dtype), mean.astype(x.dtype)


@lowering("aten.logsumexp.default", traits=Traits(passes_nan_on=True))
def _logsumexp(ctx: Context, x: Any, dim: Any, keepdim: bool = False) -> jax.Array:
    dims = reduced_dims(dim, x.ndim)
    x = _accumulator(ctx, x)
    largest = jnp.max(x.real, axis=dims, keepdims=True, initial=-jnp.inf)
    shift = jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest))
    total = jnp.log(jnp.sum(jnp.exp(x - shift), axis=dims, keepdims=True)) + shift
    return (total if keepdim else lax.squeeze(total, dims)).astype(ctx.dtype)


# ---- vector norms --------------------------------------------------------------------------------

_NORM = Traits(compared=Compared.ORDER)


def _vector_norm(
    ctx: Context, x: jax.Array, order: float | None, dim: Any, keepdim: bool
) -> jax.Array:
    dims = reduced_dims(dim, x.ndim)
    dtype = opmath(ctx.dtype)
    size = as_array(jnp.abs(x), dtype)  # before the powers, which a narrower dtype would round
    if order is None or order == 2:
        norm = jnp.sqrt(jnp.sum(jnp.square(size), axis=dims, keepdims=keepdim))
    elif order == 0:
        norm = jnp.sum(size != 0, axis=dims, keepdims=keepdim, dtype=dtype)
    elif order == 1:
        norm = jnp.sum(size, axis=dims, keepdims=keepdim)
    elif order == math.inf:
        # No element is below 0; the norm of no elements is 0.
        norm = jnp.max(size, axis=dims, keepdims=keepdim, initial=0)
    elif order == -math.inf:
        norm = jnp.min(size, axis=dims, keepdims=keepdim, initial=jnp.inf)
    else:
        norm = jnp.power(jnp.sum(jnp.power(size, order), axis=dims, keepdims=keepdim), 1 / order)
    return norm.astype(ctx.dtype)


@lowering("aten.linalg_vector_norm.default", static=("ord",), traits=_NORM)
def _linalg_vector_norm(
    ctx: Context, x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    return _vector_norm(ctx, x, ord, dim, keepdim)


@lowering("aten.norm.Scalar", "aten.norm.ScalarOpt_dtype", static=("p",), traits=_NORM)
def _norm(ctx: Context, x: Any, p: Any = 2, *, dtype: Any = None) -> jax.Array:
    return _vector_norm(ctx, x, p, None, False)


@lowering("aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype", static=("p",), traits=_NORM)
def _norm_dims(
    ctx: Context, x: Any, p: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    return _vector_norm(ctx, x, p, dim, keepdim)


@lowering("aten.dist.default", static=("p",))
def _dist(ctx: Context, x: Any, y: Any, p: Any = 2) -> jax.Array:
    dtype = opmath(jnp.promote_types(x.dtype, y.dtype))  # the distance of complex numbers is real
    return _vector_norm(ctx, x.astype(dtype) - y.astype(dtype), p, None, False)


# ---- cumulative ----------------------------------------------------------------------------------


def _along(function: Callable[..., jax.Array], x: jax.Array, dim: int) -> jax.Array:
    """`function(x, axis=dim)`; a 0-dim tensor is its own result."""
    return function(x, axis=dim % x.ndim) if x.ndim else x


@lowering("aten.cumsum.default")
def _cumsum(ctx: Context, x: Any, dim: int, *, dtype: Any = None) -> jax.Array:
    return _along(lax.cumsum, _accumulator(ctx, x), dim).astype(ctx.dtype)


@lowering("aten.cumprod.default")
def _cumprod(ctx: Context, x: Any, dim: int, *, dtype: Any = None) -> jax.Array:
    return _along(lax.cumprod, _accumulator(ctx, x), dim).astype(ctx.dtype)


def _running_extremum(x: jax.Array, dim: int, largest: bool) -> tuple[jax.Array, jax.Array]:
    """The extremum so far and its index; of equal values (and of NaNs) the latest, as in torch."""
    if x.ndim == 0:
        return x, jnp.zeros((), _INT64)
    dim %= x.ndim
    ordered = x.astype(np.uint8) if x.dtype == _BOOL else x
    running = (lax.cummax if largest else lax.cummin)(ordered, axis=dim)
    updated = ordered == running
    if is_inexact(x.dtype):
        updated |= jnp.isnan(x)
        # NaN is propagated explicitly: not every backend's running maximum guarantees it.
        running = jnp.where(
            lax.cummax(jnp.isnan(x).astype(np.uint8), axis=dim) > 0, jnp.nan, running
        ).astype(x.dtype)
        updated = jnp.where(jnp.isnan(running), jnp.isnan(x), updated)
    positions = lax.broadcasted_iota(_INT64, x.shape, dim)
    return running.astype(x.dtype), lax.cummax(jnp.where(updated, positions, 0), axis=dim)


@lowering("aten.cummax.default", traits=_WITH_POSITIONS)
def _cummax(ctx: Context, x: Any, dim: int) -> tuple[jax.Array, jax.Array]:
    return _running_extremum(x, dim, largest=True)


@lowering("aten.cummin.default", traits=_WITH_POSITIONS)
def _cummin(ctx: Context, x: Any, dim: int) -> tuple[jax.Array, jax.Array]:
    return _running_extremum(x, dim, largest=False)
