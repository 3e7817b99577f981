"""Looks up rows of a table that is split by its rows, if the indices are split by a common axis.

The partitioner would have each device look up the indices of all devices in its own rows, and
all-reduce the results. Here the table is gathered along the axis, if it is smaller than these
results. Otherwise the indices are gathered, and the results are reduce-scattered.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.ops.kernels import chunks
from spmd_core.ops.registry import TableLayout


def look_up(
    table: jax.Array, indices: jax.Array, layout: TableLayout, *, platform: str
) -> jax.Array:
    """Rows of the table; an index outside of it gives the nearest row.

    A reduce-scatter adds zeros to the rows, by which a negative zero becomes a positive one.

    Args:
        table: of shape (rows, width), of floats; the axes of `layout.rows` divide the rows.
        indices: of any shape with at least one dim, which the axes of `layout.indices` divide.
        layout: how both are split.
        platform: TPUs look up in chunks of the width.
    """
    if layout.gathers:
        rest = tuple(axis for axis in layout.rows if axis != layout.shared)
        gathered = NamedSharding(layout.mesh, PartitionSpec(rest))
        table = lax.with_sharding_constraint(table, gathered)
        return jnp.take(table, indices, axis=0, mode="clip")
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
    num_chunks = chunks.count(table.shape[1], num_bytes) if platform == "tpu" else 1
    made: list[jax.Array] = []
    for columns in jnp.split(table, num_chunks, axis=1):
        (columns,) = chunks.wait([columns], made)
        rows = jnp.where(is_own[..., None], columns[own], jnp.zeros((), table.dtype))
        rows = layout.scatter(rows)
        made.append(lax.psum(rows, others) if others else rows)
    return jnp.concatenate(made, axis=-1)
