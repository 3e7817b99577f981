"""Distances between all pairs of points, (..., P, width) and (..., R, width) to (..., P, R)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.ops.kernels.precision import matmul_precision, opmath
from spmd_core.ops.kernels.traits import COMPARISON
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


def _point_gradients(
    grad: jax.Array, a: jax.Array, b: jax.Array, distance: jax.Array, p: float
) -> jax.Array:
    """The gradients (..., P, width) of the points `a`; between equal points there is none.

    Args:
        grad: of the distances, (..., P, R).
        a: points (..., P, width).
        b: points (..., R, width).
        distance: (..., P, R).
        p: the norm's.
    """
    difference = a[..., :, None, :] - b[..., None, :, :]
    grad, distance = grad[..., None], distance[..., None]
    if p == 0:
        slope = jnp.zeros_like(difference)
    elif p == 1:
        slope = jnp.sign(difference)
    elif p == 2:
        apart = distance != 0
        grad, slope = jnp.where(apart, grad / jnp.where(apart, distance, 1), 0), difference
    elif math.isinf(p):
        slope = jnp.sign(difference) * (jnp.abs(difference) == distance)
    else:
        apart = (distance != 0) & (difference != 0)
        size = jnp.where(apart, jnp.abs(difference), 1)
        powers = (size / jnp.where(apart, distance, 1)) ** (p - 1)
        slope = jnp.where(apart, jnp.sign(difference) * powers, 0)
    return jnp.sum(grad * slope, axis=-2)


@lowering("aten._cdist_forward.default", traits=COMPARISON)
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
    grad, a, b, distances = (x.astype(wide) for x in (grad, a, b, distances))
    full = _point_gradients(grad, a, b, distances, p)
    # Dims of the batch over which `a` was broadcast.
    extra = full.ndim - len(ctx.shape)
    summed = jnp.sum(full, axis=tuple(range(extra)))
    kept = tuple(d for d, n in enumerate(ctx.shape) if n == 1 and summed.shape[d] != 1)
    return jnp.sum(summed, axis=kept, keepdims=True).astype(ctx.dtype)


# The pairs of a set of n points are in the order (0, 1), (0, 2), ..., (1, 2), ...; the pairs (i, j)
# with one i begin at i (2n - i - 1) / 2. All n^2 distances are computed: XLA fuses the differences
# with their sum, while points that are gathered by pairs would be written to memory.


def points_of(pair: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Both points of some pairs (int64, of any shape) of a set of `num` points."""
    odd = 2 * num - 1

    def begin(i: jax.Array) -> jax.Array:
        return i * (odd - i) // 2

    first = ((odd - jnp.sqrt((odd * odd - 8 * pair).astype(np.float64))) / 2).astype(np.int64)
    first = first + (begin(first + 1) <= pair) - (begin(first) > pair)  # the root is rounded
    return first, pair - begin(first) + first + 1


@lowering("aten._pdist_forward.default", traits=COMPARISON)
def _pdist(ctx: Context, x: Any, p: float = 2.0) -> jax.Array:
    x = x.astype(opmath(ctx.dtype))
    pair = jnp.arange(ctx.shape[0], dtype=np.int64)
    return _norm(x[:, None] - x[None], p)[points_of(pair, x.shape[0])].astype(ctx.dtype)


@lowering("aten._pdist_backward.default")
def _pdist_backward(ctx: Context, grad: Any, x: Any, p: float, distances: Any) -> jax.Array:
    wide, num = opmath(ctx.dtype), x.shape[0]
    if num < 2:
        return jnp.zeros(ctx.shape, ctx.dtype)
    x = x.astype(wide)
    low, high = (jnp.arange(num, dtype=np.int64).reshape(s) for s in ((-1, 1), (1, -1)))
    low, high = jnp.minimum(low, high), jnp.maximum(low, high)
    pair = low * (2 * num - 1 - low) // 2 + high - low - 1

    def of_pairs(values: jax.Array) -> jax.Array:
        return jnp.where(low == high, 0, values.astype(wide).at[pair].get(mode="clip"))

    return _point_gradients(of_pairs(grad), x, x, of_pairs(distances), p).astype(ctx.dtype)
