"""Operations that join, repeat, reorder or pad tensors, scatters to views, and views' gradients."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels.blocks import apart, write_block_in_dim
from spmd_core.ops.kernels.diagonal import write_diagonal
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.traits import OF_ALL, PERMUTED, REPEATED
from spmd_core.ops.registry import Context, Number, as_array, lowering


def _axis(dim: int, ndim: int) -> int:
    """The dim counted from the front; in torch, a 0-dim tensor has the dims 0 and -1."""
    return dim % max(ndim, 1)


# Joining and repeating.


@lowering("aten.cat.default", traits=OF_ALL)
def _cat(ctx: Context, tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    # Legacy rule of torch: a tensor of shape (0,) can be joined with tensors of any rank.
    parts = [as_array(x, ctx.dtype) for x in tensors if x.shape != (0,)]
    return (
        jnp.concatenate(parts, _axis(dim, len(ctx.shape)))
        if parts
        else jnp.zeros(ctx.shape, ctx.dtype)
    )


@lowering("aten.stack.default", "aten._stack.default", traits=OF_ALL)
def _stack(ctx: Context, tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    return jnp.stack([as_array(x, ctx.dtype) for x in tensors], _axis(dim, len(ctx.shape)))


@lowering("aten.block_diag.default")
def _block_diag(ctx: Context, tensors: Sequence[jax.Array]) -> jax.Array:
    out, row, column = jnp.zeros(ctx.shape, ctx.dtype), 0, 0
    for x in tensors:
        block = as_array(jnp.atleast_2d(x), ctx.dtype)
        out = lax.dynamic_update_slice(out, block, (row, column))
        row, column = row + block.shape[0], column + block.shape[1]
    return out


@lowering("aten._chunk_cat.default")
def _chunk_cat(ctx: Context, tensors: Sequence[jax.Array], dim: int, num_chunks: int) -> jax.Array:
    """Pads each tensor along `dim` to `num_chunks` equal chunks, and joins chunk i of all tensors.

    The chunks are flattened first.
    """
    parts = []
    for x in tensors:
        axis = _axis(dim, x.ndim)
        chunk = -(-x.shape[axis] // num_chunks)
        pad = [(0, 0, 0)] * x.ndim
        pad[axis] = (0, chunk * num_chunks - x.shape[axis], 0)
        parts.append(
            lax.pad(as_array(x, ctx.dtype), jnp.zeros((), ctx.dtype), pad).reshape(
                *x.shape[:axis], num_chunks, -1
            )
        )
    return jnp.concatenate(parts, -1)


@lowering("aten.repeat.default", traits=REPEATED)
def _repeat(ctx: Context, x: jax.Array, repeats: list[int]) -> jax.Array:
    return jnp.tile(x, repeats)


@lowering("aten.repeat_interleave.Tensor")
def _repeat_interleave(ctx: Context, repeats: jax.Array, *, output_size: int) -> jax.Array:
    """Each position i of `repeats`, repeats[i] times.

    Where the caller gave no `output_size`, the recording has read the sum of `repeats`.
    """
    return jnp.repeat(
        jnp.arange(repeats.shape[0], dtype=ctx.dtype), repeats, total_repeat_length=output_size
    )


# Reordering.


@lowering("aten.roll.default", traits=PERMUTED)
def _roll(ctx: Context, x: jax.Array, shifts: list[int], dims: Sequence[int] = ()) -> jax.Array:
    if x.size == 0:
        return x
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowering("aten.flip.default", traits=PERMUTED)
def _flip(ctx: Context, x: jax.Array, dims: list[int]) -> jax.Array:
    return lax.rev(x, [_axis(d, x.ndim) for d in dims]) if x.ndim else x


@lowering("aten.rot90.default", traits=PERMUTED)
def _rot90(ctx: Context, x: jax.Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> jax.Array:
    first, second = dims
    return jnp.rot90(x, k, (first, second))


@lowering("aten.channel_shuffle.default", traits=PERMUTED)
def _channel_shuffle(ctx: Context, x: jax.Array, groups: int) -> jax.Array:
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return jnp.swapaxes(grouped, 1, 2).reshape(x.shape)


@lowering("aten.pixel_shuffle.default", traits=PERMUTED)
def _pixel_shuffle(ctx: Context, x: jax.Array, upscale_factor: int) -> jax.Array:
    r, (*batch, channels, height, width) = upscale_factor, x.shape
    n = len(batch)
    blocks = x.reshape(*batch, channels // (r * r), r, r, height, width)
    return jnp.transpose(blocks, (*range(n + 1), n + 3, n + 1, n + 4, n + 2)).reshape(ctx.shape)


@lowering("aten.pixel_unshuffle.default")
def _pixel_unshuffle(ctx: Context, x: jax.Array, downscale_factor: int) -> jax.Array:
    r, (*batch, channels, height, width) = downscale_factor, x.shape
    n = len(batch)
    blocks = x.reshape(*batch, channels, height // r, r, width // r, r)
    return jnp.transpose(blocks, (*range(n + 1), n + 2, n + 4, n + 1, n + 3)).reshape(ctx.shape)


# Triangles and diagonals.


@lowering("aten.tril.default")
def _tril(ctx: Context, x: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.tril(x, diagonal)


@lowering("aten.triu.default")
def _triu(ctx: Context, x: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.triu(x, diagonal)


@lowering("aten.diag_embed.default")
def _diag_embed(
    ctx: Context, x: jax.Array, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> jax.Array:
    return write_diagonal(jnp.zeros(ctx.shape, ctx.dtype), x, offset, dim1, dim2)


@lowering("aten.diagonal_scatter.default")
def _diagonal_scatter(
    ctx: Context, x: jax.Array, src: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    return write_diagonal(x, as_array(src, x.dtype), offset, dim1, dim2)


@lowering("aten.diagonal_backward.default")
def _diagonal_backward(
    ctx: Context, grad: jax.Array, input_sizes: list[int], offset: int, dim1: int, dim2: int
) -> jax.Array:
    return write_diagonal(jnp.zeros(ctx.shape, ctx.dtype), grad, offset, dim1, dim2)


# Regions.


def _bounds(length: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """The first index and one past the last, clamped to the dim as Python's slices are."""
    first, last, _ = slice(start, end, step).indices(length)
    return first, max(first, last)


@lowering("aten.select_scatter.default")
def _select_scatter(ctx: Context, x: jax.Array, src: jax.Array, dim: int, index: int) -> jax.Array:
    axis = _axis(dim, x.ndim)
    block = jnp.expand_dims(as_array(src, x.dtype), axis)
    return write_block_in_dim(x, block, index % x.shape[axis], axis)


@lowering("aten.slice_scatter.default")
def _slice_scatter(
    ctx: Context,
    x: jax.Array,
    src: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    axis = _axis(dim, x.ndim)
    first, last = _bounds(x.shape[axis], start, end, step)
    piece = as_array(src, x.dtype)
    # torch lets `src` broadcast to the slice.
    region = list(x.shape)
    region[axis] = -(-(last - first) // step)
    piece = jnp.broadcast_to(piece, region)
    if step == 1:
        return write_block_in_dim(x, piece, first, axis)
    return x.at[(slice(None),) * axis + (slice(first, last, step),)].set(apart(piece))


def _padded(piece: jax.Array, length: int, axis: int, first: int, step: int) -> jax.Array:
    """Zeros along dim `axis` with the piece's elements at first, first + step, ...

    As a pad, which XLA partitions without a gather or a scatter.
    """
    num = piece.shape[axis]
    pad = [(0, 0, 0)] * piece.ndim
    used = first + (num - 1) * step + 1 if num else first
    pad[axis] = (first, length - used, step - 1)
    return lax.pad(piece, jnp.zeros((), piece.dtype), pad)


@lowering("aten.select_backward.default")
def _select_backward(
    ctx: Context, grad: jax.Array, input_sizes: list[int], dim: int, index: int
) -> jax.Array:
    axis = _axis(dim, len(ctx.shape))
    return _padded(jnp.expand_dims(grad, axis), ctx.shape[axis], axis, index % ctx.shape[axis], 1)


@lowering("aten.slice_backward.default")
def _slice_backward(
    ctx: Context, grad: jax.Array, input_sizes: list[int], dim: int, start: int, end: int, step: int
) -> jax.Array:
    axis = _axis(dim, len(ctx.shape))
    first, _ = _bounds(ctx.shape[axis], start, end, step)
    return _padded(grad, ctx.shape[axis], axis, first, step)


@lowering("aten.unfold_backward.default")
def _unfold_backward(
    ctx: Context, grad: jax.Array, input_sizes: list[int], dim: int, size: int, step: int
) -> jax.Array:
    if not ctx.shape:
        return grad.reshape(())
    axis = _axis(dim, len(ctx.shape))
    wide = opmath(ctx.dtype)
    windows = np.arange(grad.shape[axis])[:, None] * step + np.arange(size)
    region = (slice(None),) * axis + (windows,)
    return (
        jnp.zeros(ctx.shape, wide)
        .at[region]
        .add(jnp.moveaxis(grad, -1, axis + 1).astype(wide))
        .astype(ctx.dtype)
    )


# Padding: torch lists (before, after) pairs from the last dim backward; a negative amount crops.


def _pairs(pad: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    """The amounts before and after each dim, from the first dim on."""
    listed = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(listed)) + listed[::-1]


@lowering("aten.constant_pad_nd.default")
def _constant_pad_nd(
    ctx: Context, x: jax.Array, pad: list[int], value: Number | int = 0
) -> jax.Array:
    return lax.pad(
        x, as_array(value, x.dtype), [(before, after, 0) for before, after in _pairs(pad, x.ndim)]
    )


def _reflect(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    length = x.shape[axis]
    parts = [lax.slice_in_dim(x, max(-before, 0), length - max(-after, 0), axis=axis)]
    if before > 0:
        parts.insert(0, lax.rev(lax.slice_in_dim(x, 1, before + 1, axis=axis), [axis]))
    if after > 0:
        parts.append(
            lax.rev(lax.slice_in_dim(x, length - 1 - after, length - 1, axis=axis), [axis])
        )
    return jnp.concatenate(parts, axis)


def _replicate(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    length = x.shape[axis]
    parts = [lax.slice_in_dim(x, max(-before, 0), length - max(-after, 0), axis=axis)]
    if before > 0:
        parts.insert(0, jnp.repeat(lax.slice_in_dim(x, 0, 1, axis=axis), before, axis))
    if after > 0:
        parts.append(jnp.repeat(lax.slice_in_dim(x, length - 1, length, axis=axis), after, axis))
    return jnp.concatenate(parts, axis)


def _pad_with(
    extend: Callable[[jax.Array, int, int, int], jax.Array], x: jax.Array, padding: Sequence[int]
) -> jax.Array:
    for axis, (before, after) in enumerate(_pairs(padding, x.ndim)):
        if before or after:
            x = extend(x, axis, before, after)
    return x


def _pad_backward(
    extend: Callable[[jax.Array, int, int, int], jax.Array],
    grad: jax.Array,
    x: jax.Array,
    padding: Sequence[int],
) -> jax.Array:
    # The transpose of the padding, which is linear, so no value of x is read. The sums are computed
    # in torch's compute dtype, because an edge may have many terms.
    wide = opmath(grad.dtype)
    transpose = jax.linear_transpose(
        lambda y: _pad_with(extend, y, padding), jax.ShapeDtypeStruct(x.shape, wide)
    )
    return transpose(grad.astype(wide))[0].astype(grad.dtype)


_DIMS = ("1d", "2d", "3d")


@lowering(*(f"aten.reflection_pad{d}.default" for d in _DIMS))
def _reflection_pad(ctx: Context, x: jax.Array, padding: list[int]) -> jax.Array:
    return _pad_with(_reflect, x, padding)


@lowering(*(f"aten.reflection_pad{d}_backward.default" for d in _DIMS))
def _reflection_pad_backward(
    ctx: Context, grad: jax.Array, x: jax.Array, padding: list[int]
) -> jax.Array:
    return _pad_backward(_reflect, grad, x, padding)


@lowering(*(f"aten.replication_pad{d}.default" for d in _DIMS))
def _replication_pad(ctx: Context, x: jax.Array, padding: list[int]) -> jax.Array:
    return _pad_with(_replicate, x, padding)


@lowering(*(f"aten.replication_pad{d}_backward.default" for d in _DIMS))
def _replication_pad_backward(
    ctx: Context, grad: jax.Array, x: jax.Array, padding: list[int]
) -> jax.Array:
    return _pad_backward(_replicate, grad, x, padding)
