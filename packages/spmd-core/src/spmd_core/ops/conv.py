"""Convolutions over 1 to 3 spatial dims: (batch, channel, ...) and a weight in, (batch, channel, ...) out; and their gradients."""

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
from spmd_core.ops.kernels.windows import each
from spmd_core.ops.registry import Context, lowering


@dataclass(frozen=True)
class _Form:
    """What is static about one convolution; one number of each per spatial dim."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def _form(
    num_dims: int,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> _Form:
    stride, padding, dilation, output_padding = (
        each(v, num_dims) for v in (stride, padding, dilation, output_padding)
    )
    return _Form(stride, padding, dilation, transposed, output_padding, groups)


def _swap_channels(weight: jax.Array, groups: int) -> jax.Array:
    """A transposed convolution's weight (in, out / groups, ...) as an ordinary one's (out, in / groups, ...), the kernel reversed."""
    num_in, num_out, *kernel = weight.shape
    grouped = weight.reshape(groups, num_in // groups, num_out, *kernel)
    return jnp.flip(
        jnp.swapaxes(grouped, 1, 2).reshape(groups * num_out, num_in // groups, *kernel),
        tuple(range(2, weight.ndim)),
    )


def _operands(ctx: Context, *arrays: jax.Array) -> Any:
    """What is multiplied: on a CPU in the dtype in which torch computes, so that 16 bits are rounded once; chips have units for 16 bits."""
    return [x.astype(opmath(x.dtype)) for x in arrays] if ctx.platform == "cpu" else arrays


def _convolve(ctx: Context, x: jax.Array, weight: jax.Array, form: _Form) -> jax.Array:
    """The convolution, linear in each operand. Neither it nor its transposes dilate what may be split (see `windows`)."""
    num_dims = x.ndim - 2
    if _is_split(ctx, x, weight, form):
        return (
            _transposed_of_split(ctx, x, weight, form)
            if form.transposed
            else _convolve_split(ctx, x, weight, form)
        )
    x = ctx.keep_whole(x, num_dims)
    if form.transposed:
        # The gradient of a convolution with this stride: the input is spread out and the window slides over it by 1.
        reach = [d * (k - 1) for d, k in zip(form.dilation, weight.shape[2:])]
        pads = [
            (r - p, r - p + extra) for r, p, extra in zip(reach, form.padding, form.output_padding)
        ]
        out = _dense(
            x,
            _swap_channels(weight, form.groups),
            form.groups,
            pads,
            spread=form.stride,
            dilation=form.dilation,
        )
    else:
        out = _dense(
            x,
            weight,
            form.groups,
            [(p, p) for p in form.padding],
            stride=form.stride,
            dilation=form.dilation,
        )
    return ctx.keep_whole(out, num_dims)


def _is_split(ctx: Context, x: jax.Array, weight: jax.Array, form: _Form) -> bool:
    """Whether the convolution is computed over dims that lie split."""
    sizes = (
        x.shape[2:]
        if form.transposed
        else [-(-n // step) for n, step in zip(x.shape[2:], form.stride)]
    )
    return windows.are_split(ctx, x.ndim - 2) and windows.stay_near(
        ctx, sizes, weight.shape[2:], form.dilation
    )


def _dense(
    x: jax.Array, weight: jax.Array, groups: int, pads: Sequence[tuple[int, int]], *,
    stride: Sequence[int] | None = None, spread: Sequence[int] | None = None, dilation: Sequence[int] | None = None,
) -> jax.Array:  # fmt: skip
    spatial = "DHW"[5 - x.ndim :]
    dims = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    # No preferred_element_type: XLA accumulates 16-bit convolutions in float32 anyway, and with it jax cannot differentiate them.
    return lax.conv_general_dilated(
        x,
        weight,
        stride or (1,) * (x.ndim - 2),
        pads,
        spread,
        dilation,
        dims,
        feature_group_count=groups,
        precision=matmul_precision(x.dtype),
    )


def _convolve_split(ctx: Context, x: jax.Array, weight: jax.Array, form: _Form) -> jax.Array:
    """A convolution whose window moves by 1, however large the stride: what lies within a stride becomes channels."""
    if max(form.stride) == 1:
        return _dense(
            windows.cut_or_pad(x, [(p, p) for p in form.padding]),
            weight,
            form.groups,
            [(0, 0)] * len(form.stride),
            dilation=form.dilation,
        )
    weight = windows.spread(ctx, weight, form.dilation)
    kernel = weight.shape[2:]
    edges = []
    for size, k, step, pad in zip(x.shape[2:], kernel, form.stride, form.padding):
        num = (size + 2 * pad - k) // step + 1
        reached = (num - 1) * step + -(-k // step) * step
        edges.append((pad, reached - size - pad))
    kept = [min(k, step) for k, step in zip(kernel, form.stride)]
    x = windows.phases_as_channels(windows.cut_or_pad(x, edges), form.stride, kept)
    return _dense(
        x,
        windows.phases_as_channels(weight, form.stride, kept),
        form.groups,
        [(0, 0)] * len(kernel),
    )


def _transposed_of_split(ctx: Context, x: jax.Array, weight: jax.Array, form: _Form) -> jax.Array:
    """A transposed convolution: the input spread out by zeros, and a window that moves by 1."""
    reach = [d * (k - 1) for d, k in zip(form.dilation, weight.shape[2:])]
    edges = [
        (r - p, r - p + extra) for r, p, extra in zip(reach, form.padding, form.output_padding)
    ]
    x = windows.cut_or_pad(windows.spread(ctx, x, form.stride), edges)
    return _dense(
        x,
        _swap_channels(weight, form.groups),
        form.groups,
        [(0, 0)] * len(reach),
        dilation=form.dilation,
    )


# Beyond so many elements in a kernel its gradient is one convolution over whole dims: the other form's program is as long as the kernel is large.
_LARGE_KERNEL = 64


def _weight_gradient(
    ctx: Context, grad: jax.Array, x: jax.Array, weight: jax.Array, form: _Form
) -> jax.Array:
    num_dims, kernel = x.ndim - 2, weight.shape[2:]
    if not _is_split(ctx, x, weight, form) or math.prod(kernel) > _LARGE_KERNEL:
        x, grad, ctx = (
            ctx.keep_whole(x, num_dims),
            ctx.keep_whole(grad, num_dims),
            replace(ctx, split_dims=frozenset()),
        )
        return jax.linear_transpose(lambda weight: _convolve(ctx, x, weight, form), weight)(grad)[0]
    # A transposed convolution's weight is that of the ordinary one from its output to its input.
    source, target = (grad, x) if form.transposed else (x, grad)
    return _tap_by_tap(source, target, kernel, form).reshape(weight.shape)


def _tap_by_tap(x: jax.Array, grad: jax.Array, kernel: Sequence[int], form: _Form) -> jax.Array:
    """The gradient of a convolution's weight as a matrix product for each element of the kernel. As one convolution, whose kernel would be the split
    gradient, XLA's partitioner counts some sums twice (a stride of 2 with a padding of 2 over 4 elements on 8 devices, in complex64 and bfloat16)."""
    edges, spans = [], []
    for size, k, step, dilation, pad, num in zip(
        x.shape[2:], kernel, form.stride, form.dilation, form.padding, grad.shape[2:]
    ):
        spans.append((num - 1) * step + 1)
        edges.append((pad, dilation * (k - 1) + spans[-1] - size - pad))
    padded = windows.cut_or_pad(x, edges)
    by_group = [
        t.reshape(t.shape[0], form.groups, t.shape[1] // form.groups, *t.shape[2:])
        for t in (padded, grad)
    ]
    summed = (0, *range(3, grad.ndim + 1))
    taps = []
    for tap in np.ndindex(*kernel):
        starts = [at * dilation for at, dilation in zip(tap, form.dilation)]
        limits = [start + span for start, span in zip(starts, spans)]
        seen = lax.slice(
            by_group[0],
            (0, 0, 0, *starts),
            (*by_group[0].shape[:3], *limits),
            (1, 1, 1, *form.stride),
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
    return jnp.stack(taps, axis=-1).astype(
        x.dtype
    )  # (groups, outputs of each, inputs of each, taps)


@lowering("aten.convolution.default", "aten.convolution_overrideable.default")
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
    x, weight = _operands(ctx, x, weight)
    out = _convolve(
        ctx,
        x,
        weight,
        _form(x.ndim - 2, stride, padding, dilation, transposed, output_padding, groups),
    )
    if bias is None:
        return out.astype(ctx.dtype)
    # Added in the wide dtype: where bias and product cancel, a product that was rounded before leaves nothing but its error.
    wide = opmath(out.dtype)
    return (out.astype(wide) + bias.astype(wide).reshape(1, -1, *(1,) * (out.ndim - 2))).astype(
        ctx.dtype
    )


@lowering("aten.convolution_backward.default")
def _convolution_backward(
    ctx: Context, grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any,
    groups: int, output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:  # fmt: skip
    form = _form(x.ndim - 2, stride, padding, dilation, transposed, output_padding, groups)
    grad, x, weight = _operands(ctx, grad, x, weight)
    # A convolution is linear in each operand; the transpose does not compute the forward again, as a vjp would.
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        (grad_x,) = jax.linear_transpose(lambda x: _convolve(ctx, x, weight, form), x)(grad)
    if output_mask[1]:
        grad_weight = _weight_gradient(ctx, grad, x, weight, form)
    if output_mask[2]:
        wide = jnp.promote_types(grad.dtype, jnp.float32)
        grad_bias = jnp.sum(grad.astype(wide), axis=(0, *range(2, grad.ndim)))
    return tuple(
        None if g is None else g.astype(ctx.dtype) for g in (grad_x, grad_weight, grad_bias)
    )


@lowering("aten.convolution_backward_overrideable.default")
def _convolution_backward_overrideable(
    ctx: Context, grad: Any, x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:  # fmt: skip
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
