"""Elementwise comparison and logic, and selection between bounds or by a mask."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.traits import COMPARISON, OF_ALL
from spmd_core.ops.registry import Context, Number, as_array, lowering, result_dtype

# ---- comparison and logic: computed in the promoted dtype of the operands, returned as bool ------

_COMPARISONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "eq": jnp.equal,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "lt": jnp.less,
    "ne": jnp.not_equal,
}


def _register_comparison(op: str, function: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    @lowering(f"aten.{op}.Tensor", f"aten.{op}.Scalar", traits=COMPARISON)
    def lower(ctx: Context, a: Any, b: Any) -> jax.Array:
        dtype = result_dtype(a, b)
        return function(as_array(a, dtype), as_array(b, dtype))


for _op, _function in _COMPARISONS.items():
    _register_comparison(_op, _function)

_LOGIC: dict[str, Callable[..., jax.Array]] = {
    "logical_and": jnp.logical_and,
    "logical_not": jnp.logical_not,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
}


def _register_logic(op: str, function: Callable[..., jax.Array]) -> None:
    @lowering(f"aten.{op}.default")
    def lower(ctx: Context, *operands: Any) -> jax.Array:
        return function(*(as_array(x, np.dtype(np.bool_)) for x in operands))


for _op, _function in _LOGIC.items():
    _register_logic(_op, _function)


@lowering("aten.bitwise_not.default")
def _bitwise_not(ctx: Context, x: Any) -> jax.Array:
    return jnp.invert(x)


# ---- selection: between bounds, and by a mask ----------------------------------------------------


def _bound(x: Any, dtype: np.dtype) -> jax.Array:
    """A bound of clamp; a number out of range of an integer `dtype` becomes its limit.

    torch 2.15 accepts such a number if it has no effect as a bound; older releases refuse it.
    """
    if isinstance(x, Number) and np.issubdtype(dtype, np.integer) and x.kind is int:
        limits = np.iinfo(dtype)
        return jnp.clip(x.value, limits.min, min(limits.max, np.iinfo(np.int64).max)).astype(dtype)
    return as_array(x, dtype)


@lowering("aten.clamp.default", "aten.clamp.Tensor")
def _clamp(ctx: Context, x: Any, min: Any = None, max: Any = None) -> jax.Array:
    dtype = opmath(ctx.dtype)
    x = as_array(x, dtype)
    if min is not None:
        x = jnp.maximum(x, _bound(min, dtype))
    if max is not None:  # last, as torch gives `max` where min > max
        x = jnp.minimum(x, _bound(max, dtype))
    return x.astype(ctx.dtype)


@lowering("aten.clamp_min.default", "aten.clamp_min.Tensor")
def _clamp_min(ctx: Context, x: Any, min: Any) -> jax.Array:
    return _clamp(ctx, x, min, None)


@lowering("aten.clamp_max.default", "aten.clamp_max.Tensor")
def _clamp_max(ctx: Context, x: Any, max: Any) -> jax.Array:
    return _clamp(ctx, x, None, max)


@lowering("aten.where.self", traits=OF_ALL)
def _where(ctx: Context, condition: Any, a: Any, b: Any) -> jax.Array:
    return jnp.where(
        as_array(condition, np.dtype(np.bool_)), as_array(a, ctx.dtype), as_array(b, ctx.dtype)
    )


@lowering("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(ctx: Context, x: Any, mask: Any, value: Any) -> jax.Array:
    return jnp.where(as_array(mask, np.dtype(np.bool_)), as_array(value, ctx.dtype), x)
