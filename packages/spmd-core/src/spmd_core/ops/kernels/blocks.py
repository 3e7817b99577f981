"""Writes of blocks into tensors, where a block may be computed from the tensor that it changes.

XLA fuses the computation of a block with its write in place. If a reshape stands between the tensor
and the write, XLA does not see that the loop reads elements that it has already overwritten (jaxlib
0.10 to 0.12, on the CPU; GPUs share the pass). So a block is materialised before it is written.
`docs/explanation/xla_errors.md` has the error.
"""

from collections.abc import Sequence

import jax
from jax import lax


def apart(block: jax.Array) -> jax.Array:
    """The block, materialised before its use."""
    kept: jax.Array = lax.optimization_barrier(block)
    return kept


def write_block(x: jax.Array, block: jax.Array, starts: Sequence[int | jax.Array]) -> jax.Array:
    """`x` with the block written at a position, given by an index for each dim."""
    return lax.dynamic_update_slice(x, apart(block), starts)


def write_block_in_dim(
    x: jax.Array, block: jax.Array, start: int | jax.Array, dim: int
) -> jax.Array:
    """`x` with the block written at an index of one dim."""
    return lax.dynamic_update_slice_in_dim(x, apart(block), start, dim)
