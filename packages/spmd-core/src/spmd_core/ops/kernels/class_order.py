"""Arrays of classes in the order in which they lie in memory: a hint of `passes.class_orders`."""

import jax
import jax.numpy as jnp

from spmd_core.ops.registry import ClassOrder, Context


def ordered(ctx: Context, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
    """An array, with its dim of classes as the last one if it lies so in memory; and that dim."""
    if not _is_transposed(ctx, x.ndim, dim):
        return x, dim
    return jnp.moveaxis(x, dim, -1), x.ndim - 1


def restored(ctx: Context, x: jax.Array, dim: int) -> jax.Array:
    """The inverse of `ordered`: an array whose dim of classes is `dim` again."""
    return jnp.moveaxis(x, -1, dim) if _is_transposed(ctx, x.ndim, dim) else x


def _is_transposed(ctx: Context, ndim: int, dim: int) -> bool:
    order = ctx.layout(ClassOrder)
    return order is not None and order.dim == dim % ndim
