"""Reads at positions given by tensors: advanced indexing, index_select, gather, take, embeddings.

An index outside its dim is an error in eager torch on the CPU. A device cannot raise from inside a
program: here such an index reads the nearest element that exists, and writes nothing in the
gradients. No read leaves its array. Negative indices count from the end where torch allows them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.ops.kernels import index_rules
from spmd_core.ops.kernels.lookups import look_up
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.traits import CHOSEN, Elements, Parts, Rows, Traits
from spmd_core.ops.registry import Context, Number, TableLayout, as_array, lowering


def _axis(dim: int, ndim: int) -> int:
    """The dim counted from the front; in torch, a 0-dim tensor has the dims 0 and -1."""
    return dim % max(ndim, 1)


def _key(x: jax.Array, indices: Sequence[jax.Array | None]) -> tuple[Any, ...]:
    """The list of index tensors as a numpy key; None takes all of the dim.

    Raises NotImplementedError for a mask, whose result has no static shape.
    """
    for index in indices:
        if index is not None and index.dtype in (np.bool_, np.uint8):
            raise NotImplementedError(
                "indexing with a mask gives a shape that depends on the mask's values; it is "
                "computed on the host."
            )
    return tuple(slice(None) if index is None else index for index in indices)


@lowering("aten._unsafe_index.Tensor", traits=CHOSEN)
@lowering("aten.index.Tensor", indices=index_rules.of_each_dim, traits=CHOSEN)
def _index(ctx: Context, x: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    return x.at[_key(x, indices)].get(mode="clip").reshape(ctx.shape)


@lowering("aten._unsafe_masked_index.default")
def _unsafe_masked_index(
    ctx: Context,
    x: jax.Array,
    mask: jax.Array,
    indices: Sequence[jax.Array | None],
    fill: Number | float,
) -> jax.Array:
    picked = x.at[_key(x, indices)].get(mode="clip", wrap_negative_indices=False)
    return jnp.where(mask, picked, as_array(fill, x.dtype))


@lowering("aten.index_select.default", indices=index_rules.along_dim(), traits=CHOSEN)
def _index_select(ctx: Context, x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    axis = _axis(dim, x.ndim)
    return jnp.take(jnp.atleast_1d(x), index.reshape(-1), axis=axis, mode="clip").reshape(ctx.shape)


@lowering("aten.gather.default", indices=index_rules.along_dim(), traits=CHOSEN)
def _gather(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, sparse_grad: bool = False
) -> jax.Array:
    axis = _axis(dim, x.ndim)
    if index.size == 0:  # it may have any number of dims: torch does not check them then
        return jnp.zeros(ctx.shape, ctx.dtype)
    x, index = jnp.atleast_1d(x), jnp.atleast_1d(index)
    # numpy would broadcast the other dims; torch reads only the index's extent of them.
    region = tuple(slice(None) if d == axis else slice(index.shape[d]) for d in range(x.ndim))
    return jnp.take_along_axis(x[region], index, axis=axis, mode="clip").reshape(ctx.shape)


@lowering("aten.take.default", indices=index_rules.of_elements, traits=CHOSEN)
def _take(ctx: Context, x: jax.Array, index: jax.Array) -> jax.Array:
    return x.reshape(-1).at[index].get(mode="clip")


@lowering("aten.nonzero_static.default")
def _nonzero_static(ctx: Context, x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    if x.size == 0 or x.ndim == 0:  # numpy fills the positions in an empty array with zeros
        return jnp.full(ctx.shape, fill_value, ctx.dtype)
    return (
        jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=-1)
        .astype(ctx.dtype)
        .reshape(ctx.shape)
    )


@lowering(
    "aten.embedding.default",
    indices=index_rules.of_rows("indices", "weight"),
    traits=Traits(Elements.CHOSEN, parts=Parts.DIMS, rows=Rows.READ),
)
def _embedding(
    ctx: Context,
    weight: jax.Array,
    indices: jax.Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    table = ctx.layout(TableLayout)
    if table is not None:
        return look_up(weight, indices, table, platform=ctx.platform)
    return jnp.take(weight, indices, axis=0, mode="clip")


@lowering(
    "aten.embedding_dense_backward.default",
    traits=Traits(parts=Parts.SUM, rows=Rows.WRITTEN, is_product=True),
)
def _embedding_dense_backward(
    ctx: Context,
    grad_output: jax.Array,
    indices: jax.Array,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> jax.Array:
    # The dims of the indices are not merged: no sharding describes the merge of two split dims.
    rows, grad = indices, grad_output.astype(opmath(grad_output.dtype))
    if padding_idx >= 0:
        # The row past the end does not exist: the scatter drops writes to it.
        rows = jnp.where(rows == padding_idx, num_weights, rows)
    if scale_grad_by_freq:
        counts = (
            jnp.zeros(num_weights, grad.dtype)
            .at[rows]
            .add(1, mode="drop", wrap_negative_indices=False)
        )
        grad = grad / jnp.take(counts, rows, mode="clip")[..., None]
    total = (
        jnp.zeros(ctx.shape, grad.dtype)
        .at[rows]
        .add(grad, mode="drop", wrap_negative_indices=False)
    )
    return as_array(total, ctx.dtype)
