"""Sorting, topk, order statistics, mode and binary search.

As in torch, NaN counts as larger than every number. Every sort is stable.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels import index_rules
from spmd_core.ops.kernels.traits import CHOICE, COMPARISON, Compared, Traits
from spmd_core.ops.registry import Context, Number, as_array, lowering, result_dtype

_WITH_POSITIONS = Traits(compared=Compared.ELEMENTS, bounds=index_rules.positions(1, -1))


def _dim_last(x: jax.Array, dim: int) -> jax.Array:
    """The tensor with the dim moved to the end; a 0-dim tensor becomes one of shape (1,)."""
    return jnp.moveaxis(jnp.atleast_1d(x), dim, -1)


def _restore_dim(
    ctx: Context, results: tuple[jax.Array, ...], dim: int, *, keepdim: bool = True
) -> tuple[jax.Array, ...]:
    """The results in torch's shapes and dtypes, with their last dim moved back to `dim`.

    Without `keepdim` the results no longer have that dim.
    """
    moved = (jnp.moveaxis(x, -1, dim) if keepdim else x for x in results)
    dtypes = (results[0].dtype, np.dtype(np.int64))
    return tuple(
        x.reshape(out.shape).astype(dtype) for x, out, dtype in zip(moved, ctx.outs, dtypes)
    )


def _sorted(x: jax.Array, *, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    """The sorted values along the last dim, and their positions before the sort."""
    # Positions are int32 where they fit, so that the sort moves half of the memory.
    positions = lax.broadcasted_iota(
        np.int32 if x.shape[-1] < 2**31 else np.int64, x.shape, x.ndim - 1
    )
    keys = x.astype(np.uint8) if x.dtype == np.bool_ else x
    if descending:
        # Reversed, sorted and reversed again: equal elements keep their order, NaN comes first, and
        # no value is negated.
        keys, positions = lax.rev(keys, [x.ndim - 1]), lax.rev(positions, [x.ndim - 1])
    keys, positions = lax.sort((keys, positions), dimension=x.ndim - 1, is_stable=True, num_keys=1)
    if descending:
        keys, positions = lax.rev(keys, [x.ndim - 1]), lax.rev(positions, [x.ndim - 1])
    return keys.astype(x.dtype), positions


@lowering("aten.sort.default", traits=_WITH_POSITIONS)
def _sort(
    ctx: Context, x: jax.Array, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, ...]:
    return _restore_dim(ctx, _sorted(_dim_last(x, dim), descending=descending), dim)


@lowering("aten.sort.stable", traits=_WITH_POSITIONS)
def _sort_stable(
    ctx: Context, x: jax.Array, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, ...]:
    return _restore_dim(ctx, _sorted(_dim_last(x, dim), descending=descending), dim)


@lowering("aten.topk.default", traits=_WITH_POSITIONS)
def _topk(
    ctx: Context, x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[jax.Array, ...]:
    k = max(k, 1) if x.ndim == 0 else k  # torch's result has no dim to be empty
    rows = _dim_last(x, dim)
    if not largest:
        values, positions = _sorted(rows)
        return _restore_dim(ctx, (values[..., :k], positions[..., :k]), dim)
    if jnp.issubdtype(rows.dtype, jnp.floating):
        # top_k orders by bits: a NaN with its sign bit set would be the smallest.
        rows = jnp.where(jnp.isnan(rows), jnp.asarray(jnp.nan, rows.dtype), rows)
    return _restore_dim(ctx, tuple(lax.top_k(rows, k)), dim)


# One element by its rank.


def _at_rank(
    ctx: Context, x: jax.Array, rank: Any, dim: int, *, keepdim: bool
) -> tuple[jax.Array, ...]:
    """The element of the given rank (an int, or one per row), and its position."""
    rows, positions = _sorted(x)
    rank = jnp.broadcast_to(rank, x.shape[:-1])[..., None]
    results = tuple(jnp.take_along_axis(y, rank, axis=-1, mode="clip") for y in (rows, positions))
    return (
        _restore_dim(ctx, results, dim, keepdim=True)
        if keepdim
        else _restore_dim(ctx, tuple(y[..., 0] for y in results), dim, keepdim=False)
    )


def _num_nan(x: jax.Array) -> jax.Array:
    """The number of NaNs in each row."""
    return (
        jnp.isnan(x).sum(-1)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.zeros(x.shape[:-1], np.int64)
    )


def _median_rank(x: jax.Array) -> jax.Array:
    """The lower of the two middle ranks; for a row with NaNs the rank of the first NaN."""
    length, num_nan = x.shape[-1], _num_nan(x)
    return jnp.where(num_nan > 0, length - num_nan, (length - 1) // 2)


def _nanmedian_rank(x: jax.Array) -> jax.Array:
    """The lower of the two middle ranks among the numbers; 0 in a row of NaNs only."""
    return jnp.maximum((x.shape[-1] - _num_nan(x) - 1) // 2, 0)


@lowering("aten.kthvalue.default", traits=_WITH_POSITIONS)
def _kthvalue(
    ctx: Context, x: jax.Array, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[jax.Array, ...]:
    return _at_rank(ctx, _dim_last(x, dim), k - 1, dim, keepdim=keepdim)


@lowering("aten.median.dim", traits=_WITH_POSITIONS)
def _median_dim(
    ctx: Context, x: jax.Array, dim: int, keepdim: bool = False
) -> tuple[jax.Array, ...]:
    rows = _dim_last(x, dim)
    return _at_rank(ctx, rows, _median_rank(rows), dim, keepdim=keepdim)


@lowering("aten.nanmedian.dim", traits=_WITH_POSITIONS)
def _nanmedian_dim(
    ctx: Context, x: jax.Array, dim: int, keepdim: bool = False
) -> tuple[jax.Array, ...]:
    rows = _dim_last(x, dim)
    return _at_rank(ctx, rows, _nanmedian_rank(rows), dim, keepdim=keepdim)


def _element_at_rank(flat: jax.Array, rank: jax.Array) -> jax.Array:
    return jnp.take(lax.sort(flat), rank, mode="clip")


def _median_is_undefined(args: Any, kwargs: Any, platform: str) -> bool:
    """Whether this is the median of no elements in an integer dtype.

    The median of no elements is NaN, which an integer dtype does not have; torch gives some other
    value.
    """
    return args[0].numel() == 0 and not args[0].dtype.is_floating_point


def _empty_median(ctx: Context) -> jax.Array:
    """The median of no elements."""
    return jnp.full(ctx.shape, jnp.nan, ctx.dtype)


@lowering("aten.median.default", host_when=_median_is_undefined, traits=CHOICE)
def _median(ctx: Context, x: jax.Array) -> jax.Array:
    flat = x.reshape(-1)
    return _element_at_rank(flat, _median_rank(flat)) if flat.size else _empty_median(ctx)


@lowering("aten.nanmedian.default", host_when=_median_is_undefined, traits=CHOICE)
def _nanmedian(ctx: Context, x: jax.Array) -> jax.Array:
    flat = x.reshape(-1)
    return _element_at_rank(flat, _nanmedian_rank(flat)) if flat.size else _empty_median(ctx)


@lowering("aten.mode.default", traits=_WITH_POSITIONS)
def _mode(
    ctx: Context, x: jax.Array, dim: int = -1, keepdim: bool = False
) -> tuple[jax.Array, ...]:
    """The most frequent value, the smallest of several, and its last position."""
    rows, positions = _sorted(_dim_last(x, dim))
    axis = rows.ndim - 1
    rank = lax.broadcasted_iota(np.int64, rows.shape, axis)
    begins = jnp.concatenate(
        [jnp.ones_like(rows[..., :1], bool), rows[..., 1:] != rows[..., :-1]], -1
    )
    # The last element of the longest run has the largest distance from the start of its run.
    run = rank - lax.cummax(jnp.where(begins, rank, 0), axis=axis)
    end = jnp.argmax(run, axis=-1, keepdims=True)
    results = tuple(jnp.take_along_axis(y, end, axis=-1, mode="clip") for y in (rows, positions))
    return (
        _restore_dim(ctx, results, dim, keepdim=True)
        if keepdim
        else _restore_dim(ctx, tuple(y[..., 0] for y in results), dim, keepdim=False)
    )


# Binary search.


def _search(ctx: Context, sequence: jax.Array, x: Any, right: bool) -> jax.Array:
    """The first position in the sorted sequence whose element is >= x, for each element of x.

    With `right`, the first whose element is > x. The comparisons are torch's, in torch's order, so
    that the position of NaN is torch's too.
    """
    dtype = result_dtype(sequence, x)
    sequence = as_array(sequence, dtype)
    values = jnp.broadcast_to(as_array(x, dtype), ctx.shape)
    length = sequence.shape[-1]
    batch = sequence.shape[:-1]
    # With one sequence, all values are one row; otherwise each row has its own sequence.
    rows = values if batch else values.reshape(values.size)
    low, high = jnp.zeros(rows.shape, np.int64), jnp.full(rows.shape, length, np.int64)

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        found = jnp.take_along_axis(sequence, middle, axis=-1, mode="clip")
        beyond = ~(found > rows) if right else ~(found >= rows)
        searching = low < high
        return jnp.where(searching & beyond, middle + 1, low), jnp.where(
            searching & ~beyond, middle, high
        )

    if length:
        low, _ = lax.fori_loop(0, length.bit_length(), halve, (low, high))
    return low.reshape(ctx.shape).astype(ctx.dtype)


@lowering("aten.searchsorted.Tensor", "aten.searchsorted.Scalar", traits=COMPARISON)
def _searchsorted(
    ctx: Context,
    sorted_sequence: jax.Array,
    x: jax.Array | Number,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, axis=-1, mode="clip")
    return _search(ctx, sorted_sequence, x, right or side == "right")


@lowering("aten.bucketize.Tensor", "aten.bucketize.Scalar", traits=COMPARISON)
def _bucketize(
    ctx: Context,
    x: jax.Array | Number,
    boundaries: jax.Array,
    *,
    out_int32: bool = False,
    right: bool = False,
) -> jax.Array:
    return _search(ctx, boundaries, x, right)


# Up to this many test values are compared with each element; more are sorted and searched.
_FEW_TESTS = 32


@lowering(
    "aten.isin.Tensor_Tensor",
    "aten.isin.Tensor_Scalar",
    "aten.isin.Scalar_Tensor",
    traits=COMPARISON,
)
def _isin(
    ctx: Context, elements: Any, tests: Any, *, assume_unique: bool = False, invert: bool = False
) -> jax.Array:
    dtype = result_dtype(elements, tests)
    elements, tests = as_array(elements, dtype), as_array(tests, dtype).reshape(-1)
    if tests.size <= _FEW_TESTS:
        found = jnp.any(elements[..., None] == tests, axis=-1)
    else:
        ordered = lax.sort(ctx.replicate_last_dims(tests, 1))
        place = jnp.searchsorted(ordered, elements.reshape(-1)).reshape(elements.shape)
        found = ordered.at[place].get(mode="clip") == elements
    return ~found if invert else found
