"""Segment reductions: a dim is cut into segments, each of which is reduced to one value.

The segments are given by their lengths, or by offsets at which they begin and end. Lengths that are
negative or do not add up to the dim are an error in eager torch; a program cannot raise. Here the
elements after the last segment belong to none, and segments that are too long end with the data.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.traits import CHOICE
from spmd_core.ops.registry import Context, as_array, lowering


def _bounds(lengths: jax.Array | None, offsets: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Where each segment begins and ends; as in torch, offsets take precedence over lengths."""
    if offsets is not None:
        return offsets[..., :-1].astype(np.int64), offsets[..., 1:].astype(np.int64)
    assert lengths is not None  # torch's meta kernel asks for one of them
    ends = jnp.cumsum(lengths.astype(np.int64), axis=-1)
    return ends - lengths, ends


def _segment_per_position(begins: jax.Array, ends: jax.Array, length: int) -> jax.Array:
    """The segment of each position; one past the last segment for positions in none."""
    num_segments = begins.shape[-1]
    place = jnp.arange(length)
    found = _map_leading_dims(lambda ends: jnp.searchsorted(ends, place, side="right"), ends)
    outside = place < begins[..., :1] if num_segments else np.True_
    return jnp.where(outside, num_segments, found)


def _map_leading_dims(
    function: Callable[..., jax.Array], *arrays: jax.Array, trailing: int = 1
) -> jax.Array:
    """Maps `function` over the leading dims, as batch dims of one gather or scatter."""
    for _ in range(arrays[0].ndim - trailing):
        function = jax.vmap(function)
    return function(*arrays)


def _combined(
    values: jax.Array, segment: jax.Array, num_segments: int, method: str, initial: Any
) -> jax.Array:
    """Values (rows..., length, rest) combined within the segments: (rows..., segments, rest)."""
    initial = jnp.asarray(initial, values.dtype)

    def one(segment: jax.Array, values: jax.Array) -> jax.Array:
        base = jnp.full((num_segments, values.shape[-1]), initial)
        return getattr(base.at[segment], method)(values, mode="drop")

    return _map_leading_dims(one, segment, values)


def _value_per_position(values: jax.Array, segment: jax.Array) -> jax.Array:
    """The value of each position's segment, and 0 for positions in none.

    (rows..., segments, rest) become (rows..., length, rest).
    """
    return _map_leading_dims(
        lambda segment, values: values.at[segment].get(mode="fill", fill_value=0), segment, values
    )


def _merge_trailing_dims(x: jax.Array, axis: int) -> jax.Array:
    """`x` with the dims after `axis` merged into one."""
    return x.reshape(*x.shape[: axis + 1], int(np.prod(x.shape[axis + 1 :])))


_METHOD = {"sum": "add", "mean": "add", "prod": "multiply", "max": "max", "min": "min"}
_IDENTITY = {"sum": 0, "mean": 0, "prod": 1, "max": -np.inf, "min": np.inf}


@lowering("aten.segment_reduce.default", traits=CHOICE)
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
    x = _merge_trailing_dims(data.astype(opmath(ctx.dtype)), axis)
    begins, ends = _bounds(lengths, offsets)
    segment = _segment_per_position(begins, ends, x.shape[axis])
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
    grad, output, x = (_merge_trailing_dims(y.astype(wide), axis) for y in (grad, output, data))
    begins, ends = _bounds(lengths, offsets)
    segment = _segment_per_position(begins, ends, x.shape[axis])
    num_segments = begins.shape[-1]
    if reduce == "mean":
        grad = grad / jnp.maximum(ends - begins, 1)[..., None].astype(wide)
    if reduce in ("max", "min"):
        # Elements that equal the extremum share its gradient; NaN counts as an extremum.
        chosen = (x == _value_per_position(output, segment)) | jnp.isnan(x)
        shares = _combined(chosen.astype(wide), segment, num_segments, "add", 0)
        element_grad = jnp.where(
            chosen, _value_per_position(grad / jnp.maximum(shares, 1), segment), jnp.zeros((), wide)
        )
    else:
        element_grad = _value_per_position(grad, segment)
    if reduce == "prod":
        # The derivative by an element is the product of the others: the product of all over the
        # element. For an element that is 0 or NaN, it is the product of the elements that are
        # neither, or 0 or NaN if another element is.
        start = as_array(1 if initial is None else initial, wide)
        plain = (x != 0) & ~jnp.isnan(x)
        rest = _value_per_position(
            _combined(
                jnp.where(plain, x, jnp.ones_like(x)), segment, num_segments, "multiply", start
            ),
            segment,
        )
        zeros, nans = (
            _value_per_position(_combined(y.astype(wide), segment, num_segments, "add", 0), segment)
            - y
            for y in (x == 0, jnp.isnan(x))
        )
        others = jnp.where(zeros > 0, rest * 0, rest)
        others = jnp.where(nans > 0, jnp.asarray(jnp.nan, wide), others)
        element_grad = element_grad * jnp.where(
            plain,
            _value_per_position(output, segment) / jnp.where(plain, x, jnp.ones_like(x)),
            others,
        )
    return element_grad.reshape(ctx.shape).astype(ctx.dtype)
