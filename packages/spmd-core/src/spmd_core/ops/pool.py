"""Pooling: (batch, channel, ...) or (channel, ...) in, each window's maximum or mean out; forward and backward."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.precision import is_inexact, opmath
from spmd_core.ops.registry import Context, lowering

_INT64 = np.dtype(np.int64)


def _each(value: Sequence[int], num_dims: int, default: Sequence[int] = ()) -> tuple[int, ...]:
    """One number per spatial dim: torch lets one number stand for all, and an empty stride for the kernel's size."""
    value = tuple(value) or tuple(default)
    return value * num_dims if len(value) == 1 else value


# ---- windows ---------------------------------------------------------------------------------------------------------------------------------------


def _window_slice(x: jax.Array, dim: int, offset: int, size: int, stride: int) -> jax.Array:
    """The elements at `offset`, `offset + stride`, ... along `dim`, `size` of them."""
    return lax.slice_in_dim(x, offset, offset + (size - 1) * stride + 1, stride, dim)


def _pad_dim(x: jax.Array, dim: int, low: int, high: int, value: Any) -> jax.Array:
    """Negative numbers cut, as a last window in floor mode leaves elements over."""
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (low, high, 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def _adaptive_windows(num_in: int, num_out: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last-plus-one element of each window: torch's floor(i * in / out) and ceil((i + 1) * in / out)."""
    i = np.arange(num_out)
    return i * num_in // max(num_out, 1), -((-(i + 1) * num_in) // max(num_out, 1))


# ---- maximum ---------------------------------------------------------------------------------------------------------------------------------------


def _better(value: jax.Array, position: jax.Array, best: jax.Array, best_position: jax.Array) -> jax.Array:
    """Whether a later candidate wins: where larger, or nan, or the first that is not padding (position -1)."""
    wins = value > best
    if is_inexact(value.dtype):
        wins |= jnp.isnan(value)
    return (position >= 0) & (wins | (best_position < 0))


def _best_of(candidates: list[tuple[list[jax.Array], jax.Array]]) -> tuple[list[jax.Array], jax.Array]:
    """Of ([value, earlier dims' positions ...], position) the best, element by element."""
    best, best_position = candidates[0]
    for fields, position in candidates[1:]:
        wins = _better(fields[0], position, best[0], best_position)
        best = [jnp.where(wins, new, old) for new, old in zip(fields, best)]
        best_position = jnp.where(wins, position, best_position)
    return best, best_position


def _max_pool(
    x: jax.Array, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], sizes: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Values and flat positions in the spatial dims. One dim at a time, the last first: kh + kw steps instead of kh * kw, and the same winner."""
    num_dims = len(kernel)
    lowest = -jnp.inf if is_inexact(x.dtype) else jnp.iinfo(x.dtype).min
    fields = [x]  # the value, then its positions along the dims already done, the last dim's last
    for d in reversed(range(num_dims)):
        dim = x.ndim - num_dims + d
        high = (sizes[d] - 1) * stride[d] + dilation[d] * (kernel[d] - 1) + 1 - padding[d] - x.shape[dim]
        position = lax.broadcasted_iota(_INT64, fields[0].shape, dim)
        padded = [_pad_dim(f, dim, padding[d], high, lowest if i == 0 else 0) for i, f in enumerate(fields)]
        position = _pad_dim(position, dim, padding[d], high, -1)
        candidates = []
        for k in range(kernel[d]):
            window = [_window_slice(f, dim, k * dilation[d], sizes[d], stride[d]) for f in (*padded, position)]
            candidates.append((window[:-1], window[-1]))
        best, best_position = _best_of(candidates)
        fields = [best[0], best_position, *best[1:]]
    return fields[0], _flat_position(fields[1:], x.shape[x.ndim - num_dims :])


def _flat_position(positions: Sequence[jax.Array], sizes: Sequence[int]) -> jax.Array:
    flat = positions[0]
    for position, size in zip(positions[1:], sizes[1:]):
        flat = flat * size + position
    return flat


@lowering("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def _max_pool_with_indices(
    ctx: Context, x: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> tuple[jax.Array, jax.Array]:
    num_dims = _num_dims(ctx)
    kernel, padding, dilation = (_each(v, num_dims) for v in (kernel_size, _as_list(padding), _as_list(dilation)))
    return _max_pool(x, kernel, _each(stride, num_dims, kernel), padding, dilation, ctx.shape[len(ctx.shape) - num_dims :])
