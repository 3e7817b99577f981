"""Convolutions over 1 to 3 spatial dims, (batch, channel, ...) in and out, and their gradients."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_core.ops.kernels.convolutions import (
    Options,
    cast_operands,
    convolve,
    make_options,
    weight_gradient,
)
from spmd_core.ops.kernels.halos import Images
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.traits import Parts, Traits
from spmd_core.ops.kernels.windows import crop_or_pad
from spmd_core.ops.registry import Context, ImageLayout, lowering

# ---- over split images: every device convolves the rows that it has and fetches ------------------


def _split_images(
    ctx: Context, x: jax.Array, weight: jax.Array, sizes: Sequence[int], options: Options
) -> Images | None:
    """The windows over split dims, if the layout of the images is known; else None."""
    if options.transposed or 0 in weight.shape:
        return None
    windows = (weight.shape[2:], options.stride, options.padding, options.dilation)
    return Images.of(ctx.layout(ImageLayout), x.shape, sizes, *windows, needs_all_channels=True)


def _convolve_images(
    ctx: Context, images: Images, x: jax.Array, weight: jax.Array, options: Options
) -> jax.Array:
    """The convolution: every device fetches the rows that its results read."""
    alone = ctx.on_one_device()
    # If windows of one element skip elements along a dim that is not split, those are not fetched.
    split = {dim.dim for dim in images.dims}
    skipped = [
        step if size == 1 and pad == 0 and dim not in split else 1
        for dim, (size, step, pad) in enumerate(
            zip(weight.shape[2:], options.stride, options.padding), start=2
        )
    ]
    stride = tuple(step // skip for step, skip in zip(options.stride, skipped))
    inner = replace(options, padding=images.padding(options.padding), stride=stride)

    def part(x: jax.Array, weight: jax.Array) -> list[jax.Array]:
        x = x[:, :, *(slice(None, None, skip) for skip in skipped)]
        read, weight = cast_operands(ctx, images.windows(x), weight)
        return [convolve(alone, read, weight, inner)]

    shape = (x.shape[0], weight.shape[0], *ctx.shape[2:])
    return images.run(part, [x], [weight], [shape])[0]


def _gradients_of_images(
    ctx: Context,
    images: Images,
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    options: Options,
    wanted: Sequence[bool],
) -> list[jax.Array | None]:
    """The gradients of the input and of the weight, or None for one that is not wanted.

    For the input's gradient, a device fetches the gradient rows of all results that read its rows.
    From these it also computes its part of the weight's gradient. If only the latter is wanted, it
    fetches rows of the input, as in forward: the input of a first layer has few channels.
    """
    alone = ctx.on_one_device()
    inner = replace(options, padding=images.padding(options.padding))

    steps_by_one = wanted[0] and max(options.stride) == options.groups == 1

    def part(grad: jax.Array, x: jax.Array, weight: jax.Array) -> list[jax.Array]:
        if wanted[0]:
            grad = images.readers(grad)
        # With few positions, the other form is a product of the weight as it lies in memory.
        is_small = math.prod((grad.shape[0], *grad.shape[2:])) <= weight.shape[0]
        if steps_by_one and not (ctx.platform == "cpu" and is_small):
            grad, x, weight = cast_operands(ctx, grad, x, weight)
            found = _gradients_of_own(alone, grad, x, weight, inner)
            found = [g for g, want in zip(found, wanted) if want]
            return [*found[:1], *(lax.psum(total, images.axis_names) for total in found[1:])]
        x = images.read_by_readers(x) if wanted[0] else images.windows(x)
        grad, x, weight = cast_operands(ctx, grad, x, weight)
        found = []
        if wanted[0]:
            read = jax.linear_transpose(lambda x: convolve(alone, x, weight, inner), x)(grad)[0]
            found.append(images.own_of_readers(read))
        if wanted[1]:
            total = weight_gradient(alone, grad, x, weight, inner)
            found.append(lax.psum(total, images.axis_names))
        return found

    shapes = [shape for shape, want in zip((x.shape, None), wanted) if want]
    found = iter(images.run(part, [grad, x], [weight], shapes))
    return [next(found) if want else None for want in wanted[:2]]


def _gradients_of_own(
    alone: Context, grad: jax.Array, x: jax.Array, weight: jax.Array, options: Options
) -> list[jax.Array]:
    """The gradients of a device's own rows of the input, and of the weight, for a stride of 1.

    They are those of the convolution that goes from the results to the input. It computes nothing
    for the rows that `grad` has beside those of the input: the gradient of the other convolution
    would compute two halos more.

    Args:
        alone: the context of one device.
        grad: the gradient of all results that read these rows; along dims that are not split, of
            all results.
        x, weight: as for the convolution.
        options: of the convolution; no padding along split dims.
    """
    edges = []
    for n, num, k, dilation, pad in zip(
        x.shape[2:], grad.shape[2:], weight.shape[2:], options.dilation, options.padding
    ):
        reach = dilation * (k - 1)
        is_split = num == n + reach
        edges.append((0, 0) if is_split else (reach - pad, n + pad - num))
    grad = crop_or_pad(grad, edges)
    kernel = tuple(range(2, weight.ndim))
    turned = jnp.flip(jnp.swapaxes(weight, 0, 1), kernel)
    options = replace(options, padding=(0,) * len(kernel))
    total = weight_gradient(alone, x, grad, turned, options)
    return [convolve(alone, grad, turned, options), jnp.swapaxes(jnp.flip(total, kernel), 0, 1)]


@lowering(
    "aten.convolution.default",
    "aten.convolution_overrideable.default",
    traits=Traits(is_product=True, images=(0,)),
)
def _convolution(
    ctx: Context,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> jax.Array:
    options = make_options(
        x.ndim - 2, stride, padding, dilation, transposed, output_padding, groups
    )
    images = _split_images(ctx, x, weight, ctx.shape[2:], options)
    if images is not None:
        out = _convolve_images(ctx, images, x, weight, options)
    else:
        x, weight = cast_operands(ctx, x, weight)
        out = convolve(ctx, x, weight, options)
    if bias is None:
        return out.astype(ctx.dtype)
    # Added in the wide dtype: where bias and product cancel, only the rounding error of a rounded
    # product would be left.
    wide = opmath(out.dtype)
    return (out.astype(wide) + bias.astype(wide).reshape(1, -1, *(1,) * (out.ndim - 2))).astype(
        ctx.dtype
    )


@lowering(
    "aten.convolution_backward.default",
    traits=Traits(parts=Parts.SUM, is_product=True, images=(0, 1)),
)
def _convolution_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    options = make_options(
        x.ndim - 2, stride, padding, dilation, transposed, output_padding, groups
    )
    images = _split_images(ctx, x, weight, grad.shape[2:], options)
    grad_x = grad_weight = grad_bias = None
    if images is not None and any(output_mask[:2]):
        grad_x, grad_weight = _gradients_of_images(
            ctx, images, grad, x, weight, options, output_mask
        )
        output_mask = (False, False, output_mask[2])
    grad, x, weight = cast_operands(ctx, grad, x, weight)
    # A convolution is linear in each operand: a transpose, unlike a vjp, does not compute the
    # forward again.
    if output_mask[0]:
        (grad_x,) = jax.linear_transpose(lambda x: convolve(ctx, x, weight, options), x)(grad)
    if output_mask[1]:
        grad_weight = weight_gradient(ctx, grad, x, weight, options)
    if output_mask[2]:
        wide = jnp.promote_types(grad.dtype, jnp.float32)
        grad_bias = jnp.sum(grad.astype(wide), axis=(0, *range(2, grad.ndim)))
    return tuple(
        None if g is None else g.astype(ctx.dtype) for g in (grad_x, grad_weight, grad_bias)
    )


@lowering(
    "aten.convolution_backward_overrideable.default", traits=Traits(is_product=True, images=(0, 1))
)
def _convolution_backward_overrideable(
    ctx: Context,
    grad: Any,
    x: Any,
    weight: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    return _convolution_backward(
        ctx,
        grad,
        x,
        weight,
        None,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        output_mask,
    )
