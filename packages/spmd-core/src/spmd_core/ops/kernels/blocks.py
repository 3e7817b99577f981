"""Writes of blocks into tensors, where a block may be computed from the tensor that it changes.

XLA computes a block and writes it in one fused loop, in place, and does not see that the loop also
reads what it has written, where a reshape stands between the tensor and the write (jaxlib 0.10 to
0.12, on the CPU; the pass is shared with GPUs). So a block is a buffer of its own before it is
written. `docs/xla_errors.md` has the error.
"""

from collections.abc import Sequence

import jax
from jax import lax


def apart(block: jax.Array) -> jax.Array:
    """The block, computed before what uses it."""
    kept: jax.Array = lax.optimization_barrier(block)
    return kept


def write_block(x: jax.Array, block: jax.Array, starts: Sequence[int | jax.Array]) -> jax.Array:
    """`x` with the block from these positions on, one for each dim."""
    return lax.dynamic_update_slice(x, apart(block), starts)


def write_block_in_dim(
    x: jax.Array, block: jax.Array, start: int | jax.Array, dim: int
) -> jax.Array:
    """`x` with the block from a position of one dim on."""
    return lax.dynamic_update_slice_in_dim(x, apart(block), start, dim)
