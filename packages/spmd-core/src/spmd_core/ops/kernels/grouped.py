"""Products of rows in groups, computed in blocks of rows of one group each.

If a platform has no kernel for a ragged dot, XLA multiplies all rows with every group's matrix, and
masks: work and memory grow with the number of groups. Here each group's rows are split into blocks,
the last of which is padded with zeros, and a batched product multiplies each block by its group's
matrix. This takes at most about twice the work of the rows alone, for any sizes of the groups,
which only the device knows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

LEAST_ROWS = 8  # the least rows of a block: shorter blocks make products inefficient

# (batch, m, k) and (batch, k, n) to (batch, m, n).
Product = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Blocks:
    """Where the rows of some groups lie in blocks.

    Attributes:
        group: the group of each block, (blocks,); any group for a block without rows.
        row: the row that each place of a block holds, (blocks, rows); always in range.
        is_used: whether a place holds a row, (blocks, rows).
        block, place: the place of each row, (rows of all groups,); always in range.
        is_grouped: whether a row belongs to one of the groups, (rows of all groups,).
    """

    group: jax.Array
    row: jax.Array
    is_used: jax.Array
    block: jax.Array
    place: jax.Array
    is_grouped: jax.Array

    @staticmethod
    def of(starts: jax.Array, ends: jax.Array, num_rows: int, size: int) -> "Blocks":
        """The blocks of groups that follow each other.

        Args:
            starts, ends: the first row of each group, and one past its last: int32 (groups,).
            num_rows: the number of all rows, including those before and after the groups.
            size: the rows of a block.
        """
        groups = ends.shape[0]
        num_blocks = -(-num_rows // size) + groups  # each group may have one that is not full
        last_blocks = jnp.cumsum(-((starts - ends) // size), dtype=ends.dtype)
        first_blocks = jnp.concatenate([jnp.zeros(1, ends.dtype), last_blocks[:-1]])
        blocks, rows = (jnp.arange(n, dtype=ends.dtype) for n in (num_blocks, num_rows))

        def group_at(position: jax.Array, borders: jax.Array) -> jax.Array:
            found = jnp.searchsorted(borders, position, side="right", method="compare_all")
            return jnp.minimum(found, groups - 1)

        group = group_at(blocks, last_blocks)
        row = (starts[group] + (blocks - first_blocks[group]) * size)[:, None] + np.arange(size)
        is_used = (row < ends[group, None]) & (blocks < last_blocks[-1])[:, None]
        of_row = group_at(rows, ends)
        within = rows - starts[of_row]
        return Blocks(
            group,
            jnp.minimum(row, num_rows - 1),
            is_used,
            jnp.clip(first_blocks[of_row] + within // size, 0, num_blocks - 1),
            within % size,
            (rows >= starts[0]) & (rows < ends[-1]),
        )

    def gathered(self, x: jax.Array) -> jax.Array:
        """Rows in blocks, (blocks, rows, columns), with zeros in the places that hold none."""
        return jnp.where(self.is_used[..., None], x[self.row], np.zeros((), x.dtype))


def rows_by_groups(
    x: jax.Array, matrices: jax.Array, ends: jax.Array, product: Product, *, num_parts: int = 1
) -> jax.Array:
    """Multiplies each row by its group's matrix; rows after the last group are 0.

    Args:
        x: (rows, k).
        matrices: (groups, k, n).
        ends: one past the last row of each group, int32 (groups,), not decreasing.
        product: the batched product.
        num_parts: the number of equal parts into which the groups are split. Each part has blocks
            of its own, so that devices that split the groups multiply by their own matrices.

    Returns:
        (rows, n), in the dtype of `product`'s result.
    """
    size = _size(x, ends)

    def of_part(matrices: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
        blocks = Blocks.of(starts, ends, x.shape[0], size)
        found = product(blocks.gathered(x), matrices[blocks.group])[blocks.block, blocks.place]
        return jnp.where(blocks.is_grouped[:, None], found, np.zeros((), found.dtype))

    parts = [_in_parts(y, num_parts) for y in (matrices, _starts(ends), ends)]
    # A row has a group in at most one part.
    return jax.vmap(of_part)(*parts).sum(0)


def sums_by_groups(
    x: jax.Array, y: jax.Array, ends: jax.Array, product: Product, *, num_parts: int = 1
) -> jax.Array:
    """For each group the product over its rows, x.T @ y.

    Args:
        x: (rows, m).
        y: (rows, n).
        ends, product, num_parts: as for `rows_by_groups`.

    Returns:
        (groups, m, n), in the dtype of `product`'s result.
    """
    size = _size(x, ends)

    def of_part(starts: jax.Array, ends: jax.Array) -> jax.Array:
        blocks = Blocks.of(starts, ends, x.shape[0], size)
        found = product(jnp.swapaxes(blocks.gathered(x), 1, 2), blocks.gathered(y))
        sums = jnp.zeros((ends.shape[0], *found.shape[1:]), found.dtype)
        return sums.at[blocks.group].add(found)

    found = jax.vmap(of_part)(*(_in_parts(z, num_parts) for z in (_starts(ends), ends)))
    return found.reshape(ends.shape[0], *found.shape[2:])


def _size(x: jax.Array, ends: jax.Array) -> int:
    """The rows of a block: as many as each group would have if all had the same size."""
    return max(LEAST_ROWS, -(-x.shape[0] // ends.shape[0]))


def _starts(ends: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])


def _in_parts(x: jax.Array, num_parts: int) -> jax.Array:
    return x.reshape(num_parts, x.shape[0] // num_parts, *x.shape[1:])
