"""LDL^T and LDL^H factors of indefinite matrices and their solutions, by Bunch-Kaufman pivoting.

XLA has no such factorization. Bunch and Kaufman, "Some stable methods for calculating inertia and
solving symmetric linear systems", Math. Comp. 31 (1977), algorithm A.

The packing is LAPACK's (xSYTRF and xHETRF, lower): D on the diagonal, in blocks of size 1 and 2,
and L below it; row exchanges are not applied to earlier columns of L. Pivots count from 1. A pivot
p > 0 at k means that rows k and p were exchanged. The two pivots of a block of size 2 are both -p,
and rows k + 1 and p were exchanged. The steps, updates of rank 1 or 2, are a loop in the program,
so that the program does not grow with the matrix.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.registry import Context, lowering

_THRESHOLD = (1 + math.sqrt(17)) / 8  # the value that minimizes the bound on element growth


def _magnitude(x: jax.Array) -> jax.Array:
    """LAPACK's magnitude: the absolute value; for complex numbers the sum of both parts'."""
    return jnp.abs(jnp.real(x)) + jnp.abs(jnp.imag(x)) if jnp.iscomplexobj(x) else jnp.abs(x)


def _exchanged(rows: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """The permutation that exchanges rows i and j."""
    return jnp.where(rows == i, j, jnp.where(rows == j, i, rows))


def _inverse_of_block(
    d11: jax.Array, d21: jax.Array, d12: jax.Array, d22: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The inverse of a block of size 2.

    It is scaled by its off-diagonal element, the largest one by the choice of the pivot.
    """
    scale = _magnitude(d21).astype(d21.dtype)
    a, b, c, d = d11 / scale, d12 / scale, d21 / scale, d22 / scale
    determinant = (a * d - b * c) * scale
    return d / determinant, -b / determinant, -c / determinant, a / determinant


def _factor(a: jax.Array, *, hermitian: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The packed factors and the pivots of one matrix, and its first zero block.

    The zero block's position counts from 1; 0 means that there is none.
    """
    n = a.shape[-1]
    rows = jnp.arange(n)
    conj = jnp.conj if hermitian else lambda x: x
    low = jnp.tril(a, -1)
    diagonal = jnp.diagonal(a)
    # Both triangles of the unfactored part are kept, so that an exchange is one permutation of both
    # dims.
    a = low + conj(low.T) + jnp.diag(jnp.real(diagonal).astype(a.dtype) if hermitian else diagonal)

    def step(k: jax.Array, state: Any) -> Any:
        rest, packed, pivots, info, second = state
        column = jnp.where(rows > k, _magnitude(rest[:, k]), -1)
        largest = jnp.maximum(column.max(), 0)
        row = jnp.argmax(column)
        here = _magnitude(rest[k, k])
        across = jnp.where((rows >= k) & (rows != row), _magnitude(rest[row]), 0).max()
        zero = ~(jnp.maximum(here, largest) > 0) | jnp.isnan(here)
        stay = (
            zero
            | (here >= _THRESHOLD * largest)
            | (here * across >= _THRESHOLD * largest * largest)
        )
        single = stay | (_magnitude(rest[row, row]) >= _THRESHOLD * across)
        partner = jnp.where(stay, k, row).astype(np.int32)
        target = jnp.where(single, k, k + 1)
        order = _exchanged(rows, target, partner)
        moved = rest[order][:, order]
        after = jnp.minimum(k + 1, n - 1)

        x = jnp.where(rows > k, moved[:, k], 0)
        factor = jnp.where(zero, 0, x / jnp.where(zero, 1, moved[k, k]))
        rest_1 = moved - factor[:, None] * conj(x)[None, :]
        packed_1 = packed.at[:, k].set(
            jnp.where(rows == k, moved[k, k], jnp.where(zero, x, factor))
        )
        pivots_1 = pivots.at[k].set(partner + 1)

        x1, x2 = (jnp.where(rows > k + 1, moved[:, i], 0) for i in (k, after))
        i11, i12, i21, i22 = _inverse_of_block(
            moved[k, k], moved[after, k], moved[k, after], moved[after, after]
        )
        w1, w2 = x1 * i11 + x2 * i21, x1 * i12 + x2 * i22
        rest_2 = moved - w1[:, None] * conj(x1)[None, :] - w2[:, None] * conj(x2)[None, :]
        first = jnp.where(rows == k, moved[k, k], jnp.where(rows == after, moved[after, k], w1))
        packed_2 = (
            packed.at[:, k]
            .set(first)
            .at[:, after]
            .set(jnp.where(rows == after, moved[after, after], w2))
        )
        pivots_2 = pivots.at[k].set(-partner - 1).at[after].set(-partner - 1)

        chosen = [
            jnp.where(single, one, two)
            for one, two in ((rest_1, rest_2), (packed_1, packed_2), (pivots_1, pivots_2))
        ]
        new_info = jnp.where((info == 0) & zero, k.astype(np.int32) + 1, info)
        fresh = (*chosen, new_info, ~single)
        skipped = (rest, packed, pivots, info, jnp.zeros((), np.bool_))
        return tuple(jnp.where(second, old, new) for old, new in zip(skipped, fresh))

    start = (
        a,
        jnp.zeros_like(a),
        jnp.zeros(n, np.int32),
        jnp.zeros((), np.int32),
        jnp.zeros((), np.bool_),
    )
    _, packed, pivots, info, _ = lax.fori_loop(0, n, step, start)
    return packed, pivots, info


def _solve(packed: jax.Array, pivots: jax.Array, b: jax.Array, *, hermitian: bool) -> jax.Array:
    """The solution of one system: forward through L and D, then backward through L^T or L^H."""
    n = packed.shape[-1]
    rows = jnp.arange(n)
    conj = jnp.conj if hermitian else lambda x: x

    def forward(k: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        b, second = state
        pair = pivots[k] < 0
        after = jnp.minimum(k + 1, n - 1)
        b = jnp.where(
            second, b, b[_exchanged(rows, jnp.where(pair, after, k), jnp.abs(pivots[k]) - 1)]
        )
        l1 = jnp.where(rows > jnp.where(pair, after, k), packed[:, k], 0)
        l2 = jnp.where((rows > after) & pair, packed[:, after], 0)
        b1, b2 = b[k], b[after]
        reduced = b - l1[:, None] * b1 - l2[:, None] * b2
        d21 = jnp.where(pair, packed[after, k], 1)
        i11, i12, i21, i22 = _inverse_of_block(packed[k, k], d21, conj(d21), packed[after, after])
        done_1 = reduced.at[k].set(b1 / packed[k, k])
        done_2 = reduced.at[k].set(i11 * b1 + i12 * b2).at[after].set(i21 * b1 + i22 * b2)
        return jnp.where(second, b, jnp.where(pair, done_2, done_1)), pair & ~second

    def backward(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        b, done = state
        k = n - 1 - i
        pair = pivots[k] < 0
        before = jnp.maximum(k - 1, 0)
        l1, l2 = (jnp.where(rows > k, packed[:, c], 0) for c in (k, before))
        new = b.at[k].add(-conj(l1) @ b)
        new = jnp.where(pair, new.at[before].add(-conj(l2) @ b), new)
        new = new[_exchanged(rows, k, jnp.abs(pivots[k]) - 1)]
        return jnp.where(done, b, new), pair & ~done

    start = jnp.zeros((), np.bool_)
    b, _ = lax.fori_loop(0, n, forward, (b, start))
    b, _ = lax.fori_loop(0, n, backward, (b, start))
    return b


def _over_batch(function: Callable[..., Any], num_batch_dims: int) -> Callable[..., Any]:
    for _ in range(num_batch_dims):
        function = jax.vmap(function)
    return function


@lowering("aten.linalg_ldl_factor_ex.default")
def _ldl_factor_ex(
    ctx: Context, a: Any, *, hermitian: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if a.size == 0:
        return a, *(jnp.zeros(out.shape, np.int32) for out in ctx.outs[1:])
    hermitian = hermitian and jnp.iscomplexobj(a)
    return _over_batch(partial(_factor, hermitian=hermitian), a.ndim - 2)(a)


@lowering("aten.linalg_ldl_solve.default")
def _ldl_solve(
    ctx: Context, packed: Any, pivots: Any, b: Any, *, hermitian: bool = False
) -> jax.Array:
    if 0 in ctx.shape:
        return jnp.zeros(ctx.shape, ctx.dtype)
    batch = ctx.shape[:-2]
    packed = jnp.broadcast_to(packed, (*batch, *packed.shape[-2:]))
    pivots = jnp.broadcast_to(pivots, (*batch, pivots.shape[-1]))
    b = jnp.broadcast_to(b, ctx.shape)
    return _over_batch(
        partial(_solve, hermitian=hermitian and jnp.iscomplexobj(packed)), len(batch)
    )(packed, pivots, b)
