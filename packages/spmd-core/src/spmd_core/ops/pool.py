"""Max and average pooling over the last 2 or 3 dims (batch optional), forward and backward."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels import windows
from spmd_core.ops.kernels.precision import is_inexact, opmath
from spmd_core.ops.kernels.windows import crop_or_pad, per_dim
from spmd_core.ops.registry import Context, lowering

_INT64 = np.dtype(np.int64)


# ---- windows -------------------------------------------------------------------------------------


def _window_slice(x: jax.Array, dim: int, offset: int, size: int, stride: int) -> jax.Array:
    """The elements at `offset`, `offset + stride`, ... along `dim`, `size` of them."""
    return lax.slice_in_dim(x, offset, offset + (size - 1) * stride + 1, stride, dim)


def _pad_dim(x: jax.Array, dim: int, low: int, high: int, value: Any) -> jax.Array:
    """Pads one dim; a negative number crops elements that no window of floor mode reaches."""
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (low, high, 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def _adaptive_windows(num_in: int, num_out: int) -> tuple[np.ndarray, np.ndarray]:
    """The first element of each window and one past its last, as in torch.

    These are floor(i * in / out) and ceil((i + 1) * in / out).
    """
    i = np.arange(num_out)
    return i * num_in // num_out, -((-(i + 1) * num_in) // num_out)


# ---- maximum -------------------------------------------------------------------------------------


def _replaces_best(
    value: jax.Array, position: jax.Array, best: jax.Array, best_position: jax.Array
) -> jax.Array:
    """Whether a later candidate replaces the best one so far, element by element.

    It does where it is larger, or NaN, or the first that is not padding (position -1).
    """
    wins = value > best
    if is_inexact(value.dtype):
        wins |= jnp.isnan(value)
    return (position >= 0) & (wins | (best_position < 0))


def _best_of(
    candidates: list[tuple[list[jax.Array], jax.Array]],
) -> tuple[list[jax.Array], jax.Array]:
    """The best of the ([value, positions in the dims done ...], position), element by element."""
    best, best_position = candidates[0]
    for fields, position in candidates[1:]:
        wins = _replaces_best(fields[0], position, best[0], best_position)
        best = [jnp.where(wins, new, old) for new, old in zip(fields, best)]
        best_position = jnp.where(wins, position, best_position)
    return best, best_position


def _max_pool(
    ctx: Context,
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    sizes: Sequence[int],
) -> tuple[jax.Array, jax.Array]:
    """The maxima, and their flat positions among the spatial elements; of equal values the first.

    One dim at a time, from the last one: the first maximum of the first best row is the first
    maximum of the window. This takes kh + kw steps instead of kh * kw.
    """
    num_dims = len(kernel)
    x = windows.keep_whole_unless_halo_fits(ctx, x, sizes, kernel, dilation, num_dims=num_dims)
    lowest = -jnp.inf if is_inexact(x.dtype) else jnp.iinfo(x.dtype).min
    fields = [x]  # the value, then its positions along the dims already done, the last dim's last
    for d in reversed(range(num_dims)):
        dim = x.ndim - num_dims + d
        high = (
            (sizes[d] - 1) * stride[d]
            + dilation[d] * (kernel[d] - 1)
            + 1
            - padding[d]
            - x.shape[dim]
        )
        position = lax.broadcasted_iota(_INT64, fields[0].shape, dim)
        padded = [
            _pad_dim(f, dim, padding[d], high, lowest if i == 0 else 0)
            for i, f in enumerate(fields)
        ]
        position = _pad_dim(position, dim, padding[d], high, -1)
        candidates = []
        for k in range(kernel[d]):
            window = [
                _window_slice(f, dim, k * dilation[d], sizes[d], stride[d])
                for f in (*padded, position)
            ]
            candidates.append((window[:-1], window[-1]))
        best, best_position = _best_of(candidates)
        fields = [best[0], best_position, *best[1:]]
    fields = [
        windows.keep_whole_unless_halo_fits(ctx, f, sizes, kernel, dilation, num_dims=num_dims)
        for f in fields
    ]
    return fields[0], _flat_position(fields[1:], x.shape[x.ndim - num_dims :])


def _flat_position(positions: Sequence[jax.Array], sizes: Sequence[int]) -> jax.Array:
    flat = positions[0]
    for position, size in zip(positions[1:], sizes[1:]):
        flat = flat * size + position
    return flat


def _gradient_by_scatter(
    grad: jax.Array, indices: jax.Array, shape: tuple[int, ...], num_dims: int
) -> jax.Array:
    """The sum of `grad` at each flat spatial position, as a scatter: for windows of any form."""
    leading, spatial = shape[: len(shape) - num_dims], shape[len(shape) - num_dims :]
    rows, columns = int(np.prod(leading)), int(np.prod(spatial))
    zeros = jnp.zeros((rows, columns), grad.dtype)
    row = lax.broadcasted_iota(_INT64, (rows, int(np.prod(grad.shape[len(leading) :]))), 0)
    return zeros.at[row, indices.reshape(row.shape)].add(grad.reshape(row.shape)).reshape(shape)


def _gradient_per_tap(
    ctx: Context,
    grad: jax.Array,
    indices: jax.Array,
    shape: tuple[int, ...],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> jax.Array:
    """As `_gradient_by_scatter`, for regular windows: a masked sum for each element of the kernel.

    Each sum moves the gradients of the windows whose maximum was at this element of the kernel to
    the positions that the element read. Unlike a scatter, this stays local when the batch, the
    channels or the spatial dims are sharded.
    """
    num_dims = len(kernel)
    spatial, out_sizes = shape[len(shape) - num_dims :], grad.shape[len(shape) - num_dims :]
    grad, indices = (
        windows.keep_whole_unless_halo_fits(ctx, t, out_sizes, kernel, dilation, num_dims=num_dims)
        for t in (grad, indices)
    )
    total = jnp.zeros(shape, grad.dtype)
    for offsets in np.ndindex(*kernel):
        coordinates, inside, edges = [], [], []
        for d, (offset, size, out_size) in enumerate(zip(offsets, spatial, out_sizes)):
            first = offset * dilation[d] - padding[d]
            along = [1] * num_dims
            along[d] = out_size
            coordinate = (np.arange(out_size) * stride[d] + first).reshape(along)
            coordinates.append(jnp.asarray(coordinate))
            inside.append((coordinate >= 0) & (coordinate < size))
            edges.append((first, size - first - (out_size - 1) * stride[d] - 1))
        won = indices == _flat_position(coordinates, spatial)
        for mask in inside:
            won &= mask
        total += crop_or_pad(
            windows.dilate(ctx, jnp.where(won, grad, jnp.zeros_like(grad)), stride), edges
        )
    return windows.keep_whole_unless_halo_fits(
        ctx, total, out_sizes, kernel, dilation, num_dims=num_dims
    )


# For kernels with more elements a scatter costs less than `_gradient_per_tap`, whose program grows
# with the kernel.
_LARGE_KERNEL = 64


def _register_max_pool(num_dims: int) -> None:
    def geometry(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> Any:
        kernel = per_dim(kernel_size, num_dims)
        return (
            kernel,
            per_dim(stride, num_dims, kernel),
            per_dim(padding, num_dims),
            per_dim(dilation, num_dims),
        )

    @lowering(f"aten.max_pool{num_dims}d_with_indices.default")
    def forward(
        ctx: Context,
        x: Any,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = (0,),
        dilation: Any = (1,),
        ceil_mode: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        kernel, strides, paddings, dilations = geometry(kernel_size, stride, padding, dilation)
        return _max_pool(
            ctx, x, kernel, strides, paddings, dilations, ctx.shape[len(ctx.shape) - num_dims :]
        )

    @lowering(f"aten.max_pool{num_dims}d_with_indices_backward.default")
    def backward(
        ctx: Context,
        grad: Any,
        x: Any,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        indices: Any,
    ) -> jax.Array:
        kernel, *rest = geometry(kernel_size, stride, padding, dilation)
        wide = grad.astype(opmath(grad.dtype))
        if np.prod(kernel) > _LARGE_KERNEL:
            return _gradient_by_scatter(wide, indices, x.shape, num_dims).astype(ctx.dtype)
        return _gradient_per_tap(ctx, wide, indices, x.shape, kernel, *rest).astype(ctx.dtype)

    @lowering(f"aten.adaptive_max_pool{num_dims}d.default")
    def adaptive(ctx: Context, x: Any, output_size: Any) -> tuple[jax.Array, jax.Array]:
        fields = [x]
        for d in reversed(range(num_dims)):
            dim = x.ndim - num_dims + d
            first, last = _adaptive_windows(x.shape[dim], ctx.shape[dim])
            candidates = []
            for k in range(int((last - first).max(initial=1))):
                index = np.minimum(first + k, x.shape[dim] - 1)
                window = [jnp.take(f, index, axis=dim) for f in fields]
                position = np.where(first + k < last, index, -1).reshape(
                    -1, *(1,) * (x.ndim - dim - 1)
                )
                candidates.append(
                    (window, jnp.broadcast_to(jnp.asarray(position), window[0].shape))
                )
            best, best_position = _best_of(candidates)
            fields = [best[0], best_position, *best[1:]]
        return fields[0], _flat_position(fields[1:], x.shape[x.ndim - num_dims :])

    @lowering(f"aten.adaptive_max_pool{num_dims}d_backward.default")
    def adaptive_backward(ctx: Context, grad: Any, x: Any, indices: Any) -> jax.Array:
        return _gradient_by_scatter(
            grad.astype(opmath(grad.dtype)), indices, x.shape, num_dims
        ).astype(ctx.dtype)


# ---- fractional maximum --------------------------------------------------------------------------
# Windows of one size at pseudo-random positions (Graham 2014, "Fractional Max-Pooling").


def _first_elements(samples: jax.Array, num_in: int, num_out: int, kernel: int) -> jax.Array:
    """Where the windows begin along one dim, for each batch element and channel.

    The steps are a pseudo-random sequence; the last window ends with the dim.
    """
    if num_out == 1:
        return jnp.full((*samples.shape, 1), num_in - kernel)
    alpha = jnp.asarray((num_in - kernel) / (num_out - 1), samples.dtype)
    steps = jnp.arange(num_out - 1, dtype=samples.dtype)
    begins = jnp.floor((steps + samples[..., None]) * alpha) - jnp.floor(samples[..., None] * alpha)
    return jnp.concatenate(
        [begins.astype(_INT64), jnp.full((*samples.shape, 1), num_in - kernel)], axis=-1
    )


def _register_fractional_max_pool(num_dims: int) -> None:
    @lowering(f"aten.fractional_max_pool{num_dims}d.default")
    def forward(
        ctx: Context, x: Any, kernel_size: Any, output_size: Any, random_samples: Any
    ) -> tuple[jax.Array, jax.Array]:
        kernel, sizes = per_dim(kernel_size, num_dims), per_dim(output_size, num_dims)
        spatial = x.shape[x.ndim - num_dims :]
        fields = [x.reshape(*random_samples.shape[:2], *spatial)]
        for d in reversed(range(num_dims)):
            # torch's samples stand in the order width, height for two dims, and in the order of
            # the dims for three.
            sample = random_samples[..., num_dims - 1 - d if num_dims == 2 else d]
            begins = _first_elements(sample, spatial[d], sizes[d], kernel[d])
            begins = begins.reshape(
                *begins.shape[:2], *(1,) * d, sizes[d], *(1,) * (num_dims - 1 - d)
            )
            candidates = []
            for k in range(kernel[d]):
                window = [
                    jnp.take_along_axis(f, begins + k, axis=d + 2, mode="clip") for f in fields
                ]
                candidates.append((window, jnp.broadcast_to(begins + k, window[0].shape)))
            best, position = _best_of(candidates)
            fields = [best[0], position, *best[1:]]
        return fields[0].reshape(ctx.shape), _flat_position(fields[1:], spatial).reshape(ctx.shape)

    @lowering(
        f"aten.fractional_max_pool{num_dims}d_backward.default",
        meta=lambda grad, x, *rest: x.new_empty(x.shape),
    )
    def backward(
        ctx: Context, grad: Any, x: Any, kernel_size: Any, output_size: Any, indices: Any
    ) -> jax.Array:
        return _gradient_by_scatter(
            grad.astype(opmath(grad.dtype)), indices, x.shape, num_dims
        ).astype(ctx.dtype)


# ---- mean ----------------------------------------------------------------------------------------


def _window_sums(
    ctx: Context,
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    sizes: Sequence[int],
) -> jax.Array:
    halo_fits = windows.halo_fits_shard(ctx, sizes, kernel, (1,) * len(kernel))
    is_split = windows.last_dims_may_be_split(ctx, len(kernel)) and halo_fits
    if is_split and max(stride) > 1:
        moved_by_one = [(n - 1) * s + 1 for n, s in zip(sizes, stride)]
        return windows.subsample(
            _window_sums(ctx, x, kernel, (1,) * len(kernel), padding, moved_by_one), stride
        )
    x = x if is_split else ctx.keep_whole(x, len(kernel))
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
    return sums if is_split else ctx.keep_whole(sums, len(kernel))


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
        first, last = _adaptive_windows(num_in, num_out)
        index = first[:, None] + np.arange(int((last - first).max(initial=1)))
        inside = (index < last[:, None]).reshape(*index.shape, *(1,) * (x.ndim - dim - 1))
        windows = jnp.take(x, np.minimum(index, num_in - 1), axis=dim)
        x = jnp.sum(jnp.where(inside, windows, jnp.zeros((), x.dtype)), axis=dim + 1)
    return x


def _adaptive_counts(in_sizes: Sequence[int], out_sizes: Sequence[int]) -> np.ndarray:
    counts = np.ones((1,) * len(out_sizes), np.int64)
    for d, (num_in, num_out) in enumerate(zip(in_sizes, out_sizes)):
        first, last = _adaptive_windows(num_in, num_out)
        along = [1] * len(out_sizes)
        along[d] = num_out
        counts = counts * (last - first).reshape(along)
    return counts


def _register_mean_pool(num_dims: int) -> None:
    def spatial(x: jax.Array) -> tuple[int, ...]:
        return x.shape[x.ndim - num_dims :]

    @lowering(f"aten.avg_pool{num_dims}d.default")
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

    @lowering(f"aten.avg_pool{num_dims}d_backward.default")
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


_register_max_pool(2)
_register_max_pool(3)
_register_fractional_max_pool(2)
_register_fractional_max_pool(3)
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
