"""Convolutions and the gradients of their weights, in forms that XLA's partitioner gets right.

Over (batch, channel, ...), with 1 to 3 spatial dims.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels import windows
from spmd_core.ops.kernels.precision import matmul_precision, opmath
from spmd_core.ops.kernels.windows import per_dim
from spmd_core.ops.registry import Context, ImageLayout


@dataclass(frozen=True)
class Options:
    """The static options of one convolution; the tuples hold one number per spatial dim."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def make_options(
    num_dims: int,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Options:
    """torch's arguments, in which one number may stand for all dims."""
    stride, padding, dilation, output_padding = (
        per_dim(v, num_dims) for v in (stride, padding, dilation, output_padding)
    )
    return Options(stride, padding, dilation, transposed, output_padding, groups)


def _swap_channels(weight: jax.Array, groups: int) -> jax.Array:
    """A transposed convolution's weight (in, out / groups, ...) as (out, in / groups, ...).

    The kernel is reversed: the result is the weight of an ordinary convolution.
    """
    num_in, num_out, *kernel = weight.shape
    grouped = weight.reshape(groups, num_in // groups, num_out, *kernel)
    return jnp.flip(
        jnp.swapaxes(grouped, 1, 2).reshape(groups * num_out, num_in // groups, *kernel),
        tuple(range(2, weight.ndim)),
    )


def cast_operands(ctx: Context, *arrays: jax.Array) -> Any:
    """The operands in the dtype to multiply in: on a CPU torch's compute dtype, else unchanged.

    On a CPU 16-bit floats are thus rounded once; accelerators have matrix units for 16 bits.
    """
    return [x.astype(opmath(x.dtype)) for x in arrays] if ctx.platform == "cpu" else arrays


def convolve(ctx: Context, x: jax.Array, weight: jax.Array, options: Options) -> jax.Array:
    """The convolution, linear in each operand.

    Neither it nor its transposes dilate an array whose spatial dims may be split (see `windows`).
    """
    num_dims = x.ndim - 2
    is_split = _is_split(ctx, x, weight, options)
    # XLA's partitioner splits a kernel's own dims, groups of channels, and channels beside spatial
    # dims wrongly.
    replicates_channels = options.groups > 1 or is_split
    weight = ctx.replicate_last_dims(weight, weight.ndim if replicates_channels else num_dims)
    if replicates_channels:
        x = _with_replicated_channels(ctx, x)
    if is_split:
        out = (
            _convolve_transposed_split(ctx, x, weight, options)
            if options.transposed
            else _convolve_split(ctx, x, weight, options)
        )
        return _with_replicated_channels(ctx, out)
    num_replicated = num_dims + (options.groups > 1)
    x = ctx.replicate_last_dims(x, num_dims)
    if options.transposed:
        # The gradient of a convolution with this stride: a dilated input, over which the window
        # moves by 1.
        reach = [d * (k - 1) for d, k in zip(options.dilation, weight.shape[2:])]
        pads = [
            (r - p, r - p + extra)
            for r, p, extra in zip(reach, options.padding, options.output_padding)
        ]
        out = _lax_convolution(
            x,
            _swap_channels(weight, options.groups),
            options.groups,
            pads,
            input_dilation=options.stride,
            dilation=options.dilation,
        )
    elif _is_depthwise_on_cpu(ctx, x, weight, options):
        out = _convolve_depthwise(x, weight, options)
    elif _is_product_on_cpu(ctx, x, weight, options):
        out = _convolve_as_product(x, weight, options)
    elif ctx.platform == "cpu" and num_dims == 3 and 0 not in x.shape:
        out = _convolve_by_depth(x, weight, options)
    else:
        pads, stride = [(p, p) for p in options.padding], options.stride
        reach = [d * (k - 1) + 1 for d, k in zip(options.dilation, weight.shape[2:])]
        nums = _result_sizes(x, weight, options)
        if 1 in (*x.shape[2:], *nums):
            # XLA's simplifier ends the process on the gradient for a padded dim of one element
            # under a stride, and for a dim whose result has one element. That one needs no stride.
            edges = [
                (p, r - n - p if num == 1 else p)
                for n, p, r, num in zip(x.shape[2:], options.padding, reach, nums)
            ]
            x, pads = windows.crop_or_pad(x, edges), [(0, 0)] * num_dims
            stride = tuple(1 if num == 1 else step for num, step in zip(nums, stride))
        out = _lax_convolution(
            x,
            weight,
            options.groups,
            pads,
            stride=stride,
            dilation=options.dilation,
        )
    return ctx.replicate_last_dims(out, num_replicated)


def _with_replicated_channels(ctx: Context, x: jax.Array) -> jax.Array:
    return jnp.moveaxis(ctx.replicate_last_dims(jnp.moveaxis(x, 1, -1), 1), -1, 1)


def _is_depthwise_on_cpu(ctx: Context, x: jax.Array, weight: jax.Array, options: Options) -> bool:
    """Whether each channel has a small kernel of its own, for which XLA's CPU backend is slow."""
    return (
        ctx.platform == "cpu"
        and 1 < options.groups == x.shape[1]
        and math.prod(weight.shape[2:]) <= _LARGE_KERNEL
        and 0 not in x.shape
    )


def _convolve_depthwise(x: jax.Array, weight: jax.Array, options: Options) -> jax.Array:
    """The sum over the kernel's elements of the shifted input times one number for each channel.

    Takes a fortieth of the time of XLA's convolution on a CPU (16 channels, kernel 3 x 3).
    """
    num_dims, kernel = x.ndim - 2, weight.shape[2:]
    padded = jnp.pad(x, [(0, 0), (0, 0), *((p, p) for p in options.padding)])
    reach = [d * (k - 1) for d, k in zip(options.dilation, kernel)]
    sizes = [(n - r - 1) // step + 1 for n, r, step in zip(padded.shape[2:], reach, options.stride)]
    by_channel = weight.reshape(options.groups, -1, *kernel)
    total: Any = 0
    for tap in np.ndindex(*kernel):
        starts = [at * d for at, d in zip(tap, options.dilation)]
        limits = [a + (n - 1) * step + 1 for a, n, step in zip(starts, sizes, options.stride)]
        seen = lax.slice(
            padded, (0, 0, *starts), (*padded.shape[:2], *limits), (1, 1, *options.stride)
        )
        factor = by_channel[(..., *tap)].reshape(1, *by_channel.shape[:2], *(1,) * num_dims)
        total = total + seen[:, :, None] * factor
    return total.reshape(x.shape[0], weight.shape[0], *sizes)


def _is_product_on_cpu(ctx: Context, x: jax.Array, weight: jax.Array, options: Options) -> bool:
    """Whether a product of patches takes less time than the convolution of XLA's CPU backend.

    That has no fast convolution where a dim of the input or the result is smaller than the kernel
    (the gradient is a convolution of a result). And it copies the weight into another order, which
    is most of the work where a device has fewer positions than the result has channels.
    """
    kernel = weight.shape[2:]
    sizes = _result_sizes(x, weight, options)
    is_plain = options.groups == 1 and math.prod(kernel) <= _LARGE_KERNEL
    if ctx.platform != "cpu" or not is_plain or min(*x.shape, *sizes) <= 0:
        return False
    images = ctx.layout(ImageLayout)
    num_batches = 1 if images is None else images.num_parts(0)
    num_positions = -(-x.shape[0] // num_batches) * math.prod(sizes)
    is_small = any(k > min(n, num) for k, n, num in zip(kernel, x.shape[2:], sizes))
    return is_small or num_positions <= weight.shape[0]


def _result_sizes(x: jax.Array, weight: jax.Array, options: Options) -> list[int]:
    """The spatial sizes of an ordinary convolution's result."""
    reach = [d * (k - 1) + 1 for d, k in zip(options.dilation, weight.shape[2:])]
    return [
        (n + 2 * p - r) // step + 1
        for n, p, r, step in zip(x.shape[2:], options.padding, reach, options.stride)
    ]


def _convolve_as_product(x: jax.Array, weight: jax.Array, options: Options) -> jax.Array:
    """The product of the weight and the patches of the input under each position of the kernel.

    On a CPU it takes about a hundredth of the time of XLA's convolution for images smaller than the
    kernel (512 channels, images of 2 x 2, kernel 3 x 3, batch 8), and 0.7 to 0.8 of it for images
    of 4 x 4 with 256 channels; and so do its transposes.
    """
    padded = jnp.pad(x, [(0, 0), (0, 0), *((p, p) for p in options.padding)])
    kernel, sizes = weight.shape[2:], _result_sizes(x, weight, options)
    taps = []
    for tap in np.ndindex(*kernel):
        starts = [at * d for at, d in zip(tap, options.dilation)]
        limits = [a + (n - 1) * step + 1 for a, n, step in zip(starts, sizes, options.stride)]
        taps.append(
            lax.slice(
                padded, (0, 0, *starts), (*padded.shape[:2], *limits), (1, 1, *options.stride)
            )
        )
    matrix = weight.reshape(*weight.shape[:2], len(taps))
    patches = jnp.stack(taps, axis=2)
    return jnp.einsum("nck...,ock->no...", patches, matrix, precision=matmul_precision(x.dtype))


def _convolve_by_depth(x: jax.Array, weight: jax.Array, options: Options) -> jax.Array:
    """A convolution over three dims as the sum of one over two dims for each depth of the kernel.

    XLA's CPU backend has a fast one for two dims, and takes ten times as long for three.
    """
    (stride, *strides), (dilation, *dilations) = options.stride, options.dilation
    pad = options.padding[0]
    padded = jnp.pad(x, [(0, 0), (0, 0), (pad, pad), (0, 0), (0, 0)])
    num_depths = (padded.shape[2] - dilation * (weight.shape[2] - 1) - 1) // stride + 1
    total: Any = 0
    for depth in range(weight.shape[2]):
        start = depth * dilation
        seen = lax.slice_in_dim(padded, start, start + (num_depths - 1) * stride + 1, stride, 2)
        frames = jnp.swapaxes(seen, 1, 2)
        total = total + _lax_convolution(
            frames.reshape(-1, *frames.shape[2:]),
            weight[:, :, depth],
            options.groups,
            [(p, p) for p in options.padding[1:]],
            stride=strides,
            dilation=dilations,
        )
    by_frame = total.reshape(x.shape[0], num_depths, *total.shape[1:])
    return jnp.swapaxes(by_frame, 1, 2)


def _is_split(ctx: Context, x: jax.Array, weight: jax.Array, options: Options) -> bool:
    """Whether the convolution is computed over split dims."""
    sizes = (
        x.shape[2:]
        if options.transposed
        else [-(-n // step) for n, step in zip(x.shape[2:], options.stride)]
    )
    return windows.last_dims_may_be_split(ctx, x.ndim - 2) and windows.halo_fits_shard(
        ctx, sizes, weight.shape[2:], options.dilation
    )


def _lax_convolution(
    x: jax.Array,
    weight: jax.Array,
    groups: int,
    pads: Sequence[tuple[int, int]],
    *,
    stride: Sequence[int] | None = None,
    input_dilation: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
) -> jax.Array:
    spatial = "DHW"[5 - x.ndim :]
    dims = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    # No preferred_element_type: XLA accumulates 16-bit convolutions in float32 anyway, and jax
    # cannot yet differentiate convolutions that have one.
    return lax.conv_general_dilated(
        x,
        weight,
        stride or (1,) * (x.ndim - 2),
        pads,
        input_dilation,
        dilation,
        dims,
        feature_group_count=groups,
        precision=matmul_precision(x.dtype),
    )


def _convolve_split(ctx: Context, x: jax.Array, weight: jax.Array, options: Options) -> jax.Array:
    """A convolution whose window moves by 1: the elements within a stride become channels."""
    if max(options.stride) == 1:
        return _lax_convolution(
            windows.crop_or_pad(x, [(p, p) for p in options.padding]),
            weight,
            options.groups,
            [(0, 0)] * len(options.stride),
            dilation=options.dilation,
        )
    weight = windows.dilate(ctx, weight, options.dilation)
    kernel = weight.shape[2:]
    edges = []
    for size, k, step, pad in zip(x.shape[2:], kernel, options.stride, options.padding):
        num = (size + 2 * pad - k) // step + 1
        reached = (num - 1) * step + -(-k // step) * step
        edges.append((pad, reached - size - pad))
    kept = [min(k, step) for k, step in zip(kernel, options.stride)]
    x = windows.phases_as_channels(windows.crop_or_pad(x, edges), options.stride, kept)
    return _lax_convolution(
        x,
        windows.phases_as_channels(weight, options.stride, kept),
        options.groups,
        [(0, 0)] * len(kernel),
    )


def _convolve_transposed_split(
    ctx: Context, x: jax.Array, weight: jax.Array, options: Options
) -> jax.Array:
    """A transposed convolution: a dilated input, over which the window moves by 1."""
    reach = [d * (k - 1) for d, k in zip(options.dilation, weight.shape[2:])]
    edges = [
        (r - p, r - p + extra)
        for r, p, extra in zip(reach, options.padding, options.output_padding)
    ]
    x = windows.crop_or_pad(windows.dilate(ctx, x, options.stride), edges)
    return _lax_convolution(
        x,
        _swap_channels(weight, options.groups),
        options.groups,
        [(0, 0)] * len(reach),
        dilation=options.dilation,
    )


# For kernels with more elements, the weight's gradient is one convolution over replicated dims: the
# alternative has one matrix product in the program for each element of the kernel.
_LARGE_KERNEL = 64


def weight_gradient(
    ctx: Context, grad: jax.Array, x: jax.Array, weight: jax.Array, options: Options
) -> jax.Array:
    """The gradient of the convolution's weight; of `weight` only the shape and dtype count."""
    kernel = weight.shape[2:]
    # For a grouped convolution whose batch is split over one of several axes, XLA's partitioner
    # counts each sum once for each position along the other axes.
    is_grouped = options.groups > 1 and ctx.num_devices > 1
    by_tap = is_grouped or _is_split(ctx, x, weight, options)
    if not by_tap or math.prod(kernel) > _LARGE_KERNEL:
        # Without groups, only the batch may be split: if one axis splits different dims of the two
        # operands, the sums are wrong.
        num_replicated = x.ndim - (not is_grouped)
        x, grad, ctx = (
            ctx.replicate_last_dims(x, num_replicated),
            ctx.replicate_last_dims(grad, num_replicated),
            replace(ctx, split_dims=frozenset()),
        )
        return jax.linear_transpose(lambda weight: convolve(ctx, x, weight, options), weight)(grad)[
            0
        ]
    # A transposed convolution's weight is that of the ordinary convolution from output to input.
    source, target = (grad, x) if options.transposed else (x, grad)
    return _weight_gradient_per_tap(source, target, kernel, options).reshape(weight.shape)


def _weight_gradient_per_tap(
    x: jax.Array, grad: jax.Array, kernel: Sequence[int], options: Options
) -> jax.Array:
    """The gradient of a convolution's weight, as a matrix product for each element of the kernel.

    The usual form is one convolution whose kernel is the split gradient. XLA's partitioner counts
    some of its sums twice (a stride of 2 with a padding of 2 over 4 elements on 8 devices, in
    complex64 and bfloat16). This form ends when the partitioner is correct there.
    """
    edges, spans = [], []
    for size, k, step, dilation, pad, num in zip(
        x.shape[2:], kernel, options.stride, options.dilation, options.padding, grad.shape[2:]
    ):
        spans.append((num - 1) * step + 1)
        edges.append((pad, dilation * (k - 1) + spans[-1] - size - pad))
    padded = windows.crop_or_pad(x, edges)
    by_group = [
        t.reshape(t.shape[0], options.groups, t.shape[1] // options.groups, *t.shape[2:])
        for t in (padded, grad)
    ]
    summed = (0, *range(3, grad.ndim + 1))
    taps = []
    for tap in np.ndindex(*kernel):
        starts = [at * dilation for at, dilation in zip(tap, options.dilation)]
        limits = [start + span for start, span in zip(starts, spans)]
        seen = lax.slice(
            by_group[0],
            (0, 0, 0, *starts),
            (*by_group[0].shape[:3], *limits),
            (1, 1, 1, *options.stride),
        )
        taps.append(
            lax.dot_general(
                by_group[1],
                seen,
                ((summed, summed), ((1,), (1,))),
                precision=matmul_precision(x.dtype),
                preferred_element_type=opmath(x.dtype),
            )
        )
    # (groups, outputs of each, inputs of each, taps)
    return jnp.stack(taps, axis=-1).astype(x.dtype)
