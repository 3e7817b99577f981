"""Looks up rows of a table that is split by its rows, where the indices are split by a common axis.

The partitioner has each device look up, in its own rows, what all devices ask for, and adds up what
they found on every device. Here the table is gathered along the axis, if it is smaller than that.
Else the indices travel, and the rows that were found are scattered.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.ops.kernels import pieces
from spmd_core.ops.registry import TableLayout


def look_up(
    table: jax.Array, indices: jax.Array, layout: TableLayout, *, platform: str
) -> jax.Array:
    """Rows of the table; an index outside of it gives the nearest row.

    Rows that are scattered are sums with zeros, in which a negative zero becomes a positive one.

    Args:
        table: of shape (rows, width), of floats; the axes of `layout.rows` divide the rows.
        indices: of any shape with at least one dim, which the axes of `layout.indices` divide.
        layout: how both are split.
        platform: TPUs look up in pieces of the width.
    """
    if layout.gathers:
        rest = tuple(axis for axis in layout.rows if axis != layout.shared)
        whole = NamedSharding(layout.mesh, PartitionSpec(rest))
        return jnp.take(lax.with_sharding_constraint(table, whole), indices, axis=0, mode="clip")
    mapped = jax.shard_map(
        functools.partial(_local, layout, table.shape[0], platform),
        mesh=layout.mesh,
        in_specs=(PartitionSpec(layout.rows), PartitionSpec(*layout.indices)),
        out_specs=PartitionSpec(*layout.indices),
        check_vma=False,
    )
    found: jax.Array = mapped(table, indices)
    return found


def _local(
    layout: TableLayout, num_rows: int, platform: str, table: jax.Array, indices: jax.Array
) -> jax.Array:
    part = lax.axis_index(layout.rows)
    indices = jnp.clip(indices, 0, num_rows - 1)
    asked = lax.all_gather(indices, layout.shared, tiled=True)
    own = asked - part * table.shape[0]
    is_own = (own >= 0) & (own < table.shape[0])
    own = jnp.where(is_own, own, 0)
    others = tuple(axis for axis in layout.rows if axis != layout.shared)
    num_bytes = asked.size * table.shape[1] * table.dtype.itemsize
    num_pieces = pieces.count(table.shape[1], num_bytes) if platform == "tpu" else 1
    made: list[jax.Array] = []
    for columns in jnp.split(table, num_pieces, axis=1):
        (columns,) = pieces.wait([columns], made)
        rows = jnp.where(is_own[..., None], columns[own], jnp.zeros((), table.dtype))
        rows = layout.scatter(rows)
        made.append(lax.psum(rows, others) if others else rows)
    return jnp.concatenate(made, axis=-1)
