"""Interpolation of (batch, channel, ...) at a grid of coordinates from -1 to 1; both gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.registry import Context, lowering

# torch's numbers for the interpolation, and for the padding outside of the array
_LINEAR, _NEAREST, _CUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _clipped(x: jax.Array, size: int, *, nan_is_first: bool) -> jax.Array:
    """The coordinate clipped to the array; NaN becomes the first or the last element.

    At the border the gradient is 0, as in torch; that of `jnp.clip` is 1/2. torch's kernel for two
    dims makes NaN the first element, and its kernel for three dims the last one.
    """
    first, last = jnp.zeros((), x.dtype), jnp.asarray(size - 1, x.dtype)
    if nan_is_first:
        return jnp.where(x > 0, jnp.where(x < last, x, last), first)
    return jnp.where(x < last, jnp.where(x > 0, x, first), last)


def _reflected(x: jax.Array, size: int, *, align_corners: bool) -> jax.Array:
    low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
    if span == 0:
        return jnp.zeros_like(x)
    distance = jnp.where(x < low, low - x, x - low)
    flips = jnp.floor(distance / span)
    rest = distance - flips * span
    return jnp.where(flips % 2 == 0, rest + low, span - rest + low)


def _moved_inside(
    x: jax.Array, size: int, padding: int, *, align_corners: bool, nan_is_first: bool
) -> jax.Array:
    if padding == _REFLECTION:
        x = _reflected(x, size, align_corners=align_corners)
    return x if padding == _ZEROS else _clipped(x, size, nan_is_first=nan_is_first)


def _cubic_weights(fraction: jax.Array) -> jax.Array:
    """Keys's cubic convolution (1981) with the parameter a = -0.75, for the four neighbors."""
    a = -0.75
    distance = jnp.abs(fraction - jnp.arange(-1, 3, dtype=fraction.dtype)[:, None, None])
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return jnp.where(distance <= 1, near, far)


def _taps(
    x: jax.Array, size: int, interpolation: int, padding: int, **rules: bool
) -> tuple[jax.Array, jax.Array]:
    """The neighbors along one dim of coordinates (batch, points), and their weights.

    Both are (neighbors, batch, points).
    """
    if interpolation == _CUBIC:
        base = jnp.floor(x)
        at = base + jnp.arange(-1, 3, dtype=x.dtype)[:, None, None]
        return _moved_inside(at, size, padding, **rules), _cubic_weights(x - base)
    x = _moved_inside(x, size, padding, **rules)
    if interpolation == _NEAREST:
        return jnp.round(x)[None], jnp.ones_like(x)[None]
    base = jnp.floor(x)
    return jnp.stack([base, base + 1]), jnp.stack([1 - (x - base), x - base])


def _sample(
    x: jax.Array, grid: jax.Array, *, interpolation: int, padding: int, align_corners: bool
) -> jax.Array:
    """`x` of (batch, channel, *sizes) at a grid of (batch, *result sizes, coordinates).

    The first coordinate is for the last dim of `x`. One gather reads all neighbors, so the gradient
    is one scatter.
    """
    batch, channels, *sizes = x.shape
    two_dims = len(sizes) == 2
    points = int(np.prod(grid.shape[1:-1]))
    index, weight, inside = (
        jnp.full((1, batch, points), one, dtype)
        for one, dtype in ((0, np.int64), (1, x.dtype), (True, np.bool_))
    )
    for d, size in enumerate(sizes):
        at = grid[..., len(sizes) - 1 - d].reshape(batch, points)
        at = (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2
        at, part = _taps(
            at, size, interpolation, padding, align_corners=align_corners, nan_is_first=two_dims
        )
        inside = (inside[:, None] & (at >= 0) & (at <= size - 1)).reshape(-1, batch, points)
        index = (index[:, None] * size + jnp.clip(at, 0, size - 1).astype(np.int64)).reshape(
            -1, batch, points
        )
        weight = (weight[:, None] * part).reshape(-1, batch, points)
    at = jnp.swapaxes(index, 0, 1).reshape(batch, 1, -1)
    values = jnp.take_along_axis(x.reshape(batch, channels, -1), at, axis=2, mode="clip").reshape(
        batch, channels, -1, points
    )
    weight, inside = (jnp.swapaxes(factor, 0, 1)[:, None] for factor in (weight, inside))
    # A value outside of the array is 0. torch's kernel for two dims still multiplies it with its
    # weight, which is NaN for a coordinate that is not finite; its kernel for three dims does not.
    nothing = jnp.zeros((), x.dtype)
    terms = (
        jnp.where(inside, values, nothing) * weight
        if two_dims
        else jnp.where(inside, values * weight, nothing)
    )
    total = jnp.sum(terms, axis=2)
    return total.reshape(batch, channels, *grid.shape[1:-1])


@lowering("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def _grid_sampler(
    ctx: Context, x: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    wide = opmath(x.dtype)
    out = _sample(
        x.astype(wide),
        grid.astype(wide),
        interpolation=interpolation_mode,
        padding=padding_mode,
        align_corners=align_corners,
    )
    return out.astype(ctx.dtype)


@lowering("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def _grid_sampler_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    grid: Any,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    wide = opmath(x.dtype)
    sample = functools.partial(
        _sample, interpolation=interpolation_mode, padding=padding_mode, align_corners=align_corners
    )
    _, vjp = jax.vjp(sample, x.astype(wide), grid.astype(wide))
    grads = vjp(grad.astype(wide))
    return tuple(
        g.astype(operand.dtype) if asked else None
        for g, operand, asked in zip(grads, (x, grid), output_mask)
    )
