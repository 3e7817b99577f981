"""Collectives of a manual region: each device's own block in, combined over axes of the mesh, each device's own result out.

They are operations of our own, as torch's name a process group and ours the axes of a mesh. A kernel runs inside `jax.shard_map`, where the axes are
bound; outside of a manual region there is nothing to combine, and jax's error says that the axis is unbound.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from spmd_core.ops.registry import Context, lowering

# The size is that of the axes together: shapes follow from it before any mesh is bound.
_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("all_reduce(Tensor x, str[] axes, str op) -> Tensor")
_library.define("all_gather(Tensor x, str[] axes, int size, int dim) -> Tensor")
_library.define("reduce_scatter(Tensor x, str[] axes, int size, int dim) -> Tensor")
_library.define(
    "all_to_all(Tensor x, str[] axes, int size, int split_dim, int concat_dim) -> Tensor"
)
_library.define("collective_permute(Tensor x, str axis, int[] sources, int[] targets) -> Tensor")


def _resized(x: torch.Tensor, changes: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """A meta tensor with (dim, times, divided by) changed."""
    shape = list(x.shape)
    for dim, times, parts in changes:
        shape[dim] = shape[dim] * times // parts
    return x.new_empty(shape)


_library.impl("all_reduce", lambda x, axes, op: x.new_empty(x.shape), "Meta")
_library.impl("all_gather", lambda x, axes, size, dim: _resized(x, [(dim, size, 1)]), "Meta")
_library.impl("reduce_scatter", lambda x, axes, size, dim: _resized(x, [(dim, 1, size)]), "Meta")
_library.impl(
    "all_to_all",
    lambda x, axes, size, split, concat: _resized(x, [(split, 1, size), (concat, size, 1)]),
    "Meta",
)
_library.impl("collective_permute", lambda x, axis, sources, targets: x.new_empty(x.shape), "Meta")

_REDUCTIONS = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin}


def _alone(axes: Sequence[str]) -> bool:
    """Whether there is one device along the axes: then nothing is sent, and XLA's partitioner refuses a collective beside other axes."""
    return lax.axis_size(tuple(axes)) == 1


@lowering("spmd.all_reduce.default")
def _all_reduce(ctx: Context, x: Any, axes: Sequence[str], op: str) -> jax.Array:
    return x if _alone(axes) else _REDUCTIONS[op](x, tuple(axes)).astype(ctx.dtype)


@lowering("spmd.all_gather.default")
def _all_gather(ctx: Context, x: Any, axes: Sequence[str], size: int, dim: int) -> jax.Array:
    return x if _alone(axes) else lax.all_gather(x, tuple(axes), axis=dim, tiled=True)


@lowering("spmd.reduce_scatter.default")
def _reduce_scatter(ctx: Context, x: Any, axes: Sequence[str], size: int, dim: int) -> jax.Array:
    return (
        x if _alone(axes) else lax.psum_scatter(x, tuple(axes), scatter_dimension=dim, tiled=True)
    )


@lowering("spmd.all_to_all.default")
def _all_to_all(
    ctx: Context, x: Any, axes: Sequence[str], size: int, split_dim: int, concat_dim: int
) -> jax.Array:
    return (
        x
        if _alone(axes)
        else lax.all_to_all(
            x, tuple(axes), split_axis=split_dim, concat_axis=concat_dim, tiled=True
        )
    )


@lowering("spmd.collective_permute.default")
def _collective_permute(
    ctx: Context, x: Any, axis: str, sources: Sequence[int], targets: Sequence[int]
) -> jax.Array:
    if _alone([axis]):
        return x if sources else jnp.zeros_like(x)
    return lax.ppermute(x, axis, list(zip(sources, targets)))
