"""QR, Householder reflections, singular values and eigenvalues of batches of matrices."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd_core.ops.kernels import singular_values
from spmd_core.ops.kernels.matrix_batches import on_matrices
from spmd_core.ops.kernels.precision import matmul_precision
from spmd_core.ops.registry import Context, lowering


def _eye(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Identities of any batch and any two sizes."""
    return jnp.broadcast_to(jnp.eye(shape[-2], shape[-1], dtype=dtype), shape)


# ---- QR ------------------------------------------------------------------------------------------


@lowering("aten.linalg_qr.default")
def _qr(ctx: Context, a: Any, mode: str = "reduced") -> tuple[jax.Array, jax.Array]:
    q_shape, r_shape = ctx.outs[0].shape, ctx.outs[1].shape
    if a.size == 0:
        q = jnp.zeros(q_shape, a.dtype) if mode == "r" else _eye(q_shape, a.dtype)
        return q, jnp.zeros(r_shape, a.dtype)
    q, r = on_matrices(ctx, partial(lax.linalg.qr, full_matrices=mode == "complete"), a)
    return (jnp.zeros(q_shape, a.dtype) if mode == "r" else q), r


def _geqrf_meta(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The meta kernel that torch lacks; the columns are contiguous, as LAPACK's in eager torch."""
    if a.dim() < 2:
        raise RuntimeError(
            f"torch.geqrf: input must have at least 2 dimensions; got shape {tuple(a.shape)}. "
            "Give it a matrix or a batch of them."
        )
    return a.mT.contiguous().mT, a.new_empty((*a.shape[:-2], min(a.shape[-2:])))


@lowering("aten.geqrf.default", meta=_geqrf_meta)
def _geqrf(ctx: Context, a: Any) -> tuple[jax.Array, jax.Array]:
    if a.size == 0:
        return a, jnp.zeros(ctx.outs[1].shape, a.dtype)
    transposed, tau = on_matrices(ctx, partial(jnp.linalg.qr, mode="raw"), a)
    return jnp.matrix_transpose(transposed), tau


@lowering("aten.linalg_householder_product.default")
def _householder_product(ctx: Context, a: Any, tau: Any) -> jax.Array:
    if a.size == 0 or tau.size == 0:
        return _eye(a.shape, a.dtype)
    return on_matrices(ctx, lax.linalg.householder_product, a, tau)


@lowering("aten.ormqr.default")
def _ormqr(
    ctx: Context, a: Any, tau: Any, c: Any, left: bool = True, transpose: bool = False
) -> jax.Array:
    """The product with the square Q.

    The reflections in `a` are padded with zeros, which adds columns of the identity.
    """
    if c.size == 0 or tau.size == 0:
        return c
    size = a.shape[-2]
    padding = [(0, 0)] * (a.ndim - 1) + [(0, size - tau.shape[-1])]
    reflections = jnp.pad(a[..., : tau.shape[-1]], padding)
    q = on_matrices(ctx, lax.linalg.householder_product, reflections, tau)
    q = jnp.conj(jnp.matrix_transpose(q)) if transpose else q
    return jnp.matmul(*((q, c) if left else (c, q)), precision=matmul_precision(c.dtype))


# ---- singular values -----------------------------------------------------------------------------


def _singular_values(a: jax.Array) -> jax.Array:
    return lax.linalg.svd(a, full_matrices=False, compute_uv=False)


@lowering("aten._linalg_svd.default")
def _svd(
    ctx: Context,
    a: Any,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The singular value decomposition; NaN for a matrix that is not finite.

    Eager torch raises LinAlgError for such a matrix. To raise, every call would have to wait.
    """
    u_shape, s_shape, v_shape = (out.shape for out in ctx.outs)
    real = jnp.finfo(a.dtype).dtype
    if a.size == 0:
        u, v = (
            _eye(s, a.dtype) if compute_uv else jnp.zeros(s, a.dtype) for s in (u_shape, v_shape)
        )
        return u, jnp.zeros(s_shape, real), v
    if not compute_uv:
        return (
            jnp.zeros(u_shape, a.dtype),
            on_matrices(ctx, _singular_values, a),
            jnp.zeros(v_shape, a.dtype),
        )
    return singular_values.decompose(ctx, a, full_matrices=full_matrices)


# ---- eigenvalues ---------------------------------------------------------------------------------


@lowering("aten._linalg_eigh.default")
def _eigh(
    ctx: Context, a: Any, UPLO: str = "L", compute_v: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues and eigenvectors, from one triangle and the real part of the diagonal.

    The full matrix is made from these, because XLA's kernels differ in which elements they read.
    """
    v_shape = ctx.outs[1].shape
    if a.size == 0:
        return jnp.zeros(ctx.shape, ctx.dtype), jnp.zeros(v_shape, a.dtype)
    half = jnp.tril(a, -1) if UPLO.upper() == "L" else jnp.triu(a, 1)
    diagonal = jnp.real(jnp.diagonal(a, axis1=-2, axis2=-1))[..., None, :].astype(a.dtype)
    full = (
        half + jnp.conj(jnp.matrix_transpose(half)) + jnp.eye(a.shape[-1], dtype=a.dtype) * diagonal
    )
    vectors, values = on_matrices(ctx, partial(lax.linalg.eigh, symmetrize_input=False), full)
    return values, vectors if compute_v else jnp.zeros(v_shape, a.dtype)


def _platform_has_no_eig(args: Any, kwargs: Any, platform: str) -> bool:
    """Whether XLA lacks general eigenvalues: on TPUs the call runs on the host, and is counted."""
    return platform not in ("cpu", "gpu")


@lowering("aten.linalg_eig.default", host_when=_platform_has_no_eig)
def _eig(ctx: Context, a: Any) -> tuple[jax.Array, jax.Array]:
    if a.size == 0:
        return jnp.zeros(ctx.shape, ctx.dtype), jnp.zeros(ctx.outs[1].shape, ctx.dtype)
    values, vectors = on_matrices(ctx, partial(lax.linalg.eig, compute_left_eigenvectors=False), a)
    return values.astype(ctx.dtype), vectors.astype(ctx.dtype)


@lowering("aten._linalg_eigvals.default", host_when=_platform_has_no_eig)
def _eigvals(ctx: Context, a: Any) -> jax.Array:
    if a.size == 0:
        return jnp.zeros(ctx.shape, ctx.dtype)
    values_alone = partial(
        lax.linalg.eig, compute_left_eigenvectors=False, compute_right_eigenvectors=False
    )
    (values,) = on_matrices(ctx, values_alone, a)
    return values.astype(ctx.dtype)
