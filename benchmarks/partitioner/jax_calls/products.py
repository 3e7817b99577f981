"""Jax functions that multiply: convolutions, products of matrices, linear algebra."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.partitioner.jax_calls.call import JaxCall, Make, floats, matrices, one

_CONV = ("NCH", "OIH", "NCH")


def _conv(**more: Any) -> Any:
    more = {"window_strides": (1,), "padding": [(1, 1)], **more}
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=_CONV, **more)


def _images(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(b, t, d), floats(6, t, 3)]


def _dot(contracted: Any, batch: Any) -> Any:
    return lambda a, b: lax.dot_general(a, b, (contracted, batch))


def _definite(x: jax.Array) -> jax.Array:
    return x @ x.mT + 2 * x.shape[-1] * jnp.eye(x.shape[-1])


def _solved(a: jax.Array, b: jax.Array) -> jax.Array:
    def solve(matvec: Any, y: jax.Array) -> jax.Array:
        return jax.scipy.linalg.solve(_definite(a), y)

    return lax.custom_linear_solve(lambda v: _definite(a) @ v, b, solve, symmetric=True)


CONVOLUTIONS: dict[str, JaxCall] = {
    "conv": JaxCall(_conv(), _images),
    "conv_stride": JaxCall(_conv(window_strides=(2,)), _images),
    "conv_input_dilated": JaxCall(_conv(lhs_dilation=(2,)), _images),
    "conv_kernel_dilated": JaxCall(_conv(rhs_dilation=(2,), padding=[(2, 2)]), _images),
    "conv_all": JaxCall(
        _conv(window_strides=(2,), lhs_dilation=(3,), rhs_dilation=(2,), padding=[(3, 1)]), _images
    ),
    "conv_cut": JaxCall(_conv(padding=[(-1, 2)]), _images),
    "conv_long": JaxCall(
        _conv(padding=[(3, 3)]), lambda b, t, d: [floats(b, t, d), floats(6, t, 7)]
    ),
    "conv_groups": JaxCall(
        _conv(feature_group_count=2),
        lambda b, t, d: [floats(b, 2 * t, d), floats(6, t, 3)],
    ),
    "conv_depthwise": JaxCall(
        lambda x, w: _conv(feature_group_count=w.shape[0])(x, w),
        lambda b, t, d: [floats(b, t, d), floats(t, 1, 3)],
    ),
    "conv_batch_groups": JaxCall(
        _conv(batch_group_count=2), lambda b, t, d: [floats(2 * t, b, d), floats(6, b, 3)]
    ),
    "conv_positions_last": JaxCall(
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        ),
        lambda b, t, d: [floats(b, d, t), floats(3, t, 6)],
    ),
    "conv_transpose": JaxCall(
        lambda x, w: lax.conv_transpose(
            x, w, (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        ),
        lambda b, t, d: [floats(b, d, t), floats(3, t, 6)],
    ),
    "conv_2d": JaxCall(
        lambda x, w: lax.conv_general_dilated(x, w, (1, 2), "SAME"),
        lambda b, t, d: [floats(2, 3, b, d), floats(4, 3, 3, 3)],
    ),
    "patches": JaxCall(lambda x: lax.conv_general_dilated_patches(x, (3,), (2,), [(1, 1)]), one),
    "convolve": JaxCall(
        lambda x, w: jnp.convolve(x, w, "same"), lambda b, t, d: [floats(2 * d), floats(3)]
    ),
    "resize": JaxCall(
        lambda x: jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 5), "linear"), one
    ),
}


PRODUCTS: dict[str, JaxCall] = {
    "dot": JaxCall(jnp.dot, lambda b, t, d: [floats(b, d), floats(d, t)]),
    "dot_batch": JaxCall(
        _dot(((2,), (1,)), ((0,), (0,))), lambda b, t, d: [floats(b, t, d), floats(b, d, t)]
    ),
    "dot_two_contracted": JaxCall(
        _dot(((0, 2), (1, 0)), ((), ())), lambda b, t, d: [floats(b, t, d), floats(d, b, 3)]
    ),
    "dot_three_contracted": JaxCall(
        _dot(((0, 1, 2), (1, 2, 0)), ((), ())),
        lambda b, t, d: [floats(b, t, d, 2), floats(d, b, t, 3)],
    ),
    "dot_batch_two_contracted": JaxCall(
        _dot(((2, 3), (1, 3)), ((0,), (2,))),
        lambda b, t, d: [floats(b, t, d, 2), floats(3, d, b, 2)],
    ),
    "dot_all_batch": JaxCall(
        _dot(((), ()), ((0, 1), (1, 0))), lambda b, t, d: [floats(b, d), floats(d, b)]
    ),
    "outer": JaxCall(_dot(((), ()), ((0,), (0,))), lambda b, t, d: [floats(b, t), floats(b, d)]),
    "einsum": JaxCall(
        lambda a, b, c: jnp.einsum("btd,bd,te->be", a, b, c),
        lambda b, t, d: [floats(b, t, d), floats(b, d), floats(t, 3)],
    ),
    "ragged_dot": JaxCall(
        lambda a, w: lax.ragged_dot(a, w, jnp.array([2, 0, 3])),
        lambda b, t, d: [floats(b, d), floats(3, d, t)],
    ),
    "attention": JaxCall(
        lambda q, k: jax.nn.dot_product_attention(q, k, k * 2, is_causal=True),
        lambda b, t, d: [floats(b, t, 4, 6), floats(b, t, 2, 6)],
        tolerance=1e-5,  # jax computes its softmax in float32
    ),
    "kron": JaxCall(jnp.kron, lambda b, t, d: [floats(b, t), floats(3, d)]),
    "cross": JaxCall(jnp.cross, lambda b, t, d: [floats(b, d, 3), floats(b, d, 3)]),
}


LINALG: dict[str, JaxCall] = {
    "cholesky": JaxCall(lambda x: jnp.linalg.cholesky(_definite(x)), matrices),
    "triangular_solve": JaxCall(
        lambda a, b: lax.linalg.triangular_solve(
            _definite(a), b, left_side=True, lower=True, transpose_a=True
        ),
        lambda b, t, d: [floats(b, t, t), floats(b, t, d)],
    ),
    "lu": JaxCall(lambda x: (lax.linalg.lu(_definite(x))[0], jnp.linalg.det(x)), matrices),
    "qr": JaxCall(lambda x: jnp.abs(jnp.linalg.qr(x)[1]), matrices),
    "eigh": JaxCall(lambda x: jnp.linalg.eigh(_definite(x))[0], matrices),
    "eig": JaxCall(
        lambda x: jnp.sort(jnp.abs(jnp.linalg.eigvals(x)), -1), matrices, has_gradient=False
    ),
    "svd": JaxCall(lambda x: jnp.linalg.svd(x, compute_uv=False), matrices),
    "solve": JaxCall(
        lambda a, b: jnp.linalg.solve(_definite(a), b),
        lambda b, t, d: [floats(b, t, t), floats(b, t, d)],
    ),
    "inv": JaxCall(lambda x: jnp.linalg.inv(_definite(x)), matrices),
    "one_matrix": JaxCall(
        lambda x: (
            jnp.linalg.cholesky(_definite(x)),
            jnp.linalg.inv(_definite(x)),
            jnp.linalg.svd(x, compute_uv=False),
        ),
        lambda b, t, d: [floats(d, d)],
    ),
    "tridiagonal_solve": JaxCall(
        lambda a, b: lax.linalg.tridiagonal_solve(a, jnp.abs(a) + 4, a, b),
        lambda b, t, d: [floats(b, t), floats(b, t, d)],
        has_gradient=False,
    ),
    "custom_linear_solve": JaxCall(_solved, lambda b, t, d: [floats(t, t), floats(t)]),
    "expm": JaxCall(jax.scipy.linalg.expm, lambda b, t, d: [floats(t, t)]),
    "fft": JaxCall(
        lambda x: (jnp.fft.fft(x).real, jnp.fft.fft(x, axis=1).imag, jnp.fft.rfft(x).real), one
    ),
    "ifft": JaxCall(
        lambda x: (jnp.fft.irfft(x + 2j * x), jnp.fft.ifft2(x * 1j).real, jnp.fft.fftn(x).imag),
        one,
    ),
    "complex": JaxCall(lambda x: jnp.abs(lax.complex(x, x.sum(1, keepdims=True)).cumsum(2)), one),
}
