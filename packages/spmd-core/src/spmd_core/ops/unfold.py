"""im2col and col2im: sliding windows of images as columns, and the sum of the columns back.

An image is (batch, channel, height, width). Its columns are (batch, channel * window elements,
window positions).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.windows import crop_or_pad, dilate, replicate_unless_halo_fits
from spmd_core.ops.registry import Context, lowering


def _pair(value: Sequence[int]) -> tuple[int, int]:
    return (value[0], value[-1])


def _num_positions(size: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@lowering("aten.im2col.default")
def _im2col(
    ctx: Context, x: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> jax.Array:
    # One dim after the other, one strided slice for each element of the window along it: this
    # needs no index arrays, and so no gather.
    forms = [_pair(option) for option in (kernel_size, dilation, padding, stride)]
    num_positions = [_num_positions(size, *form) for size, form in zip(x.shape[-2:], zip(*forms))]
    out = replicate_unless_halo_fits(ctx, x, num_positions, forms[0], forms[1], num_dims=2)
    for d, (kernel, step, pad, hop) in enumerate(
        zip(*map(_pair, (kernel_size, dilation, padding, stride)))
    ):
        axis = x.ndim - 2 + 2 * d  # after the previous dim's window and positions
        positions = _num_positions(x.shape[x.ndim - 2 + d], kernel, step, pad, hop)
        out = jnp.pad(out, [(pad, pad) if a == axis else (0, 0) for a in range(out.ndim)])
        slices = [
            lax.slice_in_dim(out, k * step, k * step + (positions - 1) * hop + 1, hop, axis)
            for k in range(kernel)
        ]
        out = jnp.stack(slices, axis=axis)
    # (..., window height, positions down, window width, positions across)
    out = jnp.swapaxes(out, -3, -2)
    out = replicate_unless_halo_fits(ctx, out, num_positions, forms[0], forms[1], num_dims=4)
    return out.reshape(ctx.shape)


@lowering("aten.col2im.default")
def _col2im(
    ctx: Context,
    columns: Any,
    output_size: Any,
    kernel_size: Any,
    dilation: Any,
    padding: Any,
    stride: Any,
) -> jax.Array:
    options = list(zip(_pair(output_size), *map(_pair, (kernel_size, dilation, padding, stride))))
    kernels, positions = [o[1] for o in options], [_num_positions(*o) for o in options]
    wide = np.dtype(np.int32) if columns.dtype == np.bool_ else opmath(columns.dtype)
    # (..., window height, positions down, window width, positions across)
    out = jnp.swapaxes(columns.astype(wide).reshape(*ctx.shape[:-2], *kernels, *positions), -3, -2)
    out = replicate_unless_halo_fits(ctx, out, positions, kernels, _pair(dilation), num_dims=4)
    for d in (1, 0):
        size, kernel, step, pad, hop = options[d]
        axis = out.ndim - 2 if d else len(ctx.shape) - 2
        padded = size + 2 * pad
        span = (positions[d] - 1) * hop + 1
        total: Any = 0
        for k in range(kernel):
            at = lax.index_in_dim(out, k, axis, keepdims=False)
            edges = [(0, 0)] * (at.ndim - 1 - axis)
            dilated = dilate(ctx, at, [hop, *(1 for _ in edges)])
            total = total + crop_or_pad(dilated, [(k * step, padded - k * step - span), *edges])
        out = lax.slice_in_dim(total, pad, pad + size, axis=axis)
    out = replicate_unless_halo_fits(ctx, out, positions, kernels, _pair(dilation), num_dims=2)
    return (out != 0).astype(ctx.dtype) if ctx.dtype == np.bool_ else out.astype(ctx.dtype)
