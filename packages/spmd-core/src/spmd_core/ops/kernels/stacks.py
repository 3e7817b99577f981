"""Stacks: arrays of one shape as the rows of one array, and those rows again."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spmd_core.ops.kernels.blocks import apart, write_block_in_dim

# The operations, as recorded entries name them (`graph.stacks`).
STACK, UNSTACK = "spmd::stack", "spmd::unstack"
ROW, WITH_ROW = "spmd::row", "spmd::with_row"


def stacked(rows: Sequence[jax.Array]) -> list[jax.Array]:
    """The rows along a new first dim."""
    return [jax.numpy.stack(rows)]


def unstacked(stack: jax.Array) -> list[jax.Array]:
    """The rows, each without the first dim."""
    return [jax.lax.index_in_dim(stack, i, 0, keepdims=False) for i in range(stack.shape[0])]


def row(stack: jax.Array, index: jax.Array) -> jax.Array:
    """The row at an index, which is in range."""
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)


def with_row(stack: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    """The stack with another row at an index, which is in range."""
    return write_block_in_dim(stack, new[None], index, 0)


def put_in_row(
    stack: jax.Array,
    row: jax.Array,
    indices: Sequence[jax.Array | None],
    values: jax.Array,
    *,
    wraps: bool,
) -> jax.Array:
    """The stack with values at points of one row; points outside of it are not written.

    Args:
        stack: the stack.
        row: the index of the row, which is in range.
        indices: for the first dims of the row integers that broadcast, or None for the whole dim.
        values: broadcast to what a row has there, and converted.
        wraps: whether negative indices count from the end.
    """
    key = tuple(slice(None) if index is None else index for index in indices)
    whole_row = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
    shape = jax.eval_shape(lambda x: x[key], whole_row).shape
    values = jnp.broadcast_to(values, shape).astype(stack.dtype)
    # The dims of the indices stand where these stand, if they stand together; else in front. With
    # the row's index, they stand in front.
    at = [d for d, index in enumerate(indices) if index is not None]
    num = max(index.ndim for index in indices if index is not None)
    if at == [*range(at[0], at[-1] + 1)]:
        values = jnp.moveaxis(values, [*range(at[0], at[0] + num)], [*range(num)])
    target = stack.at[(row, *key)]
    # XLA would compute the write again in what reads the row, and copy the stack for that.
    return apart(target.set(apart(values), mode="drop", wrap_negative_indices=wraps))
