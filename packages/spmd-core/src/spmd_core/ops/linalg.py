"""Cholesky and LU factors, linear systems, and functions of a matrix, for batches of matrices.

`info` follows LAPACK: 0, or 1 + the position of the first pivot that the factorization cannot
divide by. Pivots are int32 and count from 1.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels import singular_values
from spmd_core.ops.kernels.booleans import cast
from spmd_core.ops.kernels.matrix_batches import on_matrices
from spmd_core.ops.kernels.precision import matmul_precision, opmath
from spmd_core.ops.registry import Context, lowering


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.matrix_transpose(x))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=matmul_precision(a.dtype))


def _diagonal(x: jax.Array) -> jax.Array:
    return jnp.diagonal(x, axis1=-2, axis2=-1)


def _first_failure(bad: jax.Array) -> jax.Array:
    """1 + the position of the first True in the last dim, 0 if there is none; int32."""
    if bad.shape[-1] == 0:
        return jnp.zeros(bad.shape[:-1], np.int32)
    return jnp.where(bad.any(-1), jnp.argmax(bad, -1) + 1, 0).astype(np.int32)


def _with_batch(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(x, (*batch, *x.shape[-2:]))


def _solve_triangular(
    ctx: Context,
    a: jax.Array,
    b: jax.Array,
    *,
    lower: bool,
    left: bool = True,
    transpose: bool = False,
    adjoint: bool = False,
    unit: bool = False,
) -> jax.Array:
    """x of `op(a) x = b`, or of `x op(a) = b` where not `left`.

    Only the triangle of `a` is read. Batches broadcast.
    """
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = _with_batch(a, batch), _with_batch(b, batch)
    if b.size == 0:
        return b
    solve = partial(
        lax.linalg.triangular_solve,
        left_side=left,
        lower=lower,
        transpose_a=transpose or adjoint,
        conjugate_a=adjoint,
        unit_diagonal=unit,
    )
    return on_matrices(ctx, solve, a, b)


# ---- Cholesky ------------------------------------------------------------------------------------


def _cholesky_by_columns(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lower factor column by column, and the order of the first minor that is not positive.

    The factorization stops at that leading minor, as LAPACK's does. The order is 0 without one.
    """
    rows = jnp.arange(a.shape[-1])

    def step(k: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, info = state
        column = lax.dynamic_index_in_dim(a, k, axis=-1, keepdims=False)
        pivot = jnp.real(lax.dynamic_index_in_dim(column, k, axis=-1))
        good = pivot > 0  # not for nan
        info = jnp.where((info == 0) & ~good[..., 0], k.astype(np.int32) + 1, info)
        column = jnp.where(
            rows >= k, column / jnp.sqrt(jnp.where(good, pivot, 1)).astype(a.dtype), 0
        )
        rest = jnp.where(rows > k, column, 0)
        reduced = a - rest[..., :, None] * jnp.conj(rest)[..., None, :]
        reduced = jnp.where(rows == k, column[..., None], reduced)
        return jnp.where((info == 0)[..., None, None], reduced, a), info

    a, info = lax.fori_loop(0, a.shape[-1], step, (a, jnp.zeros(a.shape[:-2], np.int32)))
    return jnp.tril(a), info


@lowering("aten.linalg_cholesky_ex.default")
def _cholesky_ex(
    ctx: Context, a: Any, *, upper: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    if a.size == 0:
        return a, jnp.zeros(a.shape[:-2], np.int32)
    a = _adjoint(a) if upper else a
    factor = jnp.tril(on_matrices(ctx, partial(lax.linalg.cholesky, symmetrize_input=False), a))
    failed = jnp.isnan(jnp.real(_diagonal(factor))).any(-1)

    # XLA's kernel only reports that it failed. The position is computed by columns, and only for
    # batches in which a matrix failed.
    def locate() -> tuple[jax.Array, jax.Array]:
        slow, info = _cholesky_by_columns(a)
        return jnp.where(failed[..., None, None], slow, factor), info

    factor, info = lax.cond(
        failed.any(), locate, lambda: (factor, jnp.zeros(failed.shape, np.int32))
    )
    return (_adjoint(factor) if upper else factor), info


@lowering("aten._cholesky_solve_helper.default")
def _cholesky_solve(ctx: Context, b: Any, factor: Any, upper: bool) -> jax.Array:
    half = _solve_triangular(ctx, factor, b, lower=not upper, adjoint=upper)
    return _solve_triangular(ctx, factor, half, lower=not upper, adjoint=not upper)


@lowering("aten.cholesky_inverse.default")
def _cholesky_inverse(ctx: Context, factor: Any, upper: bool = False) -> jax.Array:
    half = _solve_triangular(
        ctx, factor, jnp.eye(factor.shape[-1], dtype=factor.dtype), lower=not upper
    )
    return _product(half, _adjoint(half)) if upper else _product(_adjoint(half), half)


# ---- LU ------------------------------------------------------------------------------------------


def _lu_without_pivots(a: jax.Array) -> jax.Array:
    rows, columns = jnp.arange(a.shape[-2]), jnp.arange(a.shape[-1])

    def step(k: jax.Array, a: jax.Array) -> jax.Array:
        pivot = lax.dynamic_index_in_dim(
            lax.dynamic_index_in_dim(a, k, axis=-2, keepdims=False), k, axis=-1
        )
        column = lax.dynamic_index_in_dim(a, k, axis=-1, keepdims=False)
        factor = jnp.where(rows > k, column / jnp.where(pivot == 0, 1, pivot), 0)
        row = jnp.where(columns > k, lax.dynamic_index_in_dim(a, k, axis=-2, keepdims=False), 0)
        a = a - factor[..., :, None] * row[..., None, :]
        return jnp.where((rows[:, None] > k) & (columns == k), factor[..., None], a)

    return lax.fori_loop(0, min(a.shape[-2:]), step, a)


def _lu(
    ctx: Context, a: jax.Array, *, pivot: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The packed factors, the exchanged rows (from 0), and the permutation: `a[perm] = L U`."""
    batch, (m, n) = a.shape[:-2], a.shape[-2:]
    if a.size and pivot:
        return on_matrices(ctx, lax.linalg.lu, a)
    packed = a if a.size == 0 else _lu_without_pivots(a)
    exchanges = jnp.broadcast_to(jnp.arange(min(m, n), dtype=np.int32), (*batch, min(m, n)))
    return packed, exchanges, jnp.broadcast_to(jnp.arange(m, dtype=np.int32), (*batch, m))


def _unpacked(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """L `(..., m, k)` and U `(..., k, n)`, where k is the smaller of m and n."""
    k = min(packed.shape[-2:])
    return jnp.tril(packed[..., :k], -1) + jnp.eye(
        packed.shape[-2], k, dtype=packed.dtype
    ), jnp.triu(packed[..., :k, :])


def _permutation_matrix(permutation: jax.Array, dtype: np.dtype) -> jax.Array:
    """P of `a = P L U`: the 1 of column i is in row permutation[i]."""
    rows = jnp.arange(permutation.shape[-1])
    return cast(rows[:, None] == permutation[..., None, :], dtype)


def _permutation_of(pivots: jax.Array, size: int) -> jax.Array:
    """The permutation that torch's pivots, which count from 1, stand for."""
    if 0 in pivots.shape:
        return jnp.broadcast_to(jnp.arange(size, dtype=np.int32), (*pivots.shape[:-1], size))
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, size)


def _lu_solve(
    ctx: Context,
    packed: jax.Array,
    permutation: jax.Array,
    b: jax.Array,
    *,
    left: bool = True,
    adjoint: bool = False,
) -> jax.Array:
    """x of `op(a) x = b`, or of `x op(a) = b` where not `left`, from `a[permutation] = L U`."""
    if not left:
        return _adjoint(_lu_solve(ctx, packed, permutation, _adjoint(b), adjoint=not adjoint))
    batch = jnp.broadcast_shapes(packed.shape[:-2], b.shape[:-2])
    b = _with_batch(b, batch)
    permutation = jnp.broadcast_to(permutation, (*batch, permutation.shape[-1]))
    if b.size == 0:
        return b
    if adjoint:
        half = _solve_triangular(ctx, packed, b, lower=False, adjoint=True)
        half = _solve_triangular(ctx, packed, half, lower=True, adjoint=True, unit=True)
        return jnp.take_along_axis(half, jnp.argsort(permutation, -1)[..., None], axis=-2)
    half = _solve_triangular(
        ctx, packed, jnp.take_along_axis(b, permutation[..., None], axis=-2), lower=True, unit=True
    )
    return _solve_triangular(ctx, packed, half, lower=False)


@lowering("aten.linalg_lu_factor_ex.default")
def _lu_factor_ex(
    ctx: Context, a: Any, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    packed, exchanges, _ = _lu(ctx, a, pivot=pivot)
    return packed, exchanges.astype(np.int32) + 1, _first_failure(_diagonal(packed) == 0)


@lowering("aten.linalg_lu.default")
def _linalg_lu(
    ctx: Context, a: Any, *, pivot: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    packed, _, permutation = _lu(ctx, a, pivot=pivot)
    p = (
        _permutation_matrix(permutation, a.dtype)
        if pivot
        else jnp.zeros(ctx.outs[0].shape, a.dtype)
    )
    return p, *_unpacked(packed)


@lowering("aten.lu_unpack.default")
def _lu_unpack(
    ctx: Context, packed: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    nothing = jnp.zeros((0,), packed.dtype)
    low, up = _unpacked(packed) if unpack_data else (nothing, nothing)
    p = (
        _permutation_matrix(_permutation_of(pivots, packed.shape[-2]), packed.dtype)
        if unpack_pivots
        else nothing
    )
    return p, low, up


@lowering("aten.linalg_lu_solve.default")
def _linalg_lu_solve(
    ctx: Context, packed: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    return _lu_solve(
        ctx, packed, _permutation_of(pivots, packed.shape[-1]), b, left=left, adjoint=adjoint
    )


@lowering("aten.linalg_inv_ex.default")
def _inv_ex(ctx: Context, a: Any, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    packed, _, permutation = _lu(ctx, a)
    eye = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    return _lu_solve(ctx, packed, permutation, eye), _first_failure(_diagonal(packed) == 0)


# ---- triangular ----------------------------------------------------------------------------------


@lowering("aten.linalg_solve_triangular.default")
def _linalg_solve_triangular(
    ctx: Context,
    a: Any,
    b: Any,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> jax.Array:
    return _solve_triangular(ctx, a, b, lower=not upper, left=left, unit=unitriangular)


@lowering("aten.triangular_solve.default")
def _triangular_solve(
    ctx: Context,
    b: Any,
    a: Any,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[jax.Array, jax.Array]:
    solution = _solve_triangular(
        ctx, a, b, lower=not upper, transpose=transpose, unit=unitriangular
    )
    return solution, jnp.broadcast_to(a, ctx.outs[1].shape)


# ---- functions of a matrix -----------------------------------------------------------------------

_PADE = 13
# The largest 1-norm for which the approximant of that degree is exact to the last bit of a float64:
# Higham, "The scaling and squaring method for the matrix exponential revisited", SIAM J. Matrix
# Anal. Appl. 26 (2005), table 2.3. For a float32 it is more than exact enough.
_PADE_RANGE = 5.371920351148152


def _pade_coefficient(j: int) -> float:
    f = math.factorial
    return f(2 * _PADE - j) * f(_PADE) / (f(2 * _PADE) * f(_PADE - j) * f(j))


@lowering("aten.linalg_matrix_exp.default")
def _matrix_exp(ctx: Context, a: Any) -> jax.Array:
    if a.size == 0:
        return a
    a = a.astype(opmath(a.dtype))
    norm = jnp.abs(a).sum(-2).max(-1)
    squarings = jnp.maximum(jnp.ceil(jnp.log2(norm / _PADE_RANGE)), 0)
    squarings = jnp.where(jnp.isfinite(norm), squarings, 0)
    a = a * jnp.ldexp(jnp.ones_like(norm), -squarings.astype(np.int32))[..., None, None].astype(
        a.dtype
    )
    eye = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    a2 = _product(a, a)
    a4 = _product(a2, a2)
    powers = [eye, a2, a4, _product(a4, a2)]

    def even(first: int) -> jax.Array:
        """The sum of b[first + 2i] a^(2i) for i up to 6.

        The upper half is a^6 times a sum of the powers at hand: one more product.
        """
        b = [_pade_coefficient(first + 2 * i) for i in range(7)]
        low = b[0] * powers[0] + b[1] * powers[1] + b[2] * powers[2] + b[3] * powers[3]
        return low + _product(powers[3], b[4] * powers[1] + b[5] * powers[2] + b[6] * powers[3])

    u, v = _product(a, even(1)), even(0)
    packed, _, permutation = _lu(ctx, v - u)
    result = _lu_solve(ctx, packed, permutation, v + u)

    def square(i: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where((i < squarings)[..., None, None], _product(x, x), x)

    return lax.fori_loop(0, squarings.max().astype(np.int32), square, result).astype(ctx.dtype)


@lowering("aten.linalg_pinv.atol_rtol_tensor")
def _pinv(
    ctx: Context, a: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False
) -> jax.Array:
    """V S^-1 U^H over the singular values above max(atol, rtol * the largest)."""
    if a.size == 0:
        return jnp.zeros(ctx.shape, ctx.dtype)
    if hermitian:
        low = jnp.tril(a, -1)
        full = low + _adjoint(low) + _real_diagonal(a)
        vectors, values = on_matrices(ctx, partial(lax.linalg.eigh, symmetrize_input=False), full)
        left, right, sizes = vectors, vectors, jnp.abs(values)
    else:
        left, values, adjoint_right = singular_values.decompose(ctx, a, full_matrices=False)
        right, sizes = _adjoint(adjoint_right), values
    largest = sizes.max(-1)
    absolute = jnp.zeros_like(largest) if atol is None else atol.astype(largest.dtype)
    if rtol is None:
        # torch's default; 0 where there is an absolute tolerance
        relative = jnp.where(absolute > 0, 0, max(a.shape[-2:]) * jnp.finfo(a.dtype).eps).astype(
            largest.dtype
        )
    else:
        relative = rtol.astype(largest.dtype)
    cut = jnp.maximum(absolute, relative * largest)[..., None]
    inverse = jnp.where(sizes > cut, 1 / jnp.where(values == 0, 1, values), 0).astype(a.dtype)
    return _product(right, inverse[..., :, None] * _adjoint(left))


def _real_diagonal(a: jax.Array) -> jax.Array:
    return jnp.eye(a.shape[-1], dtype=a.dtype) * jnp.real(_diagonal(a))[..., None, :].astype(
        a.dtype
    )


@lowering("aten.linalg_cross.default")
def _cross(ctx: Context, a: Any, b: Any, *, dim: int = -1) -> jax.Array:
    wide = opmath(ctx.dtype)
    a, b = (jnp.broadcast_to(x, ctx.shape).astype(wide) for x in (a, b))
    a_next, b_next = (jnp.roll(x, -1, dim) for x in (a, b))
    # Component i is a[i+1] b[i+2] - a[i+2] b[i+1].
    return jnp.roll(a * b_next - a_next * b, -1, dim).astype(ctx.dtype)
