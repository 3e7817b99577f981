"""Runs LAPACK on batches of matrices, on CPUs a part of a large batch at a time.

jaxlib 0.10 and 0.11.0 deal the matrices of a large batch out to the threads of XLA's pool, from a
thread of that pool, which then waits. As many such calls at once as the pool has threads wait for
each other without end. A smaller batch is computed by the thread that asks. `docs/xla_errors.md`
has the error.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import jaxlib
from jax import lax

from spmd_core.ops.registry import Context

_WAITS = jaxlib.version.__version_info__ < (0, 11, 1)
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
    # A batch that is split over the devices stays so: each part has some of every group.
    groups = ctx.num_devices if count % ctx.num_devices == 0 and together >= ctx.num_devices else 1
    each, in_group = together // groups, count // groups
    num_parts = -(-in_group // each)

    def parts(x: jax.Array) -> jax.Array:
        """Of each group every `num_parts`-th matrix; its last matrix fills up the last parts."""
        matrix = x.shape[len(batch) :]
        padding = [(0, 0), (0, each * num_parts - in_group)] + [(0, 0)] * len(matrix)
        filled = jnp.pad(x.reshape(groups, in_group, *matrix), padding, mode="edge")
        return jnp.moveaxis(filled.reshape(groups, each, num_parts, *matrix), 2, 0)

    def whole(x: jax.Array) -> jax.Array:
        matrix = x.shape[3:]
        filled = jnp.moveaxis(x, 0, 2).reshape(groups, each * num_parts, *matrix)
        return filled[:, :in_group].reshape(*batch, *matrix)

    results = lax.map(lambda part: function(*part), [parts(x) for x in arrays])
    return jax.tree.map(whole, results)
