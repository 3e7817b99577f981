"""Convolutions over 1 to 3 spatial dims: (batch, channel, ...) and a weight in, (batch, channel, ...) out; and their gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_core.ops.precision import matmul_precision
from spmd_core.ops.registry import Context, lowering


def _each(value: Sequence[int], num_dims: int) -> tuple[int, ...]:
    """One number per spatial dim: torch lets one number stand for all."""
    return tuple(value) * num_dims if len(value) == 1 else tuple(value)


def _swap_channels(weight: jax.Array, groups: int) -> jax.Array:
    """A transposed convolution's weight (in, out / groups, ...) as an ordinary one's (out, in / groups, ...), the kernel reversed."""
    num_in, num_out, *kernel = weight.shape
    grouped = weight.reshape(groups, num_in // groups, num_out, *kernel)
    return jnp.flip(jnp.swapaxes(grouped, 1, 2).reshape(groups * num_out, num_in // groups, *kernel), tuple(range(2, weight.ndim)))


def _convolve(
    x: jax.Array,
    weight: jax.Array,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    num_dims = x.ndim - 2
    stride, padding, dilation, output_padding = (_each(v, num_dims) for v in (stride, padding, dilation, output_padding))
    if transposed:
        # The gradient of a convolution with this stride: the input is spread out and the window slides over it by 1.
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
        weight = _swap_channels(weight, groups)
        pads = [(r - p, r - p + extra) for r, p, extra in zip(reach, padding, output_padding)]
        strides, spread = (1,) * num_dims, stride
    else:
        pads, strides, spread = [(p, p) for p in padding], stride, (1,) * num_dims
    spatial = "DHW"[3 - num_dims :]
    # No preferred_element_type: XLA accumulates 16-bit convolutions in float32 anyway, and with it jax cannot differentiate them.
    return lax.conv_general_dilated(
        x, weight, strides, pads, spread, dilation, (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"), groups, precision=matmul_precision(x.dtype)
    )


@lowering("aten.convolution.default", "aten.convolution_overrideable.default")
def _convolution(
    ctx: Context, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> jax.Array:
    out = _convolve(x, weight, stride=stride, padding=padding, dilation=dilation, transposed=transposed, output_padding=output_padding, groups=groups)
    return out if bias is None else out + bias.reshape(1, -1, *(1,) * (out.ndim - 2))


@lowering("aten.convolution_backward.default")
def _convolution_backward(
    ctx: Context, grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any,
    groups: int, output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:  # fmt: skip
    convolve = functools.partial(
        _convolve, stride=stride, padding=padding, dilation=dilation, transposed=transposed, output_padding=output_padding, groups=groups
    )
    # A convolution is linear in each operand; the transpose does not compute the forward again, as a vjp would.
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        (grad_x,) = jax.linear_transpose(lambda x: convolve(x, weight), x)(grad)
    if output_mask[1]:
        (grad_weight,) = jax.linear_transpose(lambda weight: convolve(x, weight), weight)(grad)
    if output_mask[2]:
        wide = jnp.promote_types(grad.dtype, jnp.float32)
        grad_bias = jnp.sum(grad.astype(wide), axis=(0, *range(2, grad.ndim))).astype(grad.dtype)
    return grad_x, grad_weight, grad_bias


@lowering("aten.convolution_backward_overrideable.default")
def _convolution_backward_overrideable(
    ctx: Context, grad: Any, x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:  # fmt: skip
    return _convolution_backward(ctx, grad, x, weight, None, stride, padding, dilation, transposed, output_padding, groups, output_mask)
