"""Copies, conversions between dtypes, and fills."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core import dtypes
from spmd_core.ops.kernels.booleans import cast
from spmd_core.ops.kernels.precision import is_inexact, opmath
from spmd_core.ops.kernels.traits import SAME, ZEROS, Elements, Traits
from spmd_core.ops.registry import Context, Number, as_array, lowering


def _convert(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """torch's conversion: floats are truncated, and wrap in integers of 8 and 16 bits.

    XLA's own conversion would saturate there.
    """
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, np.complexfloating) and dtype != np.bool_:
        x = lax.real(x)
    if is_inexact(x.dtype) and jnp.issubdtype(dtype, np.integer) and dtype.itemsize < 4:
        x = x.astype(np.int64)
    if dtype == jnp.float8_e4m3fn and dtypes.float8_saturates():
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(opmath(x.dtype)), -largest, largest)
    return cast(x, dtype)


@lowering("aten._to_copy.default", traits=SAME)
def _to_copy(
    ctx: Context,
    x: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> jax.Array:
    return _convert(x, ctx.dtype)


@lowering("aten.clone.default", traits=SAME)
def _clone(ctx: Context, x: Any, *, memory_format: Any = None) -> jax.Array:
    return x


@lowering("aten.copy.default", traits=Traits(Elements.REPEATED, source=1))
def _copy(ctx: Context, x: Any, source: Any, non_blocking: bool = False) -> jax.Array:
    return jnp.broadcast_to(_convert(as_array(source, source.dtype), ctx.dtype), ctx.shape)


@lowering("aten.fill.Scalar", "aten.fill.Tensor", traits=Traits(fill="value"))
def _fill(ctx: Context, x: Any, value: Any) -> jax.Array:
    return jnp.broadcast_to(
        _convert(value.value if isinstance(value, Number) else jnp.asarray(value), ctx.dtype),
        ctx.shape,
    )


@lowering("aten.zero.default", traits=ZEROS)
def _zero(ctx: Context, x: Any) -> jax.Array:
    return jnp.zeros(ctx.shape, ctx.dtype)
