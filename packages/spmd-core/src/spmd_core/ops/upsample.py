"""Upsampling over 1 to 3 spatial dims, nearest, linear and cubic: each dim is a weighted sum of shifted copies; forward and backward."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.ops.precision import opmath
from spmd_core.ops.registry import Context, lowering

# One dim's result is the sum of its taps: the source index of every element, and its weight (None for 1).
Tap = tuple[np.ndarray, np.ndarray | None]


def _step(num_in: int, num_out: int, scale: float | None, dtype: np.dtype) -> np.floating:
    """The source elements per result element: from the factor that the user gave, else from the sizes."""
    return dtype.type(1 / scale if scale is not None and scale > 0 else num_in / num_out)


def _nearest_taps(num_in: int, num_out: int, scale: float | None, dtype: np.dtype, exact: bool) -> list[Tap]:
    # The index in float32 whatever the tensor's dtype, as torch has it: rounding decides which neighbour is taken.
    position = np.arange(num_out, dtype=np.float32) + np.float32(0.5 if exact else 0)
    index = np.floor(position * _step(num_in, num_out, scale, np.dtype(np.float32))).astype(np.int64)
    return [(np.minimum(index, num_in - 1), None)]


def _source_positions(num_in: int, num_out: int, scale: float | None, dtype: np.dtype, align_corners: bool) -> np.ndarray:
    i = np.arange(num_out, dtype=dtype)
    if align_corners:
        return i * dtype.type((num_in - 1) / (num_out - 1) if num_out > 1 else 0)
    return (i + dtype.type(0.5)) * _step(num_in, num_out, scale, dtype) - dtype.type(0.5)


def _linear_taps(num_in: int, num_out: int, scale: float | None, dtype: np.dtype, align_corners: bool) -> list[Tap]:
    position = np.maximum(_source_positions(num_in, num_out, scale, dtype, align_corners), 0)
    index = np.minimum(position.astype(np.int64), num_in - 1)
    weight = np.clip(position - index, 0, 1).astype(dtype)
    return [(index, 1 - weight), (np.minimum(index + 1, num_in - 1), weight)]


def _cubic_taps(num_in: int, num_out: int, scale: float | None, dtype: np.dtype, align_corners: bool) -> list[Tap]:
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
        taps.append((np.clip(index + k, 0, num_in - 1), np.where(distance <= 1, near, far).astype(dtype)))
    return taps


def _take(x: jax.Array, index: np.ndarray, dim: int) -> jax.Array:
    """`x` at the indices of the only tap; for a whole factor a broadcast, whose transpose is a sum where a gather's is a scatter."""
    num_in = x.shape[dim]
    factor = len(index) // num_in
    if np.array_equal(index, np.repeat(np.arange(num_in), factor)):
        shape = (*x.shape[:dim], num_in, factor, *x.shape[dim + 1 :])
        return jnp.broadcast_to(jnp.expand_dims(x, dim + 1), shape).reshape(*x.shape[:dim], len(index), *x.shape[dim + 1 :])
    return jnp.take(x, index, axis=dim)


def _resampled(x: jax.Array, taps_by_dim: Sequence[list[Tap]]) -> jax.Array:
    for dim, taps in enumerate(taps_by_dim, start=x.ndim - len(taps_by_dim)):
        if len(taps) == 1:
            x = _take(x, taps[0][0], dim)
            continue
        # All taps in one gather, and so one scatter in the transpose.
        index = np.stack([index for index, _ in taps])
        weights = np.stack([weight for _, weight in taps if weight is not None]).reshape(*index.shape, *(1,) * (x.ndim - dim - 1))
        x = jnp.sum(jnp.take(x, index, axis=dim) * weights, axis=dim)
    return x


def _register(op: str, num_dims: int, make_taps: Any, has_align_corners: bool, **fixed: bool) -> None:
    def taps(dtype: np.dtype, in_sizes: Sequence[int], out_sizes: Sequence[int], options: Sequence[Any]) -> list[list[Tap]]:
        keywords = {"align_corners": options[0]} if has_align_corners else fixed
        scales = list(options[1:] if has_align_corners else options)
        scales += [None] * (num_dims - len(scales))
        return [make_taps(i, o, s, dtype, **keywords) for i, o, s in zip(in_sizes, out_sizes, scales)]

    def rounds(args: Any, kwargs: Any) -> bool:
        """torch rounds an interpolated integer in its own way."""
        return has_align_corners and not args[0].dtype.is_floating_point

    @lowering(f"aten.{op}.default", host_when=rounds)
    def forward(ctx: Context, x: Any, output_size: Any, *options: Any) -> jax.Array:
        dtype = opmath(x.dtype)
        return _resampled(x.astype(dtype), taps(dtype, x.shape[2:], output_size, options)).astype(ctx.dtype)

    @lowering(f"aten.{op}_backward.default")
    def backward(ctx: Context, grad: Any, output_size: Any, input_size: Any, *options: Any) -> jax.Array:
        dtype = opmath(grad.dtype)
        chosen = taps(dtype, input_size[2:], output_size, options)
        transpose = jax.linear_transpose(lambda x: _resampled(x, chosen), jax.ShapeDtypeStruct(tuple(input_size), dtype))
        return transpose(grad.astype(dtype))[0].astype(ctx.dtype)


for _num_dims in (1, 2, 3):
    _register(f"upsample_nearest{_num_dims}d", _num_dims, _nearest_taps, False, exact=False)
    _register(f"_upsample_nearest_exact{_num_dims}d", _num_dims, _nearest_taps, False, exact=True)
_register("upsample_linear1d", 1, _linear_taps, True)
_register("upsample_bilinear2d", 2, _linear_taps, True)
_register("upsample_trilinear3d", 3, _linear_taps, True)
_register("upsample_bicubic2d", 2, _cubic_taps, True)
