"""New tensors from sizes and numbers: constants, ranges, identity matrices, triangle indices.

Shape and dtype always come from `ctx`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.ops.kernels import index_rules
from spmd_core.ops.kernels.traits import ONES, ZEROS, Traits
from spmd_core.ops.registry import Context, as_array, lowering


@lowering(
    *(
        "aten.zeros.default",
        "aten.zeros_like.default",
        "aten.new_zeros.default",
        "aten._efficientzerotensor.default",
    ),
    # torch leaves this memory uninitialized: any value is right, and zeros are the same each run.
    *(
        "aten.empty.memory_format",
        "aten.empty_like.default",
        "aten.new_empty.default",
        "aten.empty_permuted.default",
    ),
    *("aten.empty_strided.default", "aten.new_empty_strided.default"),
    traits=ZEROS,
)
def _zeros(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return jnp.zeros(ctx.shape, ctx.dtype)


@lowering("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default", traits=ONES)
def _ones(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return jnp.ones(ctx.shape, ctx.dtype)


@lowering("aten.full.default", "aten.full_like.default", traits=Traits(fill="fill_value"))
def _full(ctx: Context, size_or_like: Any, fill_value: Any, **_: Any) -> jax.Array:
    return jnp.broadcast_to(as_array(fill_value, ctx.dtype), ctx.shape)


@lowering("aten.new_full.default", traits=Traits(fill="fill_value"))
def _new_full(ctx: Context, x: jax.Array, size: list[int], fill_value: Any, **_: Any) -> jax.Array:
    return jnp.broadcast_to(as_array(fill_value, ctx.dtype), ctx.shape)


@lowering("aten.scalar_tensor.default", traits=Traits(fill="s"))
def _scalar_tensor(ctx: Context, s: Any, **_: Any) -> jax.Array:
    return as_array(s, ctx.dtype)


def _range_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which torch's CPU kernels compute a range."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64)


_STEPS = Traits(bounds=index_rules.steps)


@lowering("aten.arange.default", static=("end",), traits=_STEPS)
def _arange(ctx: Context, end: Any, **_: Any) -> jax.Array:
    return _range_from(ctx, 0, 1)


@lowering("aten.arange.start", static=("start", "end"), traits=_STEPS)
def _arange_start(ctx: Context, start: Any, end: Any, **_: Any) -> jax.Array:
    return _range_from(ctx, start, 1)


@lowering("aten.arange.start_step", static=("start", "end", "step"), traits=_STEPS)
def _arange_start_step(ctx: Context, start: Any, end: Any, step: Any = 1, **_: Any) -> jax.Array:
    return _range_from(ctx, start, step)


def _range_from(ctx: Context, start: Any, step: Any) -> jax.Array:
    # The length comes from torch's shape and is not computed again: rounding decides whether `end`
    # is reached.
    if jnp.issubdtype(ctx.dtype, jnp.integer):
        # torch casts start and step first: arange(0.5, 3, 1.5, dtype=int64) steps by 1.
        start, step = int(start), int(step)
        index = jnp.arange(ctx.shape[0], dtype=np.int64)
    else:
        index = jnp.arange(ctx.shape[0], dtype=np.float64)
    return (start + index * step).astype(ctx.dtype)


def _spaced(ctx: Context, start: Any, end: Any, steps: int, wide: np.dtype) -> jax.Array:
    """`steps` evenly spaced numbers from `start` to `end`.

    The second half is counted back from `end`, so that the last number is exactly `end`.
    """
    # torch rounds both ends to the result's dtype first.
    first, last = as_array(start, ctx.dtype).astype(wide), as_array(end, ctx.dtype).astype(wide)
    if steps == 1:
        return first.reshape(1)
    index = jnp.arange(steps, dtype=wide)
    step = (last - first) / max(steps - 1, 1)
    return jnp.where(
        np.arange(steps) < steps // 2, first + step * index, last - step * (steps - 1 - index)
    )


def _is_integer(args: Any, kwargs: Any, platform: str) -> bool:
    """Whether the result is an integer, which the last bit before truncation may change by 1.

    torch's own kernels differ in that bit.
    """
    dtype = kwargs.get("dtype")
    return dtype is not None and not (dtype.is_floating_point or dtype.is_complex)


@lowering(
    "aten.linspace.default",
    "aten.linspace.Tensor_Tensor",
    "aten.linspace.Tensor_Scalar",
    "aten.linspace.Scalar_Tensor",
    host_when=_is_integer,
)
def _linspace(ctx: Context, start: Any, end: Any, steps: int, **_: Any) -> jax.Array:
    return _spaced(ctx, start, end, steps, _range_dtype(ctx.dtype)).astype(ctx.dtype)


@lowering(
    "aten.logspace.default",
    "aten.logspace.Tensor_Tensor",
    "aten.logspace.Tensor_Scalar",
    "aten.logspace.Scalar_Tensor",
    host_when=_is_integer,
)
def _logspace(
    ctx: Context, start: Any, end: Any, steps: int, base: float = 10.0, **_: Any
) -> jax.Array:
    wide = _range_dtype(ctx.dtype)
    return jnp.power(jnp.asarray(base, wide), _spaced(ctx, start, end, steps, wide)).astype(
        ctx.dtype
    )


@lowering("aten.eye.default", "aten.eye.m")
def _eye(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    num_rows, num_columns = ctx.shape
    return jnp.eye(num_rows, num_columns, dtype=ctx.dtype)


def _triangle(ctx: Context, first_column: np.ndarray, counts: np.ndarray) -> jax.Array:
    """The (row, column) pairs of counts[r] columns from first_column[r] on, for each row r."""
    # The program's constants are one number per row: a table of all pairs could be larger than the
    # model.
    total = ctx.shape[1]
    row = jnp.repeat(jnp.arange(len(counts)), counts, total_repeat_length=total)
    column = (
        jnp.arange(total) - jnp.asarray(np.cumsum(counts) - counts - first_column)[row]
        if total
        else row
    )
    return jnp.stack([row, column]).astype(ctx.dtype)


@lowering("aten.tril_indices.default")
def _tril_indices(ctx: Context, row: int, col: int, offset: int = 0, **_: Any) -> jax.Array:
    counts = np.clip(np.arange(row) + offset + 1, 0, col)
    return _triangle(ctx, np.zeros(row, np.int64), counts)


@lowering("aten.triu_indices.default")
def _triu_indices(ctx: Context, row: int, col: int, offset: int = 0, **_: Any) -> jax.Array:
    first = np.clip(np.arange(row) + offset, 0, col)
    return _triangle(ctx, first, col - first)
