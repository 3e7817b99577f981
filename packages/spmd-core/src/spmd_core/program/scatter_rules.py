"""Forms of gathers and scatters that XLA's partitioner gets right, for `partitioner_rules`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from spmd_core.program.splits import Splits, replicate_dims


def scatter(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Pads a scatter to at least two indices, and to a multiple of every number of shards.

    XLA turns a scatter of one index into a dynamic-update-slice, which the partitioner gets wrong
    if the operand is itself computed from a split dim. And if indices are split unevenly over some
    axes of a mesh, it adds the padding of the last shard at index 0. The padding here has indices
    out of bounds, which write nothing.
    """
    operand, indices, updates = inputs
    if splits.replicates_indices:
        indices = splits.replicate_last_dims(indices, indices.ndim)
    elif indices.shape[-1] > 1:
        indices = splits.replicate_last_dims(indices, 1)
    params = eqn.params
    dims = params["dimension_numbers"]
    batching = dims.scatter_indices_batching_dims
    free = [d for d in range(indices.ndim - 1) if d not in batching]
    if len(splits.axis_sizes) > 1 and batching:
        indices, updates = _with_replicated_scattered_dims(
            splits.replicate_last_dims, dims, indices, updates
        )
    if np.iinfo(indices.dtype).max < max(operand.shape, default=0):
        indices = indices.astype(np.int64)
    if params["mode"] == lax.GatherScatterMode.CLIP:
        indices = _clamped_indices(operand, indices, updates, dims)
        params = {**params, "mode": lax.GatherScatterMode.FILL_OR_DROP}
    is_split_otherwise = bool(
        batching or splits.uneven or _has_part_windows(operand, updates, dims)
    )
    if is_split_otherwise and indices.dtype != np.int32 and max(operand.shape) < 2**31:
        # The partitioner pads indices that it splits unevenly as if they were int32, and aborts the
        # process if they are not.
        bounds = (-1 if jnp.issubdtype(indices.dtype, np.signedinteger) else 0, max(operand.shape))
        indices = jnp.clip(indices, *bounds).astype(np.int32)
    if not free:
        indices = jnp.expand_dims(indices, indices.ndim - 1)
        at = _position_of_new_dim(dims, updates.ndim)
        updates = jnp.expand_dims(updates, at)
        dims = dims._replace(
            update_window_dims=tuple(d + (d >= at) for d in dims.update_window_dims)
        )
        free = [indices.ndim - 2]
    scattered = [d for d in range(updates.ndim) if d not in dims.update_window_dims]
    sizes = {d: splits.even_size(indices.shape[d]) for d in free}
    if math.prod(sizes.values()) == 1:
        sizes[free[0]] = 2
    outside = np.asarray(max(operand.shape), indices.dtype)
    for d, size in sizes.items():
        more = size - indices.shape[d]
        indices = _appended(indices, d, more, outside)
        updates = _appended(updates, scattered[d], more, np.zeros((), updates.dtype))
    return [eqn.primitive.bind(operand, indices, updates, **{**params, "dimension_numbers": dims})]


def _has_part_windows(
    operand: jax.Array, updates: jax.Array, dims: lax.ScatterDimensionNumbers
) -> bool:
    """Whether the updates' windows are shorter than the operand in some window dim."""
    left_out = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    sizes = [size for d, size in enumerate(operand.shape) if d not in left_out]
    return any(updates.shape[d] < size for d, size in zip(dims.update_window_dims, sizes))


def _clamped_indices(
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    dims: lax.ScatterDimensionNumbers,
) -> jax.Array:
    """The indices, clamped so that each window of the updates lies inside the operand."""
    sizes = dict.fromkeys((*dims.inserted_window_dims, *dims.operand_batching_dims), 1)
    window = iter(dims.update_window_dims)
    last = [
        size - (sizes[d] if d in sizes else updates.shape[next(window)])
        for d, size in enumerate(operand.shape)
    ]
    bounds = np.asarray([last[d] for d in dims.scatter_dims_to_operand_dims], indices.dtype)
    return jnp.clip(indices, np.zeros((), indices.dtype), bounds)


def _with_replicated_scattered_dims(
    replicate_last_dims: Callable[[jax.Array, int], jax.Array],
    dims: lax.ScatterDimensionNumbers,
    indices: jax.Array,
    updates: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Indices and updates whose scattered dims are replicated.

    If one axis splits both the batching dim of the updates and the scattered dim of the operand,
    and another axis splits the scattered dim of the updates, the partitioner adds some updates to
    wrong elements.
    """
    batching = dims.scatter_indices_batching_dims
    of_indices = [d for d in range(indices.ndim) if d not in batching]
    scattered = [d for d in range(updates.ndim) if d not in dims.update_window_dims]
    of_updates = [d for d, i in zip(scattered, range(indices.ndim)) if i not in batching]
    return replicate_dims(replicate_last_dims, indices, of_indices), replicate_dims(
        replicate_last_dims, updates, of_updates
    )


def gather(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Replicates the indices, in a program that XLA's verifier has refused before.

    If the indices and the operand's columns are split over the same axis and the result is marked
    in another way, the partitioner makes a slice that is larger than its operand.
    """
    if not splits.replicates_indices:
        return None
    operand, indices = inputs
    indices = splits.replicate_last_dims(indices, indices.ndim)
    return [eqn.primitive.bind(operand, indices, **eqn.params)]


def _position_of_new_dim(dims: lax.ScatterDimensionNumbers, ndim: int) -> int:
    """Where a new last index dim stands among the dims of the updates."""
    scattered = [d for d in range(ndim) if d not in dims.update_window_dims]
    return scattered[-1] + 1 if scattered else 0


def _appended(x: jax.Array, dim: int, count: int, value: Any) -> jax.Array:
    edges = [(0, count if d == dim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, value, edges) if count else x
