"""Max pooling over the last 2 or 3 dims (batch optional), forward and backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels import windows
from spmd_core.ops.kernels.halos import Images
from spmd_core.ops.kernels.precision import is_inexact, opmath
from spmd_core.ops.kernels.traits import CHOICE, Compared, Traits
from spmd_core.ops.kernels.windows import adaptive_windows, crop_or_pad, per_dim
from spmd_core.ops.registry import Context, ImageLayout, lowering

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


@dataclass(frozen=True)
class _Within:
    """The first of the rows that one device reads, in the global images, and the images' sizes."""

    starts: Sequence[Any]
    sizes: Sequence[int]


def _max_pool(
    ctx: Context,
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    sizes: Sequence[int],
    within: "_Within | None" = None,
) -> tuple[jax.Array, jax.Array]:
    """The maxima, and their flat positions among the spatial elements; of equal values the first.

    One dim at a time, from the last one: the first maximum of the first best row is the first
    maximum of the window. This takes kh + kw steps instead of kh * kw.
    """
    num_dims = len(kernel)
    x = windows.replicate_unless_halo_fits(ctx, x, sizes, kernel, dilation, num_dims=num_dims)
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
        # Positions have size 1 in the other dims: XLA would fold windows over a constant of the
        # full size when it compiles, and keep the result in the program.
        along = [n if i == dim else 1 for i, n in enumerate(fields[0].shape)]
        position = lax.broadcasted_iota(_INT64, along, dim)
        if within is not None:
            position = position + within.starts[d]
            position = jnp.where((position >= 0) & (position < within.sizes[d]), position, -1)
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
        fields = [best[0], jnp.broadcast_to(best_position, best[0].shape), *best[1:]]
    fields = [
        windows.replicate_unless_halo_fits(ctx, f, sizes, kernel, dilation, num_dims=num_dims)
        for f in fields
    ]
    spatial = x.shape[x.ndim - num_dims :] if within is None else within.sizes
    return fields[0], _flat_position(fields[1:], spatial)


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
    within: _Within | None = None,
) -> jax.Array:
    """As `_gradient_by_scatter`, for regular windows: a masked sum for each element of the kernel.

    Each sum moves the gradients of the windows whose maximum was at this element of the kernel to
    the positions that the element read. These are `stride` apart, so sums are added up by their
    position within a stride, and put between each other at the end. Unlike a scatter, this stays
    local when the batch, the channels or the spatial dims are sharded.
    """
    num_dims = len(kernel)
    spatial, out_sizes = shape[len(shape) - num_dims :], grad.shape[len(shape) - num_dims :]
    within = _Within((0,) * num_dims, spatial) if within is None else within
    grad, indices = (
        windows.replicate_unless_halo_fits(ctx, t, out_sizes, kernel, dilation, num_dims=num_dims)
        for t in (grad, indices)
    )
    taps = _taps_of_maxima(indices, kernel, stride, padding, dilation, within)
    # Window r reads, at element k, the element r * stride + k * dilation - padding: that is the
    # one at `phase` within the stride of number r + before.
    nums = [-(-size // step) for size, step in zip(spatial, stride)]
    places = [
        [divmod(k * dilation[d] - padding[d], stride[d]) for k in range(kernel[d])]
        for d in range(num_dims)
    ]
    offsets = [[before for before, _ in of_dim] for of_dim in places]
    edges = [
        (max(0, *of_dim), max(0, num - out_size - min(of_dim)))
        for of_dim, num, out_size in zip(offsets, nums, out_sizes)
    ]
    grad, taps = crop_or_pad(grad, edges), crop_or_pad(taps, edges, -1)
    if ctx.platform == "cpu":
        # Else XLA would compute the elements of the kernel again for each of its slices.
        grad, taps = lax.optimization_barrier((grad, taps))
    sums: dict[tuple[int, ...], Any] = {}
    for tap, at in enumerate(np.ndindex(*kernel)):
        phase = tuple(of_dim[k][1] for of_dim, k in zip(places, at))
        starts = [low - of_dim[k] for (low, _), of_dim, k in zip(edges, offsets, at)]
        seen = (..., *(slice(start, start + num) for start, num in zip(starts, nums)))
        part = jnp.where(taps[seen] == tap, grad[seen], jnp.zeros((), grad.dtype))
        sums[phase] = sums[phase] + part if phase in sums else part
    nothing = jnp.zeros((*shape[: len(shape) - num_dims], *nums), grad.dtype)
    parts = {at: sums.get(at, nothing) for at in np.ndindex(*stride)}
    total = windows.interleaved(ctx, parts, stride)
    total = crop_or_pad(total, [(0, size - n * s) for size, n, s in zip(spatial, nums, stride)])
    return windows.replicate_unless_halo_fits(
        ctx, total, out_sizes, kernel, dilation, num_dims=num_dims
    )


def _taps_of_maxima(
    indices: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    within: _Within,
) -> jax.Array:
    """For each window, the number of the kernel's element that read the flat position in `indices`.

    -1 if none did.
    """
    num_dims = len(kernel)
    fits = np.prod(within.sizes) <= np.iinfo(np.int32).max
    left = indices.astype(np.int32 if fits else _INT64)
    found, is_read = jnp.zeros((), left.dtype), jnp.ones((), bool)
    places = 1
    for d in reversed(range(num_dims)):
        size = jnp.asarray(within.sizes[d], left.dtype)
        coordinate, left = lax.rem(left, size), lax.div(left, size)
        along = [1] * num_dims
        along[d] = indices.shape[indices.ndim - num_dims + d]
        first = (np.arange(along[d]) * stride[d] - padding[d]).reshape(along)
        offset = coordinate - (jnp.asarray(first) + within.starts[d]).astype(left.dtype)
        step = jnp.asarray(dilation[d], left.dtype)
        is_read &= (offset >= 0) & (offset < dilation[d] * kernel[d])
        is_read &= lax.rem(offset, step) == 0
        found += lax.div(offset, step) * places
        places *= kernel[d]
    return jnp.where(is_read, found, -1).astype(np.int32)


# ---- over split images: every device pools the rows that it has and fetches ----------------------


def _within(images: Images, sizes: Sequence[int], lead: int) -> _Within:
    starts = images.window_starts()
    return _Within([starts.get(lead + d, 0) for d in range(len(sizes))], sizes)


def _max_pool_of_images(
    ctx: Context,
    images: Images,
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    sizes: Sequence[int],
) -> tuple[jax.Array, jax.Array]:
    """As `_max_pool`: every device fetches the rows that its results read."""
    alone, lead = ctx.on_one_device(), x.ndim - len(kernel)
    spatial, inner = x.shape[lead:], images.padding(padding)

    def part(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        within, num = _within(images, spatial, lead), images.num_inside(sizes)
        return _max_pool(alone, images.windows(x), kernel, stride, inner, dilation, num, within)

    shape = (*x.shape[:lead], *sizes)
    best, position = images.run(part, [x], [], [shape, shape])
    return best, position


def _max_gradient_of_images(
    ctx: Context,
    images: Images,
    grad: jax.Array,
    indices: jax.Array,
    shape: tuple[int, ...],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> jax.Array:
    """As `_gradient_per_tap`: devices send gradients of the rows that they fetched back."""
    alone, lead = ctx.on_one_device(), len(shape) - len(kernel)
    inner = images.padding(padding)

    def part(grad: jax.Array, indices: jax.Array) -> list[jax.Array]:
        within = _within(images, shape[lead:], lead)
        read = images.read_shape((*grad.shape[:lead], *shape[lead:]))
        total = _gradient_per_tap(
            alone, grad, indices, read, kernel, stride, inner, dilation, within
        )
        return [images.returned(total)]

    return images.run(part, [grad, indices], [], [shape])[0]


# For kernels with more elements a scatter costs less than `_gradient_per_tap`, whose program grows
# with the kernel.
_LARGE_KERNEL = 64


def _register_max_pool(num_dims: int) -> None:
    """Windows of one size, and their gradient."""

    def geometry(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> Any:
        kernel = per_dim(kernel_size, num_dims)
        return (
            kernel,
            per_dim(stride, num_dims, kernel),
            per_dim(padding, num_dims),
            per_dim(dilation, num_dims),
        )

    @lowering(
        f"aten.max_pool{num_dims}d_with_indices.default",
        traits=Traits(images=(0,), compared=Compared.ELEMENTS),
    )
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
        sizes = ctx.shape[len(ctx.shape) - num_dims :]
        images = Images.of(
            ctx.layout(ImageLayout),
            x.shape,
            sizes,
            kernel,
            strides,
            paddings,
            dilations,
            needs_all_channels=False,
        )
        if images is not None:
            return _max_pool_of_images(ctx, images, x, kernel, strides, paddings, dilations, sizes)
        return _max_pool(ctx, x, kernel, strides, paddings, dilations, sizes)

    @lowering(
        f"aten.max_pool{num_dims}d_with_indices_backward.default", traits=Traits(images=(0, 1))
    )
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
        sizes = grad.shape[grad.ndim - num_dims :]
        layout = ctx.layout(ImageLayout)
        images = Images.of(layout, x.shape, sizes, kernel, *rest, needs_all_channels=False)
        if np.prod(kernel) <= _LARGE_KERNEL and images is not None:
            return _max_gradient_of_images(
                ctx, images, wide, indices, x.shape, kernel, *rest
            ).astype(ctx.dtype)
        if np.prod(kernel) > _LARGE_KERNEL:
            return _gradient_by_scatter(wide, indices, x.shape, num_dims).astype(ctx.dtype)
        return _gradient_per_tap(ctx, wide, indices, x.shape, kernel, *rest).astype(ctx.dtype)


def _register_adaptive_max_pool(num_dims: int) -> None:
    """Windows whose sizes follow from those of the result, and their gradient."""

    @lowering(f"aten.adaptive_max_pool{num_dims}d.default", traits=CHOICE)
    def adaptive(ctx: Context, x: Any, output_size: Any) -> tuple[jax.Array, jax.Array]:
        fields = [x]
        for d in reversed(range(num_dims)):
            dim = x.ndim - num_dims + d
            first, last = adaptive_windows(x.shape[dim], ctx.shape[dim])
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
    @lowering(f"aten.fractional_max_pool{num_dims}d.default", traits=CHOICE)
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


for _num_dims in (2, 3):
    _register_max_pool(_num_dims)
    _register_adaptive_max_pool(_num_dims)
_register_fractional_max_pool(2)
_register_fractional_max_pool(3)
