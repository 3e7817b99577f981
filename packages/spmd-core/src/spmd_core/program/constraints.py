"""Sharding constraints inside a program, also of dims that are split unevenly."""

from collections.abc import Sequence
from itertools import zip_longest

import jax
import jax.numpy as jnp

from spmd_core.program import shardy_constraints
from spmd_core.runtime.jax_sharding import jax_axis_names, jax_mesh
from spmd_core.sharding.sharding import Sharding


def constrain(x: jax.Array, sharding: Sharding, named: jax.sharding.NamedSharding) -> jax.Array:
    """A sharding constraint that also holds for dims that are split unevenly.

    jax silently ignores the constraint on such dims, so `x` is padded, constrained, and sliced back
    to its shape. A dim of one element is left out: there is nothing to split, and the partitioner
    crashes on some reshapes of such dims.
    """
    if 1 in x.shape:
        axes = [None if n == 1 else axis for n, axis in zip_longest(x.shape, named.spec)]
        named = jax.sharding.NamedSharding(named.mesh, jax.sharding.PartitionSpec(*axes))
    open_dims = tuple(dim for dim in sharding.open_dims if x.shape[dim] > 1)
    padded = tuple(1 if n == 1 else p for n, p in zip(x.shape, sharding.padded_shape(x.shape)))
    if padded == x.shape:
        return _constrained(x, named, open_dims, sharding.priority)
    wide = jnp.pad(x, [(0, p - n) for n, p in zip(x.shape, padded)])
    wide = _constrained(wide, named, open_dims, sharding.priority)
    return jax.lax.slice(wide, (0,) * x.ndim, x.shape)


def _constrained(
    x: jax.Array, named: jax.sharding.NamedSharding, open_dims: tuple[int, ...], priority: int
) -> jax.Array:
    if (open_dims or priority) and named.mesh.size > 1:
        return shardy_constraints.constrain(x, named, open_dims, priority)
    return jax.lax.with_sharding_constraint(x, named)


def constrain_along(x: jax.Array, sharding: Sharding, along: Sequence[int]) -> jax.Array:
    """A sharding constraint along some axes of a mesh; the partitioner chooses the others.

    It is written as a manual region over these axes that does nothing, because jax's constraints
    fix all axes.
    """
    names = jax_axis_names(sharding.mesh)
    dims = (() if n == 1 else axes for n, axes in zip(x.shape, sharding.dims))
    spec = jax.sharding.PartitionSpec(*(tuple(names[a] for a in axes) or None for axes in dims))
    mapped = jax.shard_map(
        lambda block: block,
        mesh=jax_mesh(sharding.mesh),
        in_specs=spec,
        out_specs=spec,
        axis_names={names[axis] for axis in along},
        check_vma=False,
    )
    padded = tuple(1 if n == 1 else p for n, p in zip(x.shape, sharding.padded_shape(x.shape)))
    if padded == x.shape:
        return mapped(x)
    wide = jnp.pad(x, [(0, p - n) for n, p in zip(x.shape, padded)])
    return jax.lax.slice(mapped(wide), (0,) * x.ndim, x.shape)


def replicate_last_block_dims(x: jax.Array, num: int) -> jax.Array:
    """Inside a manual region: a block whose last `num` dims no other axis splits."""
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = jax.sharding.PartitionSpec(*([free] * (x.ndim - num)), *([None] * num))
    return jax.lax.with_sharding_constraint(x, spec)
