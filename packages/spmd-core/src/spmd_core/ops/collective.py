"""Collectives of a manual region: they combine the devices' blocks over axes of the mesh.

They are operations of the `spmd` library, because torch's collectives name a process group and
these name the axes of a mesh. They run inside `jax.shard_map`, which binds the axes. Outside of a
manual region there is nothing to combine, and jax's error says that the axis is unbound.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from spmd_core.ops.kernels.extremes import with_nan
from spmd_core.ops.registry import Context, lowering

# `size` is the number of devices along the axes: the meta kernels have no mesh to take it from.
_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("all_reduce(Tensor x, str[] axes, str op) -> Tensor")
_library.define("all_gather(Tensor x, str[] axes, int size, int dim) -> Tensor")
_library.define("reduce_scatter(Tensor x, str[] axes, int size, int dim) -> Tensor")
_library.define(
    "all_to_all(Tensor x, str[] axes, int size, int split_dim, int concat_dim) -> Tensor"
)
_library.define("collective_permute(Tensor x, str axis, int[] sources, int[] targets) -> Tensor")


def _resized(x: torch.Tensor, changes: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """A meta tensor with changed sizes; a change is (dim, multiply by, then divide by)."""
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


def _is_single_device(axes: Sequence[str]) -> bool:
    """Whether there is only one device along the axes, so that nothing has to be sent.

    XLA's partitioner refuses a collective over such axes where the mesh has other axes too.
    """
    return lax.axis_size(tuple(axes)) == 1


@lowering("spmd.all_reduce.default")
def _all_reduce(ctx: Context, x: Any, axes: Sequence[str], op: str) -> jax.Array:
    if _is_single_device(axes):
        return x
    reduce = partial(_REDUCTIONS[op], axis_name=tuple(axes))
    if op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1:
        return with_nan(reduce, x, is_max=op == "max")
    return reduce(x).astype(ctx.dtype)


@lowering("spmd.all_gather.default")
def _all_gather(ctx: Context, x: Any, axes: Sequence[str], size: int, dim: int) -> jax.Array:
    return x if _is_single_device(axes) else lax.all_gather(x, tuple(axes), axis=dim, tiled=True)


@lowering("spmd.reduce_scatter.default")
def _reduce_scatter(ctx: Context, x: Any, axes: Sequence[str], size: int, dim: int) -> jax.Array:
    return (
        x
        if _is_single_device(axes)
        else lax.psum_scatter(x, tuple(axes), scatter_dimension=dim, tiled=True)
    )


@lowering("spmd.all_to_all.default")
def _all_to_all(
    ctx: Context, x: Any, axes: Sequence[str], size: int, split_dim: int, concat_dim: int
) -> jax.Array:
    return (
        x
        if _is_single_device(axes)
        else lax.all_to_all(
            x, tuple(axes), split_axis=split_dim, concat_axis=concat_dim, tiled=True
        )
    )


@lowering("spmd.collective_permute.default")
def _collective_permute(
    ctx: Context, x: Any, axis: str, sources: Sequence[int], targets: Sequence[int]
) -> jax.Array:
    if _is_single_device([axis]):
        return x if sources else jnp.zeros_like(x)
    return lax.ppermute(x, axis, list(zip(sources, targets)))
