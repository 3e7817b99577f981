"""Upsampling over 1 to 3 spatial dims, nearest, linear, cubic and antialiased, with gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.ops.kernels.precision import matmul_precision, opmath
from spmd_core.ops.registry import Context, lowering

# The result along a dim is a sum over taps. A tap is the source index and the weight of each result
# element (weights None: all are 1).
Tap = tuple[np.ndarray, np.ndarray | None]
# Up to so many taps have a gather each: XLA's CPU backend fuses their sum, not a reduce.
_FEW_TAPS = 16


def _step(num_in: int, num_out: int, scale: float | None, dtype: np.dtype) -> np.floating:
    """The source elements per result element: from the user's scale factor, else from the sizes."""
    return dtype.type(1 / scale if scale is not None and scale > 0 else num_in / num_out)


def _nearest_taps(
    num_in: int, num_out: int, scale: float | None, dtype: np.dtype, exact: bool
) -> list[Tap]:
    # As in torch, the index is computed in float32 for every dtype of the tensor: rounding decides
    # which neighbor is taken.
    position = np.arange(num_out, dtype=np.float32) + np.float32(0.5 if exact else 0)
    index = np.floor(position * _step(num_in, num_out, scale, np.dtype(np.float32))).astype(
        np.int64
    )
    return [(np.minimum(index, num_in - 1), None)]


def _source_positions(
    num_in: int, num_out: int, scale: float | None, dtype: np.dtype, align_corners: bool
) -> np.ndarray:
    i = np.arange(num_out, dtype=dtype)
    if align_corners:
        return i * dtype.type((num_in - 1) / (num_out - 1) if num_out > 1 else 0)
    return (i + dtype.type(0.5)) * _step(num_in, num_out, scale, dtype) - dtype.type(0.5)


def _linear_taps(
    num_in: int, num_out: int, scale: float | None, dtype: np.dtype, align_corners: bool
) -> list[Tap]:
    position = np.maximum(_source_positions(num_in, num_out, scale, dtype, align_corners), 0)
    index = np.minimum(position.astype(np.int64), num_in - 1)
    weight = np.clip(position - index, 0, 1).astype(dtype)
    return [(index, 1 - weight), (np.minimum(index + 1, num_in - 1), weight)]


def _cubic_taps(
    num_in: int, num_out: int, scale: float | None, dtype: np.dtype, align_corners: bool
) -> list[Tap]:
    """Keys's cubic convolution (1981) with the parameter a = -0.75."""
    position = _source_positions(num_in, num_out, scale, dtype, align_corners)
    index = np.floor(position).astype(np.int64)
    fraction = position - index
    a = -0.75
    taps = []
    for k in (-1, 0, 1, 2):
        distance = np.abs(fraction - k)
        near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        taps.append(
            (np.clip(index + k, 0, num_in - 1), np.where(distance <= 1, near, far).astype(dtype))
        )
    return taps


def _factor(taps: list[Tap], num_in: int) -> int | None:
    """The number of times that each source element is repeated, where that is all that is done."""
    index, weights = taps[0]
    factor = len(index) // max(num_in, 1)
    is_repeated = np.array_equal(index, np.repeat(np.arange(num_in), factor))
    return factor if len(taps) == 1 and weights is None and is_repeated else None


def _combined(x: jax.Array, taps: list[Tap], dim: int) -> jax.Array:
    """The sum over the taps along a dim."""
    shape = (-1, *(1,) * (x.ndim - dim - 1))
    taken = (
        jnp.take(x, index, axis=dim) * (1 if weight is None else weight.reshape(shape))
        for index, weight in taps
    )
    return functools.reduce(jnp.add, taken)


def _resampled(x: jax.Array, taps_by_dim: Sequence[list[Tap]]) -> jax.Array:
    for dim, taps in enumerate(taps_by_dim, start=x.ndim - len(taps_by_dim)):
        factor = _factor(taps, x.shape[dim])
        x = _combined(x, taps, dim) if factor is None else jnp.repeat(x, factor, axis=dim)
    return x


def _transposed(taps: list[Tap], num_in: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The taps from the other side: the result elements that each source element goes to.

    A gather along them takes the place of a scatter, which is slow.

    Returns:
        For each tap and source element the result element, the weight, and whether there is one.
    """
    num_out = len(taps[0][0])
    source = np.concatenate([index for index, _ in taps])
    result = np.tile(np.arange(num_out), len(taps))
    ones = np.ones(num_out)
    weight = np.concatenate([ones if weight is None else weight for _, weight in taps])
    order = np.argsort(source, kind="stable")
    source, result, weight = source[order], result[order], weight[order]
    number = np.arange(len(source)) - np.searchsorted(source, source)  # among those of its source
    shape = (int(number.max(initial=0)) + 1, num_in)
    index, weights, exists = np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape, np.bool_)
    index[number, source], weights[number, source], exists[number, source] = result, weight, True
    return index, weights, exists


def _weighted(
    grad: jax.Array, dim: int, index: np.ndarray, weight: np.ndarray, exists: np.ndarray
) -> jax.Array:
    shape = (*index.shape, *(1,) * (grad.ndim - dim - 1))
    weighted = jnp.take(grad, index, axis=dim) * weight.reshape(shape).astype(grad.dtype)
    # Not a product with 0, which would keep infinite gradients.
    return weighted if exists.all() else jnp.where(exists.reshape(shape), weighted, 0)


def _resampled_gradient(
    grad: jax.Array, taps_by_dim: Sequence[list[Tap]], in_sizes: Sequence[int]
) -> jax.Array:
    first = grad.ndim - len(in_sizes)
    for dim, (taps, num_in) in enumerate(zip(taps_by_dim, in_sizes), start=first):
        factor = _factor(taps, num_in)
        if factor is not None:
            split = (*grad.shape[:dim], num_in, factor, *grad.shape[dim + 1 :])
            grad = grad.reshape(split).sum(dim + 1)
            continue
        index, weights, exists = _transposed(taps, num_in)
        if len(index) <= _FEW_TAPS:
            terms = (_weighted(grad, dim, *tap) for tap in zip(index, weights, exists))
            grad = functools.reduce(jnp.add, terms)
        else:
            grad = _weighted(grad, dim, index, weights, exists).sum(dim)
    return grad


# Spatial dims are replicated: the partitioner would gather a split dim by an all-reduce of arrays
# of the result's size, and makes some of these programs invalid (jaxlib 0.10, x split over two axes
# of three, the result over all).
def _register(
    op: str, num_dims: int, make_taps: Any, has_align_corners: bool, **fixed: bool
) -> None:
    def taps(
        dtype: np.dtype, in_sizes: Sequence[int], out_sizes: Sequence[int], options: Sequence[Any]
    ) -> list[list[Tap]]:
        keywords = {"align_corners": options[0]} if has_align_corners else fixed
        scales = list(options[1:] if has_align_corners else options)
        scales += [None] * (num_dims - len(scales))
        return [
            make_taps(i, o, s, dtype, **keywords) for i, o, s in zip(in_sizes, out_sizes, scales)
        ]

    def rounds(args: Any, kwargs: Any, platform: str) -> bool:
        """Whether integers are interpolated, which torch rounds in its own way."""
        return has_align_corners and not args[0].dtype.is_floating_point

    @lowering(f"aten.{op}.default", host_when=rounds)
    def forward(ctx: Context, x: Any, output_size: Any, *options: Any) -> jax.Array:
        dtype = opmath(x.dtype)
        image = ctx.replicate_last_dims(x.astype(dtype), num_dims)
        result = _resampled(image, taps(dtype, x.shape[2:], output_size, options))
        return ctx.replicate_last_dims(result, num_dims).astype(ctx.dtype)

    @lowering(f"aten.{op}_backward.default")
    def backward(
        ctx: Context, grad: Any, output_size: Any, input_size: Any, *options: Any
    ) -> jax.Array:
        dtype = opmath(grad.dtype)
        chosen = taps(dtype, input_size[2:], output_size, options)
        image = ctx.replicate_last_dims(grad.astype(dtype), num_dims)
        result = _resampled_gradient(image, chosen, input_size[2:])
        return ctx.replicate_last_dims(result, num_dims).astype(ctx.dtype)


for _num_dims in (1, 2, 3):
    _register(f"upsample_nearest{_num_dims}d", _num_dims, _nearest_taps, False, exact=False)
    _register(f"_upsample_nearest_exact{_num_dims}d", _num_dims, _nearest_taps, False, exact=True)
_register("upsample_linear1d", 1, _linear_taps, True)
_register("upsample_bilinear2d", 2, _linear_taps, True)
_register("upsample_trilinear3d", 3, _linear_taps, True)
_register("upsample_bicubic2d", 2, _cubic_taps, True)


# ---- antialiased ---------------------------------------------------------------------------------
# For a smaller result, each element is the weighted mean of all source elements under a filter that
# is stretched by the scale.


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _keys_cubic(x: np.ndarray) -> np.ndarray:
    """Keys's cubic convolution with the parameter a = -0.5, as in Pillow's resize."""
    a, x = -0.5, np.abs(x)
    return np.where(
        x < 1,
        ((a + 2) * x - (a + 3)) * x * x + 1,
        np.where(x < 2, (((x - 5) * x + 8) * x - 4) * a, 0),
    )


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _filter_matrix(
    num_in: int,
    num_out: int,
    scale: float | None,
    dtype: np.dtype,
    align_corners: bool,
    kernel: Callable[[np.ndarray], np.ndarray],
    radius: int,
) -> np.ndarray:
    """The (result, source) weights; the identity for a dim that keeps its size.

    The ends of each filter are rounded in torch's dtype.
    """
    if num_in == num_out:
        return np.eye(num_in, dtype=dtype)
    if align_corners:
        step = dtype.type((num_in - 1) / (num_out - 1) if num_out > 1 else 0)
    else:
        step = _step(num_in, num_out, scale, dtype)
    stretch = max(step, dtype.type(1))
    center = step * (np.arange(num_out, dtype=dtype) + dtype.type(0.5))
    reach = dtype.type(radius) * stretch
    first = np.maximum((center - reach + dtype.type(0.5)).astype(np.int64), 0)
    last = np.minimum((center + reach + dtype.type(0.5)).astype(np.int64), num_in)
    source = np.arange(num_in)
    weights = kernel((source - center[:, None] + dtype.type(0.5)) / stretch)
    weights = np.where((source >= first[:, None]) & (source < last[:, None]), weights, 0)
    total = weights.sum(axis=1, keepdims=True)
    return (weights / np.where(total == 0, 1, total)).astype(dtype)


def _register_antialiased(op: str, kernel: Callable[[np.ndarray], np.ndarray], radius: int) -> None:
    def matrices(
        dtype: np.dtype, in_sizes: Sequence[int], out_sizes: Sequence[int], options: Sequence[Any]
    ) -> list[np.ndarray]:
        align_corners, *scales = options
        scales += [None] * (2 - len(scales))
        return [
            _filter_matrix(i, o, s, dtype, align_corners, kernel, radius)
            for i, o, s in zip(in_sizes, out_sizes, scales)
        ]

    @lowering(
        f"aten.{op}.default",
        host_when=lambda args, kwargs, platform: not args[0].dtype.is_floating_point,
    )
    def forward(ctx: Context, x: Any, output_size: Any, *options: Any, **named: Any) -> jax.Array:
        dtype = opmath(x.dtype)
        rows, columns = matrices(dtype, x.shape[2:], output_size, (*options, *named.values()))
        return jnp.einsum(
            "nchw,ih,jw->ncij", x.astype(dtype), rows, columns, precision=matmul_precision(dtype)
        ).astype(ctx.dtype)

    @lowering(f"aten.{op}_backward.default")
    def backward(
        ctx: Context, grad: Any, output_size: Any, input_size: Any, *options: Any, **named: Any
    ) -> jax.Array:
        dtype = opmath(grad.dtype)
        rows, columns = matrices(dtype, input_size[2:], output_size, (*options, *named.values()))
        return jnp.einsum(
            "ncij,ih,jw->nchw", grad.astype(dtype), rows, columns, precision=matmul_precision(dtype)
        ).astype(ctx.dtype)


_register_antialiased("_upsample_bilinear2d_aa", _triangle, 1)
_register_antialiased("_upsample_bicubic2d_aa", _keys_cubic, 2)
_register_antialiased("_upsample_lanczos2d_aa", _lanczos, 3)
