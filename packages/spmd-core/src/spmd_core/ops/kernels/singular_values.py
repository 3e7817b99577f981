"""The singular value decomposition of batches of matrices, on each platform."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from spmd_core.ops.kernels.matrix_batches import on_matrices
from spmd_core.ops.registry import Context

_product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def decompose(
    ctx: Context, a: jax.Array, *, full_matrices: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`u`, `s` and the adjoint of `v`, as in numpy; NaN for a matrix that is not finite.

    Args:
        ctx: the operation's context.
        a: (..., m, n), not empty.
        full_matrices: whether `u` is (m, m) and `v` is (n, n); else they have min(m, n) columns.
    """
    function = by_polar_form if ctx.platform == "tpu" else lax.linalg.svd
    u, s, vh = on_matrices(ctx, partial(function, full_matrices=full_matrices), a)
    return u, s, vh


def by_polar_form(a: jax.Array, *, full_matrices: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The decomposition from the polar form `a = w h`, as in jax's own implementation for TPUs.

    That one does not compile if x64 is enabled: it makes the signs of columns int64, and XLA does
    not lower their product with float32 ("rewriting computation to not contain X{64|128} element
    types"). This can go when jax gives the signs the matrix's dtype.

    Source: Nakatsukasa and Higham, "Stable and efficient spectral divide and conquer algorithms for
    the symmetric eigenvalue decomposition and the SVD", 2013, section 5.
    """
    if a.shape[-2] < a.shape[-1]:
        v, s, uh = by_polar_form(_adjoint(a), full_matrices=full_matrices)
        return _adjoint(uh), s, _adjoint(v)
    finite = jnp.isfinite(a).all((-2, -1))[..., None]
    q, r = lax.linalg.qr(a, full_matrices=full_matrices)
    size = a.shape[-1]
    u, s, v = jnp.vectorize(_of_square, signature="(n,n)->(n,n),(n),(n,n)")(r[..., :size, :])
    u = jnp.concatenate([_product(q[..., :size], u), q[..., size:]], -1)
    nan = jnp.asarray(jnp.nan, s.dtype)
    return (
        jnp.where(finite[..., None], u, nan),
        jnp.where(finite, s, nan),
        jnp.where(finite[..., None], _adjoint(v), nan),
    )


def _of_square(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`u`, `s` and `v` of one square matrix."""
    with jax.default_matmul_precision("float32"):
        w, h, *_ = lax.linalg.qdwh(a, max_iterations=10)
    v, s = lax.linalg.eigh(h)
    v, s = v[:, ::-1], jnp.maximum(s[::-1], 0)
    # For a singular matrix, `w` is not unitary: only its columns for nonzero values are
    # orthonormal.
    u, triangle = lax.linalg.qr(_product(w, v))
    signs = jnp.sign(jnp.diag(triangle))
    return u * jnp.where(signs == 0, jnp.ones_like(signs), signs), s, v


def _adjoint(a: jax.Array) -> jax.Array:
    return jnp.conj(jnp.matrix_transpose(a))
