"""Average pooling over the last 2 or 3 dims (batch optional), forward and backward."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels import windows
from spmd_core.ops.kernels.halos import Images
from spmd_core.ops.kernels.precision import is_inexact, opmath
from spmd_core.ops.kernels.traits import Traits
from spmd_core.ops.kernels.windows import adaptive_windows, per_dim
from spmd_core.ops.registry import Context, ImageLayout, lowering


def _window_sums(
    ctx: Context,
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    sizes: Sequence[int],
) -> jax.Array:
    windows_of = (kernel, stride, padding, (1,) * len(kernel))
    layout = ctx.layout(ImageLayout)
    images = Images.of(layout, x.shape, sizes, *windows_of, needs_all_channels=False)
    if images is not None:
        alone, inner = ctx.on_one_device(), images.padding(padding)

        def part(x: jax.Array) -> list[jax.Array]:
            num = images.num_inside(sizes)
            return [_window_sums(alone, images.windows(x), kernel, stride, inner, num)]

        shape = (*x.shape[: x.ndim - len(kernel)], *sizes)
        return images.run(part, [x], [], [shape])[0]
    halo_fits = windows.halo_fits_shard(ctx, sizes, kernel, (1,) * len(kernel))
    is_split = windows.last_dims_may_be_split(ctx, len(kernel)) and halo_fits
    if is_split and max(stride) > 1:
        moved_by_one = [(n - 1) * s + 1 for n, s in zip(sizes, stride)]
        return windows.subsample(
            _window_sums(ctx, x, kernel, (1,) * len(kernel), padding, moved_by_one), stride
        )
    x = x if is_split else ctx.replicate_last_dims(x, len(kernel))
    lead = x.ndim - len(kernel)
    high = [
        (n - 1) * s + k - p - num_in
        for n, s, k, p, num_in in zip(sizes, stride, kernel, padding, x.shape[lead:])
    ]
    # reduce_window takes no negative padding: elements that no window reaches are cropped first.
    x = lax.slice(
        x,
        (0,) * x.ndim,
        (*x.shape[:lead], *(num_in + min(h, 0) for num_in, h in zip(x.shape[lead:], high))),
    )
    pads = [(0, 0)] * lead + [(p, max(h, 0)) for p, h in zip(padding, high)]
    sums = lax.reduce_window(
        x,
        np.zeros((), x.dtype),
        lax.add,
        (1,) * lead + tuple(kernel),
        (1,) * lead + tuple(stride),
        pads,
    )
    return sums if is_split else ctx.replicate_last_dims(sums, len(kernel))


def _window_counts(
    in_sizes: Sequence[int],
    out_sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    include_pad: bool,
) -> np.ndarray:
    """The number of elements in each window.

    Padding counts if `include_pad`; what ceil mode adds beyond the padding never counts.
    """
    counts = np.ones((1,) * len(kernel), np.int64)
    for d, (size, out_size) in enumerate(zip(in_sizes, out_sizes)):
        first = np.arange(out_size) * stride[d] - padding[d]
        last = np.minimum(first + kernel[d], size + padding[d])
        if not include_pad:
            first, last = np.maximum(first, 0), np.minimum(last, size)
        along = [1] * len(kernel)
        along[d] = out_size
        counts = counts * (last - first).reshape(along)
    return counts


def _divided(total: jax.Array, counts: Any) -> jax.Array:
    divisor = jnp.broadcast_to(jnp.asarray(counts).astype(total.dtype), total.shape)
    return total / divisor if is_inexact(total.dtype) else lax.div(total, divisor)


def _adaptive_sums(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    lead = x.ndim - len(sizes)
    for dim, num_out in enumerate(sizes, start=lead):
        num_in = x.shape[dim]
        if num_out and num_in % num_out == 0:
            x = jnp.sum(
                x.reshape(*x.shape[:dim], num_out, num_in // num_out, *x.shape[dim + 1 :]),
                axis=dim + 1,
            )
            continue
        first, last = adaptive_windows(num_in, num_out)
        index = first[:, None] + np.arange(int((last - first).max(initial=1)))
        inside = (index < last[:, None]).reshape(*index.shape, *(1,) * (x.ndim - dim - 1))
        windows = jnp.take(x, np.minimum(index, num_in - 1), axis=dim)
        x = jnp.sum(jnp.where(inside, windows, jnp.zeros((), x.dtype)), axis=dim + 1)
    return x


def _adaptive_counts(in_sizes: Sequence[int], out_sizes: Sequence[int]) -> np.ndarray:
    counts = np.ones((1,) * len(out_sizes), np.int64)
    for d, (num_in, num_out) in enumerate(zip(in_sizes, out_sizes)):
        first, last = adaptive_windows(num_in, num_out)
        along = [1] * len(out_sizes)
        along[d] = num_out
        counts = counts * (last - first).reshape(along)
    return counts


def _register_mean_pool(num_dims: int) -> None:
    def spatial(x: jax.Array) -> tuple[int, ...]:
        return x.shape[x.ndim - num_dims :]

    @lowering(f"aten.avg_pool{num_dims}d.default", traits=Traits(images=(0,)))
    def forward(
        ctx: Context,
        x: Any,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> jax.Array:
        kernel = per_dim(kernel_size, num_dims)
        stride, padding = per_dim(stride, num_dims, kernel), per_dim(padding, num_dims)
        sizes = ctx.shape[len(ctx.shape) - num_dims :]
        total = _window_sums(ctx, x.astype(opmath(x.dtype)), kernel, stride, padding, sizes)
        counts = divisor_override or _window_counts(
            spatial(x), sizes, kernel, stride, padding, count_include_pad
        )
        return _divided(total, counts).astype(ctx.dtype)

    @lowering(f"aten.avg_pool{num_dims}d_backward.default", traits=Traits(images=(0, 1)))
    def backward(
        ctx: Context,
        grad: Any,
        x: Any,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> jax.Array:
        kernel = per_dim(kernel_size, num_dims)
        stride, padding = per_dim(stride, num_dims, kernel), per_dim(padding, num_dims)
        dtype = opmath(x.dtype)
        counts = divisor_override or _window_counts(
            spatial(x), spatial(grad), kernel, stride, padding, count_include_pad
        )
        sums = jax.linear_transpose(
            lambda x: _window_sums(ctx, x, kernel, stride, padding, spatial(grad)),
            jax.ShapeDtypeStruct(x.shape, dtype),
        )
        return sums(_divided(grad.astype(dtype), counts))[0].astype(ctx.dtype)


_register_mean_pool(2)
_register_mean_pool(3)


@lowering("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def _adaptive_avg_pool(ctx: Context, x: Any, output_size: Any) -> jax.Array:
    sizes = tuple(output_size)
    total = _adaptive_sums(x.astype(opmath(x.dtype)), sizes)
    return _divided(total, _adaptive_counts(x.shape[x.ndim - len(sizes) :], sizes)).astype(
        ctx.dtype
    )


def _adaptive_avg_pool_backward(
    ctx: Context, grad: jax.Array, x: jax.Array, num_dims: int
) -> jax.Array:
    dtype = opmath(x.dtype)
    lead = x.ndim - num_dims
    sizes = grad.shape[lead:]
    sums = jax.linear_transpose(
        lambda x: _adaptive_sums(x, sizes), jax.ShapeDtypeStruct(x.shape, dtype)
    )
    return sums(_divided(grad.astype(dtype), _adaptive_counts(x.shape[lead:], sizes)))[0].astype(
        ctx.dtype
    )


@lowering("aten._adaptive_avg_pool2d_backward.default")
def _adaptive_avg_pool2d_backward(ctx: Context, grad: Any, x: Any) -> jax.Array:
    return _adaptive_avg_pool_backward(ctx, grad, x, 2)


@lowering("aten._adaptive_avg_pool3d_backward.default")
def _adaptive_avg_pool3d_backward(ctx: Context, grad: Any, x: Any) -> jax.Array:
    return _adaptive_avg_pool_backward(ctx, grad, x, 3)
