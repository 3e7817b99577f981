"""Reads and writes of a diagonal through a mask, which every device applies to its own shard.

XLA's partitioner returns wrong elements for the gather of the diagonal of a split tensor if the
result is split over two axes (jaxlib 0.10 to 0.12). A masked sum reads each element once, and needs
no gather and no scatter; between devices, only a vector is summed.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _mask(rows: int, columns: int, offset: int) -> jax.Array:
    row = lax.broadcasted_iota(np.int32, (rows, columns), 0)
    return row + offset == lax.broadcasted_iota(np.int32, (rows, columns), 1)


def take_diagonal(x: jax.Array, offset: int, dim1: int, dim2: int) -> jax.Array:
    """The diagonal of the matrices over two dims, as the last dim. Keeps NaNs and signs of zeros.

    Args:
        x: of any dtype.
        offset: how many columns the diagonal is right of the main diagonal; left if negative.
        dim1: the dim of rows.
        dim2: the dim of columns.
    """
    matrices = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows, columns = matrices.shape[-2:]
    first = max(-offset, 0)
    length = max(min(rows - first, columns - max(offset, 0)), 0)
    # Adding -0.0 changes no float, not even a zero's sign. For other dtypes this is zero.
    nothing = np.asarray(False if x.dtype == np.bool_ else -0.0).astype(x.dtype)
    kept = jnp.where(_mask(rows, columns, offset), matrices, nothing)
    combine = lax.bitwise_or if x.dtype == np.bool_ else lax.add
    by_row = lax.reduce(kept, nothing, combine, [kept.ndim - 1])
    return lax.slice_in_dim(by_row, first, first + length, axis=by_row.ndim - 1)


def write_diagonal(
    base: jax.Array, piece: jax.Array, offset: int, dim1: int, dim2: int
) -> jax.Array:
    """`base` with `piece` on the diagonal that `take_diagonal` reads."""
    matrices = jnp.moveaxis(base, (dim1, dim2), (-2, -1))
    rows, columns = matrices.shape[-2:]
    first = max(-offset, 0)
    edges = [(0, 0, 0)] * (piece.ndim - 1) + [(first, rows - first - piece.shape[-1], 0)]
    by_row = lax.pad(piece, np.zeros((), piece.dtype), edges)
    new = jnp.where(_mask(rows, columns, offset), by_row[..., None], matrices)
    return jnp.moveaxis(new, (-2, -1), (dim1, dim2))
