"""Reductions of segments: data whose dim `axis` is cut into segments, by their lengths or by where they begin and end, one value for each out.

Lengths that are negative or do not add up to the dim are an error in eager torch; a program cannot raise. Here what lies past the last segment
belongs to none, and the last of segments that are too long ends with the data.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.registry import Context, as_array, lowering


def _bounds(lengths: jax.Array | None, offsets: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Where each segment begins, and where it ends; torch looks at the offsets first."""
    if offsets is not None:
        return offsets[..., :-1].astype(np.int64), offsets[..., 1:].astype(np.int64)
    assert lengths is not None  # torch's meta kernel asks for one of them
    ends = jnp.cumsum(lengths.astype(np.int64), axis=-1)
    return ends - lengths, ends


def _segment_of_each(begins: jax.Array, ends: jax.Array, length: int) -> jax.Array:
    """For each position the segment that it lies in; one past the last for those in none."""
    num_segments = begins.shape[-1]
    place = jnp.arange(length)
    found = _over_rows(lambda ends: jnp.searchsorted(ends, place, side="right"), ends)
    outside = place < begins[..., :1] if num_segments else np.True_
    return jnp.where(outside, num_segments, found)


def _over_rows(
    function: Callable[..., jax.Array], *arrays: jax.Array, trailing: int = 1
) -> jax.Array:
    """Maps over the leading dims: they stay batch dims of one gather or scatter."""
    for _ in range(arrays[0].ndim - trailing):
        function = jax.vmap(function)
    return function(*arrays)


def _combined(
    values: jax.Array, segment: jax.Array, num_segments: int, method: str, initial: Any
) -> jax.Array:
    """(rows..., length, rest) values combined within the segments: (rows..., segments, rest)."""
    initial = jnp.asarray(initial, values.dtype)

    def one(segment: jax.Array, values: jax.Array) -> jax.Array:
        base = jnp.full((num_segments, values.shape[-1]), initial)
        return getattr(base.at[segment], method)(values, mode="drop")

    return _over_rows(one, segment, values)


def _of_each(values: jax.Array, segment: jax.Array) -> jax.Array:
    """Each position's segment's value: (rows..., segments, rest) to (rows..., length, rest); 0 for those in none."""
    return _over_rows(
        lambda segment, values: values.at[segment].get(mode="fill", fill_value=0), segment, values
    )


def _folded(x: jax.Array, axis: int) -> jax.Array:
    """The dims after `axis` as one."""
    return x.reshape(*x.shape[: axis + 1], int(np.prod(x.shape[axis + 1 :])))


_METHOD = {"sum": "add", "mean": "add", "prod": "multiply", "max": "max", "min": "min"}
_IDENTITY = {"sum": 0, "mean": 0, "prod": 1, "max": -np.inf, "min": np.inf}


@lowering("aten.segment_reduce.default")
def _segment_reduce(
    ctx: Context,
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    indices: Any = None,
    offsets: Any = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> jax.Array:
    axis %= data.ndim
    x = _folded(data.astype(opmath(ctx.dtype)), axis)
    begins, ends = _bounds(lengths, offsets)
    segment = _segment_of_each(begins, ends, x.shape[axis])
    start = as_array(_IDENTITY[reduce] if initial is None else initial, x.dtype)
    out = _combined(x, segment, begins.shape[-1], _METHOD[reduce], start)
    if reduce == "mean":
        counts = (ends - begins)[..., None].astype(x.dtype)
        nothing = jnp.asarray(jnp.nan if initial is None else start, x.dtype)
        out = jnp.where(counts > 0, out / jnp.maximum(counts, 1), nothing)
    return out.reshape(ctx.shape).astype(ctx.dtype)


@lowering("aten._segment_reduce_backward.default")
def _segment_reduce_backward(
    ctx: Context,
    grad: Any,
    output: Any,
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    offsets: Any = None,
    axis: int = 0,
    initial: Any = None,
) -> jax.Array:
    axis %= data.ndim
    wide = opmath(ctx.dtype)
    grad, output, x = (_folded(y.astype(wide), axis) for y in (grad, output, data))
    begins, ends = _bounds(lengths, offsets)
    segment = _segment_of_each(begins, ends, x.shape[axis])
    num_segments = begins.shape[-1]
    if reduce == "mean":
        grad = grad / jnp.maximum(ends - begins, 1)[..., None].astype(wide)
    if reduce in ("max", "min"):
        # Elements that share the extremum share the gradient; NaN counts as one.
        chosen = (x == _of_each(output, segment)) | jnp.isnan(x)
        shares = _combined(chosen.astype(wide), segment, num_segments, "add", 0)
        each = jnp.where(
            chosen, _of_each(grad / jnp.maximum(shares, 1), segment), jnp.zeros((), wide)
        )
    else:
        each = _of_each(grad, segment)
    if reduce == "prod":
        # By each element the product of the others: a quotient, save at 0 and NaN, where those are counted and the rest is multiplied.
        start = as_array(1 if initial is None else initial, wide)
        plain = (x != 0) & ~jnp.isnan(x)
        rest = _of_each(
            _combined(
                jnp.where(plain, x, jnp.ones_like(x)), segment, num_segments, "multiply", start
            ),
            segment,
        )
        zeros, nans = (
            _of_each(_combined(y.astype(wide), segment, num_segments, "add", 0), segment) - y
            for y in (x == 0, jnp.isnan(x))
        )
        others = jnp.where(zeros > 0, rest * 0, rest)
        others = jnp.where(nans > 0, jnp.asarray(jnp.nan, wide), others)
        each = each * jnp.where(
            plain, _of_each(output, segment) / jnp.where(plain, x, jnp.ones_like(x)), others
        )
    return each.reshape(ctx.shape).astype(ctx.dtype)
