"""Stacks: arrays of one shape as the rows of one array, and those rows again."""

from collections.abc import Sequence

import jax

# The operations, as recorded entries name them (`graph.stacks`).
STACK, UNSTACK = "spmd::stack", "spmd::unstack"


def stacked(rows: Sequence[jax.Array]) -> list[jax.Array]:
    """The rows along a new first dim."""
    return [jax.numpy.stack(rows)]


def unstacked(stack: jax.Array) -> list[jax.Array]:
    """The rows, each without the first dim."""
    return [jax.lax.index_in_dim(stack, i, 0, keepdims=False) for i in range(stack.shape[0])]
