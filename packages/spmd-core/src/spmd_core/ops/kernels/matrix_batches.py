"""Runs LAPACK on batches of matrices; on CPUs, splits large batches to avoid a deadlock.

jaxlib 0.10 and 0.11.0 distribute the matrices of a large batch to the threads of XLA's pool, from a
thread of that pool, which then waits. If there are as many such calls at once as the pool has
threads, all wait forever. The calling thread computes a smaller batch by itself.
`docs/explanation/xla_errors.md` has the error.
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
# jaxlib distributes a batch if it estimates at least this many operations.
_SMALLEST_SHARED = 200_000
# Operations for a matrix, as a multiple of its largest size's cube: more than jaxlib's estimate for
# any factorization or solve of real or complex numbers.
_MOST_PER_CUBE = 100

_Results = TypeVar("_Results")


def on_matrices(ctx: Context, function: Callable[..., _Results], *arrays: jax.Array) -> _Results:
    """`function(*arrays)`, for arrays and results with a matrix or vector for each batch element.

    Args:
        ctx: the operation's context.
        function: treats the elements of the batch independently. All results have the batch's dims.
        arrays: the first is of matrices; all have the batch's dims, and none is empty.
    """
    batch = arrays[0].shape[:-2]
    count = math.prod(batch)
    largest = max(n for x in arrays for n in x.shape[len(batch) :])
    work = _MOST_PER_CUBE * largest**3
    if ctx.platform != "cpu" or not _WAITS or count < 2 or count * work < _SMALLEST_SHARED:
        return function(*arrays)
    together = max(1, (_SMALLEST_SHARED - 1) // work)
    # A batch that is split over devices stays split: each part has some matrices of every group.
    groups = ctx.num_devices if count % ctx.num_devices == 0 and together >= ctx.num_devices else 1
    each, in_group = together // groups, count // groups
    num_parts = -(-in_group // each)

    def parts(x: jax.Array) -> jax.Array:
        """Every `num_parts`-th matrix of each group, padded with the group's last matrix."""
        matrix = x.shape[len(batch) :]
        padding = [(0, 0), (0, each * num_parts - in_group)] + [(0, 0)] * len(matrix)
        filled = jnp.pad(x.reshape(groups, in_group, *matrix), padding, mode="edge")
        return jnp.moveaxis(filled.reshape(groups, each, num_parts, *matrix), 2, 0)

    def joined(x: jax.Array) -> jax.Array:
        matrix = x.shape[3:]
        filled = jnp.moveaxis(x, 0, 2).reshape(groups, each * num_parts, *matrix)
        return filled[:, :in_group].reshape(*batch, *matrix)

    results = lax.map(lambda part: function(*part), [parts(x) for x in arrays])
    return jax.tree.map(joined, results)
