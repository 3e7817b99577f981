"""Embedding bags: sums, means and maxima of a weight's rows over groups of indices; and renorm.

`offsets` holds the position at which each bag begins: one binary search gives the bag of each
index, and a bag's reduction is a scatter into (bags, width). An index outside the weight reads the
nearest row, and adds nothing to a gradient, as in `index`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from spmd_core.ops.kernels import index_rules
from spmd_core.ops.kernels.blocks import apart
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.registry import Context, lowering

# torch's numbers for the `mode` argument
_SUM, _MEAN, _MAX = 0, 1, 2
_INT64 = np.dtype(np.int64)


def _bag_meta(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[torch.Tensor, ...]:
    """The four results' shapes, the same in every mode but for the last one's.

    torch's meta kernel gives the shapes of CUDA's kernel, some of which are empty in some modes.
    """
    num_bags = offsets.shape[0] - (1 if include_last_offset else 0)
    out = weight.new_empty(num_bags, weight.shape[1])
    if indices.dim() != 1 or offsets.dim() != 1 or weight.dim() != 2:
        raise RuntimeError(
            "embedding_bag takes a weight with 2 dims, indices with 1 and offsets with 1; "
            f"got {tuple(weight.shape)}, {tuple(indices.shape)} and {tuple(offsets.shape)}. "
            "Flatten the indices, and give the offset of each bag."
        )
    winners = torch.empty(
        out.shape if mode == _MAX else (num_bags,), dtype=indices.dtype, device="meta"
    )
    return out, torch.empty_like(indices), indices.new_empty(num_bags), winners


def _bags(offsets: jax.Array, num_indices: int, *, include_last_offset: bool) -> jax.Array:
    """The bag of each index.

    Indices before the first and after the last offset get a bag that does not exist.
    """
    position = jnp.arange(num_indices, dtype=offsets.dtype)
    bag = jnp.searchsorted(offsets, position, side="right").astype(_INT64) - 1
    num_bags = offsets.shape[0] - (1 if include_last_offset else 0)
    return jnp.where(bag < 0, num_bags, bag)


@lowering(
    "aten._embedding_bag.default",
    "aten._embedding_bag_forward_only.default",
    meta=_bag_meta,
    indices=index_rules.of_bags,
)
def _embedding_bag(
    ctx: Context,
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[jax.Array, ...]:
    num_bags, wide = ctx.shape[0], opmath(weight.dtype)
    bag = _bags(offsets, indices.shape[0], include_last_offset=include_last_offset)
    if padding_idx >= 0:
        bag = jnp.where(indices == padding_idx, num_bags, bag)
    rows = jnp.take(weight, indices, axis=0, mode="clip").astype(wide)
    sizes = jnp.zeros(num_bags, indices.dtype).at[bag].add(1, mode="drop")
    winners = jnp.zeros(ctx.outs[3].shape, indices.dtype)
    if mode == _MAX:
        best = jnp.full(ctx.shape, -jnp.inf, wide).at[bag].max(rows, mode="drop")
        best = jnp.where(sizes[:, None] > 0, best, jnp.zeros((), wide))
        # Of equal values the first wins.
        wins = rows == jnp.take(best, bag, axis=0, mode="clip")
        position = jnp.where(wins, jnp.arange(indices.shape[0])[:, None], indices.shape[0])
        first = (
            jnp.full(ctx.shape, indices.shape[0], position.dtype).at[bag].min(position, mode="drop")
        )
        if indices.shape[0]:
            winners = jnp.where(sizes[:, None] > 0, jnp.take(indices, first, mode="clip"), winners)
        return best.astype(ctx.dtype), bag.astype(indices.dtype), sizes, winners
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.astype(wide)[:, None]
    total = jnp.zeros(ctx.shape, wide).at[bag].add(rows, mode="drop")
    if mode == _MEAN:
        total = total / jnp.maximum(sizes, 1).astype(wide)[:, None]
    return total.astype(ctx.dtype), bag.astype(indices.dtype), sizes, winners


def _bag_backward_meta(
    grad: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *rest: Any
) -> torch.Tensor:
    return grad.new_empty(rest[3], grad.shape[1])


@lowering("aten._embedding_bag_backward.default", meta=_bag_backward_meta)
def _embedding_bag_backward(
    ctx: Context,
    grad: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any = None,
    padding_idx: int = -1,
) -> jax.Array:
    """The weight's gradient; in `offset2bag`, the forward's result, padding has no bag."""
    grad = grad.astype(opmath(grad.dtype))
    zeros = jnp.zeros(ctx.shape, grad.dtype)
    if mode == _MAX:
        row = jnp.where(bag_size[:, None] > 0, maximum_indices, num_weights)
        return zeros.at[row, jnp.arange(grad.shape[1])].add(grad, mode="drop").astype(ctx.dtype)
    if mode == _MEAN:
        grad = grad / jnp.maximum(bag_size, 1).astype(grad.dtype)[:, None]
    rows = grad.at[offset2bag].get(mode="fill", fill_value=0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.astype(rows.dtype)[:, None]
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, rows.dtype).at[indices].add(1, mode="drop")
        rows = rows / jnp.take(counts, indices, mode="clip")[:, None]
    return zeros.at[indices].add(rows, mode="drop").astype(ctx.dtype)


@lowering(
    "aten._embedding_bag_per_sample_weights_backward.default",
    meta=lambda grad, weight, indices, *rest: grad.new_empty(indices.shape[0]),
)
def _embedding_bag_per_sample_weights_backward(
    ctx: Context,
    grad: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    mode: int,
    padding_idx: int = -1,
) -> jax.Array:
    wide = opmath(grad.dtype)
    rows = jnp.take(weight, indices, axis=0, mode="clip").astype(wide)
    return jnp.sum(
        grad.astype(wide).at[offset2bag].get(mode="fill", fill_value=0) * rows, axis=1
    ).astype(ctx.dtype)


@lowering("aten.embedding_renorm.default")
def _embedding_renorm(
    ctx: Context, weight: Any, indices: Any, max_norm: float, norm_type: float
) -> jax.Array:
    """The weight with the indexed rows scaled so that none has a norm above `max_norm`."""
    index = indices.reshape(-1)
    rows = jnp.take(weight, index, axis=0, mode="clip").astype(opmath(weight.dtype))
    norms = jnp.linalg.norm(rows, ord=norm_type, axis=1, keepdims=True)
    scaled = jnp.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows)
    # An index that occurs twice writes the same values twice.
    return weight.at[index].set(apart(scaled.astype(ctx.dtype)), mode="drop")
