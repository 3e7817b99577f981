"""Writing at positions given by tensors: scatter, index_put, index_add and their kin, masked_scatter and histograms.

An index outside its dim, or a source too short for its mask, is an error in eager torch on the CPU. A device cannot raise from inside a
program, so here such a write is dropped, and no write ever leaves its array. Where two writes meet in one element and are not
combined, torch leaves open which one stays, and so does XLA.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.precision import opmath
from spmd_core.ops.registry import Context, Number, as_array, lowering

# (base, values, method) -> base with the values written; the method is that of jax's `.at[...]`: set, add, multiply, max or min.
Apply = Callable[[jax.Array, jax.Array, str], jax.Array]


def _axis(dim: int, ndim: int) -> int:
    """The dim counted from the front; a 0-dim tensor has, in torch, the dims 0 and -1."""
    return dim % max(ndim, 1)


def _write(base: jax.Array, key: Any, values: jax.Array, method: str, *, wrap: bool = False) -> jax.Array:
    """Sums and products of 16-bit floats are kept in float32 until the end, and those of bools in int32: a bool sum is an `or`."""
    wide = base.dtype
    if method in ("add", "multiply"):
        wide = np.dtype(np.int32) if base.dtype == np.bool_ else opmath(base.dtype)
    target = base.astype(wide).at[key]
    new = getattr(target, method)(values.astype(wide), mode="drop", wrap_negative_indices=wrap)
    return new != 0 if base.dtype == np.bool_ and wide != np.bool_ else new.astype(base.dtype)


def _reduce(x: jax.Array, source: jax.Array, apply: Apply, reduce: str, *, include_self: bool) -> jax.Array:
    """Combines the source's elements, and x's own where `include_self`, at each element written; the others keep x."""
    method = {"sum": "add", "prod": "multiply", "mean": "add", "amax": "max", "amin": "min"}[reduce]
    base = x
    if not include_self:
        lowest, highest = (-np.inf, np.inf) if jnp.issubdtype(x.dtype, np.inexact) else _limits(x.dtype)
        identity = {"sum": 0, "prod": 1, "mean": 0, "amax": lowest, "amin": highest}[reduce]
        base = apply(x, jnp.full(source.shape, identity, x.dtype), "set")
    if reduce != "mean":
        return apply(base, source, method)
    wide = opmath(x.dtype)
    total = apply(base.astype(wide), source.astype(wide), "add")
    counts = apply(jnp.full(x.shape, int(include_self), np.int32), jnp.ones(source.shape, np.int32), "add")
    counts = jnp.maximum(counts, 1).astype(wide)
    return (total / counts if jnp.issubdtype(wide, np.inexact) else jnp.floor_divide(total, counts)).astype(x.dtype)


def _limits(dtype: np.dtype) -> tuple[Any, Any]:
    return (False, True) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)


# Along one dim, with an index for every element: scatter.


def _scattering(dim: int, index: jax.Array) -> Apply:
    """Writes values[..., i, ...] to base[..., index[..., i, ...], ...]; the other dims count only as far as the index reaches."""
    index = jnp.atleast_1d(index)
    axis = _axis(dim, index.ndim)

    def apply(base: jax.Array, values: jax.Array, method: str) -> jax.Array:
        whole, values = jnp.atleast_1d(base), jnp.atleast_1d(values)
        if index.size == 0:
            return base
        region = lax.slice(whole, [0] * whole.ndim, [n if d == axis else index.shape[d] for d, n in enumerate(whole.shape)])
        values = lax.slice(values, [0] * values.ndim, index.shape)

        def write(base: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
            return _write(base, index, values, method)

        # Mapped over the other dims, they are batch dims of one scatter and stay sharded; a table of coordinates would gather them.
        for d in reversed(range(index.ndim)):
            if d != axis:
                write = jax.vmap(write, in_axes=(d if d < axis else 1,) * 3, out_axes=d if d < axis else 1)
        raise AssertionError

    return apply
