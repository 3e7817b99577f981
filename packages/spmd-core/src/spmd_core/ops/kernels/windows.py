"""Strided and dilated windows, in forms that XLA's partitioner splits correctly over devices.

Where a dim is split unevenly, the partitioner returns wrong sums for a dilated window and for a pad
that puts zeros between the elements. Some of these programs abort the process (a stride of 2 with a
padding of 2 over 6 elements on 8 devices; jaxlib 0.10). So on several devices such a dim is
replicated, or a reshape inserts the zeros. This workaround ends when the partitioner is correct.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.registry import Context, ImageLayout


def per_dim(value: Sequence[int], num_dims: int, default: Sequence[int] = ()) -> tuple[int, ...]:
    """One number per spatial dim; `default` where `value` is empty.

    torch lets one number stand for all dims, and an empty stride for the kernel's size.
    """
    value = tuple(value) or tuple(default)
    return value * num_dims if len(value) == 1 else value


def last_dims_may_be_split(ctx: Context, num_dims: int) -> bool:
    """Whether the last `num_dims` dims of an operation's images may be split.

    Windows over those dims then need the forms of this module. If the layout of the images is not
    known, a dim may be split if any sharding in the program splits it.
    """
    images = ctx.layout(ImageLayout)
    if images is not None:
        return any(images.axes[-num_dims:])
    return ctx.num_devices > 1 and any(dim >= -num_dims for dim in ctx.split_dims)


def halo_fits_shard(
    ctx: Context, sizes: Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Whether a window over dims of these sizes reaches no further than the neighboring device.

    XLA's partitioner returns wrong sums for windows that reach further (a kernel of 9 over 4
    elements on 8 devices); this check ends when the partitioner is correct there.
    """
    return all(
        step * (k - 1) <= size // ctx.num_devices for size, k, step in zip(sizes, kernel, dilation)
    )


def replicate_unless_halo_fits(
    ctx: Context,
    x: jax.Array,
    sizes: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    *,
    num_dims: int,
) -> jax.Array:
    """Replicates the last `num_dims` dims of `x`, unless the partitioner can split its windows.

    If `last_dims_may_be_split` and `halo_fits_shard`, `x` is returned unchanged. `sizes`, `kernel`
    and `dilation` describe the windows, one number per spatial dim. Call this for what the windows
    read and also for their results, as the split of a later value would propagate back to them.
    """
    can_be_split = last_dims_may_be_split(ctx, len(sizes)) and halo_fits_shard(
        ctx, sizes, kernel, dilation
    )
    return x if can_be_split else ctx.replicate_last_dims(x, num_dims)


def dilate(ctx: Context, x: jax.Array, steps: Sequence[int]) -> jax.Array:
    """Inserts `step - 1` zeros between the elements of each of the last dims.

    n elements become (n - 1) * step + 1. Where the dims may be split, a reshape inserts the zeros.
    """
    lead = x.ndim - len(steps)
    if max(steps) == 1:
        return x
    if x.size == 0:
        sizes = [max((n - 1) * step + 1, 0) for n, step in zip(x.shape[lead:], steps)]
        return jnp.zeros((*x.shape[:lead], *sizes), x.dtype)
    if not last_dims_may_be_split(ctx, len(steps)):
        edges = [(0, 0, 0)] * lead + [(0, 0, step - 1) for step in steps]
        wide = lax.pad(ctx.replicate_last_dims(x, len(steps)), np.zeros((), x.dtype), edges)
        return ctx.replicate_last_dims(wide, len(steps))
    for dim, step in enumerate(steps, lead):
        size = x.shape[dim]
        wide = jnp.pad(
            jnp.expand_dims(x, dim + 1),
            [(0, step - 1) if d == dim + 1 else (0, 0) for d in range(x.ndim + 1)],
        )
        x = lax.slice_in_dim(
            wide.reshape(*x.shape[:dim], size * step, *x.shape[dim + 1 :]),
            0,
            (size - 1) * step + 1,
            axis=dim,
        )
    return x


def subsample(x: jax.Array, steps: Sequence[int]) -> jax.Array:
    """Every `step`-th element of the last dims, from the first on.

    A reshape and not a strided slice, so that the transpose has no pad between elements.
    """
    for dim, step in enumerate(steps, x.ndim - len(steps)):
        x = lax.index_in_dim(_by_phase(x, dim, step), 0, dim + 1, keepdims=False) if step > 1 else x
    return x


def _by_phase(x: jax.Array, dim: int, step: int) -> jax.Array:
    """A dim of n elements as (ceil(n / step), step), padded with zeros at the end."""
    num = -(-x.shape[dim] // step)
    padded = jnp.pad(
        x, [(0, num * step - x.shape[dim]) if d == dim else (0, 0) for d in range(x.ndim)]
    )
    return padded.reshape(*x.shape[:dim], num, step, *x.shape[dim + 1 :])


def phases_as_channels(x: jax.Array, steps: Sequence[int], kept: Sequence[int]) -> jax.Array:
    """(n, channel, ...) as (n, channel * kept phases, ...), each spatial dim `step` times shorter.

    A window that moves by `step` then moves by 1. Of the `step` elements of a dim that become
    channels, the first `kept` are kept.
    """
    num_dims = len(steps)
    for d, (step, num) in enumerate(zip(steps, kept)):
        dim = 2 + 2 * d
        x = lax.slice_in_dim(_by_phase(x, dim, step), 0, num, axis=dim + 1)
    order = [0, 1, *(3 + 2 * d for d in range(num_dims)), *(2 + 2 * d for d in range(num_dims))]
    x = jnp.transpose(x, order)
    return x.reshape(x.shape[0], x.shape[1] * math.prod(kept), *x.shape[2 + num_dims :])


def interleaved(
    ctx: Context, parts: Mapping[tuple[int, ...], jax.Array], steps: Sequence[int]
) -> jax.Array:
    """An array whose elements from `at` on, `step` apart in each of the last dims, are `parts[at]`.

    There is a part for each position within the steps, and all have one shape. n elements become
    n * step.
    """
    if ctx.platform != "cpu":
        # A minor dim of `step` elements would be padded to a TPU's 128 lanes.
        total: Any = 0
        for at, part in parts.items():
            edges = [(i, step - 1 - i) for i, step in zip(at, steps)]
            total = total + crop_or_pad(dilate(ctx, part, steps), edges)
        return total
    found = dict(parts)
    for d in reversed(range(len(steps))):
        joined = {}
        for head in dict.fromkeys(at[:d] for at in found):
            own = [found[(*head, i)] for i in range(steps[d])]
            dim = own[0].ndim - len(steps) + d
            shape = [n * steps[d] if i == dim else n for i, n in enumerate(own[0].shape)]
            joined[head] = jnp.stack(own, axis=dim + 1).reshape(shape)
        found = joined
    return found[()]


def crop_or_pad(x: jax.Array, edges: Sequence[tuple[int, int]], value: Any = 0) -> jax.Array:
    """Pads each of the last dims by its (before, after) elements; a negative number crops."""
    lead = x.ndim - len(edges)
    return lax.pad(
        x, np.asarray(value, x.dtype), [(0, 0, 0)] * lead + [(low, high, 0) for low, high in edges]
    )


def adaptive_windows(num_in: int, num_out: int) -> tuple[np.ndarray, np.ndarray]:
    """The first element of each window and one past its last, as in torch.

    These are floor(i * in / out) and ceil((i + 1) * in / out).
    """
    i = np.arange(num_out)
    return i * num_in // num_out, -((-(i + 1) * num_in) // num_out)
