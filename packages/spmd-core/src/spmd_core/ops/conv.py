"""Convolutions over 1 to 3 spatial dims: (batch, channel, ...) and a weight in, (batch, channel, ...) out; and their gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_core.ops.precision import matmul_precision, opmath
from spmd_core.ops.registry import Context, lowering


def _each(value: Sequence[int], num_dims: int) -> tuple[int, ...]:
    """One number per spatial dim: torch lets one number stand for all."""
    return tuple(value) * num_dims if len(value) == 1 else tuple(value)


def _swap_channels(weight: jax.Array, groups: int) -> jax.Array:
    """A transposed convolution's weight (in, out / groups, ...) as an ordinary one's (out, in / groups, ...), the kernel reversed."""
    num_in, num_out, *kernel = weight.shape
    grouped = weight.reshape(groups, num_in // groups, num_out, *kernel)
    return jnp.flip(jnp.swapaxes(grouped, 1, 2).reshape(groups * num_out, num_in // groups, *kernel), tuple(range(2, weight.ndim)))


def _spread(x: jax.Array, stride: Sequence[int]) -> jax.Array:
    """Zeros between the elements of the spatial dims, by a reshape: the partitioner gets a pad with zeros between elements wrong too."""
    for dim, step in enumerate(stride, 2):
        size = x.shape[dim]
        wide = jnp.pad(jnp.expand_dims(x, dim + 1), [(0, step - 1) if d == dim + 1 else (0, 0) for d in range(x.ndim + 1)])
        x = lax.slice_in_dim(wide.reshape(*x.shape[:dim], size * step, *x.shape[dim + 1 :]), 0, (size - 1) * step + 1, axis=dim)
    return x


def _every(x: jax.Array, stride: Sequence[int]) -> jax.Array:
    """Every `stride`-th element of the spatial dims from the first on, by a reshape, so that its transpose is `_spread`'s."""
    for dim, step in enumerate(stride, 2):
        num = -(-x.shape[dim] // step)
        whole = jnp.pad(x, [(0, num * step - x.shape[dim]) if d == dim else (0, 0) for d in range(x.ndim)])
        x = lax.index_in_dim(whole.reshape(*x.shape[:dim], num, step, *x.shape[dim + 1 :]), 0, dim + 1, keepdims=False)
    return x


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
    spread_apart: bool,
) -> jax.Array:
    """The convolution. With `spread_apart` neither it nor its transposes dilate an operand that may be sharded over its spatial dims.

    XLA's partitioner aborts the process on such a window where the padding is negative, and gives wrong sums for others (a stride of 2 with a
    padding of 2 over 6 elements on 8 devices). Zeros between the elements, put there before, partition well; they cost multiplications by zero
    where the compiler does not see through them. This ends when the partitioner is right.
    """
    num_dims = x.ndim - 2
    stride, padding, dilation, output_padding = (_each(v, num_dims) for v in (stride, padding, dilation, output_padding))
    if transposed:
        # The gradient of a convolution with this stride: the input is spread out and the window slides over it by 1.
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
        weight = _swap_channels(weight, groups)
        pads = [(r - p, r - p + extra) for r, p, extra in zip(reach, padding, output_padding)]
        strides, spread = (1,) * num_dims, stride
        if spread_apart:
            x, spread = _spread(x, stride), strides
    else:
        pads, strides, spread = [(p, p) for p in padding], stride, (1,) * num_dims
    every = strides if spread_apart and not transposed and max(strides) > 1 else None
    if every is not None:
        strides = (1,) * num_dims
    spatial = "DHW"[3 - num_dims :]
    # No preferred_element_type: XLA accumulates 16-bit convolutions in float32 anyway, and with it jax cannot differentiate them.
    out = lax.conv_general_dilated(
        x, weight, strides, pads, spread, dilation, (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"), groups, precision=matmul_precision(x.dtype)
    )
    return out if every is None else _every(out, every)


@lowering("aten.convolution.default", "aten.convolution_overrideable.default")
def _convolution(
    ctx: Context, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> jax.Array:
    apart = transposed and ctx.num_devices > 1
    out = _convolve(
        x, weight, stride=stride, padding=padding, dilation=dilation, transposed=transposed, output_padding=output_padding, groups=groups,
        spread_apart=apart,
    )  # fmt: skip
    if bias is None:
        return out
    # Rounded once, after the bias: where the two cancel, a product that was rounded before leaves nothing but its error.
    wide = opmath(out.dtype)
    return (out.astype(wide) + bias.astype(wide).reshape(1, -1, *(1,) * (out.ndim - 2))).astype(ctx.dtype)


@lowering("aten.convolution_backward.default")
def _convolution_backward(
    ctx: Context, grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any,
    groups: int, output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:  # fmt: skip
    convolve = functools.partial(
        _convolve, stride=stride, padding=padding, dilation=dilation, transposed=transposed, output_padding=output_padding, groups=groups,
        spread_apart=ctx.num_devices > 1,
    )  # fmt: skip
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
