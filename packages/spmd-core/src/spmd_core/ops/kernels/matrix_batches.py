"""Runs LAPACK on batches of matrices, on CPUs a part of a large batch at a time.

jaxlib 0.10 deals the matrices of a large batch out to the threads of XLA's pool, from a thread of
that pool, which then waits. As many such calls at once as the pool has threads wait for each other
without end. A smaller batch is computed by the thread that asks. `docs/xla_errors.md` has the
error.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import jaxlib
from jax import lax

from spmd_core.ops.registry import Context

_WAITS = tuple(int(part) for part in jaxlib.__version__.split(".")[:2]) < (0, 11)
# jaxlib deals a batch out from this estimate of its operations on.
_SMALLEST_SHARED = 200_000
# Operations for a matrix, as a multiple of its largest size's cube: more than jaxlib's estimate for
# any factorization or solve of real or complex numbers.
_MOST_PER_CUBE = 100

_Results = TypeVar("_Results")


def on_matrices(ctx: Context, function: Callable[..., _Results], *arrays: jax.Array) -> _Results:
    """`function(*arrays)`, whose arrays and results have one matrix or vector for each of a batch.

    Args:
        ctx: of the operation.
        function: computes each matrix of the batch for itself. All results have the batch's dims.
        arrays: matrices first; all have the batch's dims, and none is empty.
    """
    batch = arrays[0].shape[:-2]
    count = math.prod(batch)
    largest = max(n for x in arrays for n in x.shape[len(batch) :])
    work = _MOST_PER_CUBE * largest**3
    if ctx.platform != "cpu" or not _WAITS or count < 2 or count * work < _SMALLEST_SHARED:
        return function(*arrays)
    together = max(1, (_SMALLEST_SHARED - 1) // work)
    if together > ctx.num_devices:  # a batch that is split over the devices stays so
        together -= together % ctx.num_devices
    num_parts = -(-count // together)

    def parts(x: jax.Array) -> jax.Array:
        """Each part has every `num_parts`-th matrix; the last matrix fills up the last ones."""
        flat = x.reshape(count, *x.shape[len(batch) :])
        padding = [(0, together * num_parts - count)] + [(0, 0)] * (flat.ndim - 1)
        filled = jnp.pad(flat, padding, mode="edge")
        return jnp.moveaxis(filled.reshape(together, num_parts, *flat.shape[1:]), 1, 0)

    def whole(x: jax.Array) -> jax.Array:
        flat = jnp.moveaxis(x, 0, 1).reshape(together * num_parts, *x.shape[2:])
        return flat[:count].reshape(*batch, *x.shape[2:])

    results = lax.map(lambda part: function(*part), [parts(x) for x in arrays])
    return jax.tree.map(whole, results)
