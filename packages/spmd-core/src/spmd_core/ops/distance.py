"""Distances between all pairs of points, (..., P, width) and (..., R, width) to (..., P, R)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.ops.kernels.precision import matmul_precision, opmath
from spmd_core.ops.registry import Context, lowering

# torch's numbers for `compute_mode`, and the number of points above which torch computes the
# distances by a matrix product.
_ALWAYS_PRODUCT, _NEVER_PRODUCT = 1, 2
_MANY_POINTS = 25


def _norm(difference: jax.Array, p: float) -> jax.Array:
    size = jnp.abs(difference)
    if p == 0:
        return jnp.sum(jnp.where(jnp.isnan(size), size, (size != 0).astype(size.dtype)), axis=-1)
    if p == 1:
        return jnp.sum(size, axis=-1)
    if p == 2:
        return jnp.sqrt(jnp.sum(size * size, axis=-1))
    if math.isinf(p):
        return jnp.max(size, axis=-1, initial=0)
    return jnp.sum(size**p, axis=-1) ** (1 / p)


def _by_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The root of |a|^2 + |b|^2 - 2 ab: one matrix product.

    The differences would be an array of shape (..., P, R, width).
    """
    products = jnp.matmul(a, jnp.swapaxes(b, -1, -2), precision=matmul_precision(a.dtype))
    squares = (
        jnp.sum(a * a, axis=-1)[..., :, None] + jnp.sum(b * b, axis=-1)[..., None, :] - 2 * products
    )
    return jnp.sqrt(jnp.maximum(squares, 0))


def _slope(difference: jax.Array, distance: jax.Array, p: float) -> jax.Array:
    """The derivative of the distance by each difference, 0 where the points are equal."""
    distance = distance[..., None]
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return jnp.sign(difference)
    if math.isinf(p):
        return jnp.sign(difference) * (jnp.abs(difference) == distance)
    apart = (distance != 0) & (difference != 0)
    size, whole = (jnp.where(apart, x, jnp.ones_like(x)) for x in (jnp.abs(difference), distance))
    return jnp.where(
        apart, jnp.sign(difference) * (size / whole) ** (p - 1), jnp.zeros_like(difference)
    )


@lowering("aten._cdist_forward.default")
def _cdist(ctx: Context, a: Any, b: Any, p: float, compute_mode: int | None) -> jax.Array:
    wide = opmath(ctx.dtype)
    a, b = a.astype(wide), b.astype(wide)
    many = max(a.shape[-2], b.shape[-2]) > _MANY_POINTS and compute_mode != _NEVER_PRODUCT
    if p == 2 and (compute_mode == _ALWAYS_PRODUCT or many):
        return _by_product(a, b).astype(ctx.dtype)
    return _norm(a[..., :, None, :] - b[..., None, :, :], p).astype(ctx.dtype)


@lowering("aten._cdist_backward.default")
def _cdist_backward(ctx: Context, grad: Any, a: Any, b: Any, p: float, distances: Any) -> jax.Array:
    wide = opmath(ctx.dtype)
    difference = a.astype(wide)[..., :, None, :] - b.astype(wide)[..., None, :, :]
    full = jnp.sum(
        grad.astype(wide)[..., None] * _slope(difference, distances.astype(wide), p), axis=-2
    )
    # Dims of the batch over which `a` was broadcast.
    extra = full.ndim - len(ctx.shape)
    summed = jnp.sum(full, axis=tuple(range(extra)))
    kept = tuple(d for d, n in enumerate(ctx.shape) if n == 1 and summed.shape[d] != 1)
    return jnp.sum(summed, axis=kept, keepdims=True).astype(ctx.dtype)


@lowering("aten._pdist_forward.default")
def _pdist(ctx: Context, x: Any, p: float = 2.0) -> jax.Array:
    first, second = np.triu_indices(x.shape[0], 1)
    x = x.astype(opmath(ctx.dtype))
    return _norm(x[first] - x[second], p).astype(ctx.dtype)


@lowering("aten._pdist_backward.default")
def _pdist_backward(ctx: Context, grad: Any, x: Any, p: float, distances: Any) -> jax.Array:
    wide = opmath(ctx.dtype)
    first, second = np.triu_indices(x.shape[0], 1)
    x = x.astype(wide)
    point_grads = grad.astype(wide)[:, None] * _slope(
        x[first] - x[second], distances.astype(wide), p
    )
    return (
        jnp.zeros(ctx.shape, wide)
        .at[first]
        .add(point_grads)
        .at[second]
        .add(-point_grads)
        .astype(ctx.dtype)
    )
