"""Views: the value of each, and how a write through it changes its base.

jax arrays have no strides, so every view is a new array here. A view write takes the base's old
value and the view's new value, and returns the base's new value. `expand` has no view write: torch
refuses to write to memory that several elements share. Views with several results have none either:
each result is written as a slice or a select.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd_core import dtypes
from spmd_core.ops.kernels.blocks import apart, write_block, write_block_in_dim
from spmd_core.ops.kernels.diagonal import take_diagonal, write_diagonal
from spmd_core.ops.kernels.traits import BLOCK, PERMUTED, REPEATED, RESHAPED, SAME
from spmd_core.ops.registry import Context, lowering, view_write


def _axis(dim: int, ndim: int) -> int:
    """The dim counted from the front; in torch, a 0-dim tensor has the dims 0 and -1."""
    return dim % max(ndim, 1)


# Same elements in the same order.


@lowering(
    *(
        "aten.view.default",
        "aten.view_copy.default",
        "aten._unsafe_view.default",
        "aten._reshape_alias.default",
        "aten._reshape_alias_copy.default",
    ),
    *(
        "aten._reshape_copy.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.squeeze_copy.default",
    ),
    *(
        "aten.squeeze_copy.dim",
        "aten.squeeze_copy.dims",
        "aten.unsqueeze.default",
        "aten.unsqueeze_copy.default",
    ),
    traits=RESHAPED,
)
def _reshape(ctx: Context, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return x.reshape(ctx.shape)


@view_write(
    *(
        "aten.view.default",
        "aten._reshape_alias.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
    ),
    "aten.unsqueeze.default",
)
def _reshape_write(base: jax.Array, view: jax.Array, *_: Any) -> jax.Array:
    return view.reshape(base.shape)


@lowering(
    *(
        "aten.alias.default",
        "aten.alias_copy.default",
        "aten.detach.default",
        "aten.detach_copy.default",
    ),
    *("aten.lift.default", "aten.lift_fresh.default", "aten.lift_fresh_copy.default"),
    traits=SAME,
)
def _alias(ctx: Context, x: jax.Array) -> jax.Array:
    return x


@view_write("aten.alias.default", "aten.detach.default", "aten.lift_fresh.default")
def _alias_write(base: jax.Array, view: jax.Array) -> jax.Array:
    return view


@lowering("aten.expand.default", "aten.expand_copy.default", traits=REPEATED)
def _expand(ctx: Context, x: jax.Array, size: list[int], implicit: bool = False) -> jax.Array:
    return jnp.broadcast_to(x, ctx.shape)


# Same elements in another order.


@lowering("aten.t.default", "aten.t_copy.default", traits=PERMUTED)
def _t(ctx: Context, x: jax.Array) -> jax.Array:
    return x.T


@view_write("aten.t.default")
def _t_write(base: jax.Array, view: jax.Array) -> jax.Array:
    return view.T


def _swap(x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(x, _axis(dim0, x.ndim), _axis(dim1, x.ndim)) if x.ndim else x


@lowering("aten.transpose.int", "aten.transpose_copy.int", traits=PERMUTED)
def _transpose(ctx: Context, x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return _swap(x, dim0, dim1)


@view_write("aten.transpose.int")
def _transpose_write(base: jax.Array, view: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return _swap(view, dim0, dim1)


@lowering("aten.permute.default", "aten.permute_copy.default", traits=PERMUTED)
def _permute(ctx: Context, x: jax.Array, dims: list[int]) -> jax.Array:
    return jnp.transpose(x, [_axis(d, x.ndim) for d in dims])


@view_write("aten.permute.default")
def _permute_write(base: jax.Array, view: jax.Array, dims: list[int]) -> jax.Array:
    return jnp.transpose(view, np.argsort([_axis(d, base.ndim) for d in dims]).tolist())


# Some of the elements.


@lowering("aten.select.int", "aten.select_copy.int", traits=BLOCK)
def _select(ctx: Context, x: jax.Array, dim: int, index: int) -> jax.Array:
    return lax.index_in_dim(x, index, _axis(dim, x.ndim), keepdims=False)


@view_write("aten.select.int")
def _select_write(base: jax.Array, view: jax.Array, dim: int, index: int) -> jax.Array:
    axis = _axis(dim, base.ndim)
    block = jnp.expand_dims(view, axis)
    return write_block_in_dim(base, block, index % base.shape[axis], axis)


def _bounds(length: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """The first index and one past the last, clamped to the dim as Python's slices are."""
    first, last, _ = slice(start, end, step).indices(length)
    return first, max(first, last)


@lowering("aten.slice.Tensor", "aten.slice_copy.Tensor", traits=BLOCK)
def _slice(
    ctx: Context,
    x: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    axis = _axis(dim, x.ndim)
    first, last = _bounds(x.shape[axis], start, end, step)
    return lax.slice_in_dim(x, first, last, step, axis)


@view_write("aten.slice.Tensor")
def _slice_write(
    base: jax.Array,
    view: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    axis = _axis(dim, base.ndim)
    first, last = _bounds(base.shape[axis], start, end, step)
    if view.shape == base.shape:
        return view
    if step == 1:
        return write_block_in_dim(base, view, first, axis)
    region = (slice(None),) * axis + (slice(first, last, step),)
    return base.at[region].set(apart(view))


@lowering("aten.narrow_copy.default", traits=BLOCK)
def _narrow_copy(ctx: Context, x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    axis = _axis(dim, x.ndim)
    first = start + x.shape[axis] if start < 0 else start
    return lax.slice_in_dim(x, first, first + length, axis=axis)


@lowering(
    *("aten.split.Tensor", "aten.split_copy.Tensor", "aten.unsafe_split.Tensor"),
    *(
        "aten.split_with_sizes.default",
        "aten.split_with_sizes_copy.default",
        "aten.unsafe_split_with_sizes.default",
    ),
    traits=BLOCK,
)
def _split(ctx: Context, x: jax.Array, sizes: Any, dim: int = 0) -> tuple[jax.Array, ...]:
    axis = _axis(dim, x.ndim)
    ends = np.cumsum([out.shape[axis] for out in ctx.outs], dtype=int).tolist()
    return tuple(
        lax.slice_in_dim(x, first, last, axis=axis) for first, last in zip([0, *ends], ends)
    )


@lowering("aten.unbind.int", "aten.unbind_copy.int", traits=BLOCK)
def _unbind(ctx: Context, x: jax.Array, dim: int = 0) -> tuple[jax.Array, ...]:
    axis = _axis(dim, x.ndim)
    return tuple(lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis]))


@lowering("aten.diagonal.default", "aten.diagonal_copy.default", traits=BLOCK)
def _diagonal(
    ctx: Context, x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    if ctx.num_devices == 1:
        return jnp.diagonal(x, offset, dim1, dim2)
    return take_diagonal(x, offset, dim1, dim2)


@view_write("aten.diagonal.default")
def _diagonal_write(
    base: jax.Array, view: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    return write_diagonal(base, view, offset, dim1, dim2)


# Windows: `unfold` and the general `as_strided`.

_SHARED = (
    "{}: elements of this view share memory, so a write to it has no one result. "
    "Clone the view and write to the clone."
)


def _windows(length: int, size: int, step: int) -> np.ndarray:
    """The positions of each window's elements in the dim, as (windows, size)."""
    return np.arange(0, length - size + 1, step)[:, None] + np.arange(size)


@lowering("aten.unfold.default", "aten.unfold_copy.default", traits=BLOCK)
def _unfold(ctx: Context, x: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    if x.ndim == 0:
        return x.reshape(ctx.shape)
    axis = _axis(dimension, x.ndim)
    length = x.shape[axis]
    num = (length - size) // step + 1
    if size <= step and size:
        # Windows that do not overlap are blocks: a pad, a reshape and a slice partition well, a
        # gather does not.
        pad = [(0, 0, 0)] * x.ndim
        pad[axis] = (0, num * step - length, 0)
        blocks = lax.pad(x, jnp.zeros((), x.dtype), pad).reshape(
            *x.shape[:axis], num, step, *x.shape[axis + 1 :]
        )
        return jnp.moveaxis(lax.slice_in_dim(blocks, 0, size, axis=axis + 1), axis + 1, -1)
    return jnp.moveaxis(
        jnp.take(x, _windows(length, size, step), axis=axis, mode="clip"), axis + 1, -1
    )


@view_write("aten.unfold.default")
def _unfold_write(
    base: jax.Array, view: jax.Array, dimension: int, size: int, step: int
) -> jax.Array:
    if base.ndim == 0:
        return view.reshape(()) if size else base
    axis = _axis(dimension, base.ndim)
    if step < size and view.shape[axis] > 1:
        raise NotImplementedError(_SHARED.format("unfold"))
    region = (slice(None),) * axis + (_windows(base.shape[axis], size, step),)
    view = jnp.moveaxis(view, -1, axis + 1)
    return base.at[region].set(apart(view), unique_indices=True)


class _Blocks:
    """A strided region as a reshape, slice, transpose and broadcast of a block of the storage.

    This needs no gather. It is possible (`dense`) where, with the dims in the order of decreasing
    stride, each dim fits into the stride of the dim before it. Contiguous views, transposes, slices
    with a step and diagonals do; overlapping windows do not.
    """

    def __init__(self, size: list[int], stride: list[int]) -> None:
        moving = [d for d in range(len(size)) if size[d] > 1 and stride[d] > 0]
        self.order = sorted(moving, key=lambda d: -stride[d])
        self.sizes = [size[d] for d in self.order]
        strides = [stride[d] for d in self.order]
        inner = list(zip(strides, strides[1:], self.sizes[1:]))
        self.dense = all(outer % s == 0 and n * s <= outer for outer, s, n in inner)
        self.shape = [*self.sizes[:1], *(outer // s for outer, s, _ in inner), *strides[-1:]]
        self.length = self.sizes[0] * strides[0] if strides else 1
        self.size = size
        self.shared = any(n > 1 and s == 0 for n, s in zip(size, stride))

    def cut(self, flat: jax.Array, offset: int) -> jax.Array:
        """The block that starts at `offset`.

        After the end of the storage it is zeros, which are not part of the view.
        """
        stop = min(offset + self.length, flat.shape[0])
        part = lax.slice_in_dim(flat, offset, stop)
        return lax.pad(
            part, jnp.zeros((), flat.dtype), [(0, self.length - (stop - offset), 0)]
        ).reshape(self.shape)

    def read(self, flat: jax.Array, offset: int) -> jax.Array:
        block = self.cut(flat, offset)
        if self.order:
            block = lax.slice(block, [0] * block.ndim, [*self.sizes, 1]).reshape(self.sizes)
            block = jnp.transpose(block, np.argsort(self.order).tolist())
        kept = [n if d in self.order else 1 for d, n in enumerate(self.size)]
        return jnp.broadcast_to(block.reshape(kept), self.size)

    def write(self, flat: jax.Array, offset: int, view: jax.Array) -> jax.Array:
        kept = view.reshape([self.size[d] for d in sorted(self.order)])
        ranks = np.argsort(np.argsort(self.order)).tolist()
        new = jnp.transpose(kept, ranks) if self.order else kept
        if self.order:
            block = self.cut(flat, offset)
            new = write_block(block, new[..., None], [0] * block.ndim)
        new = new.reshape(-1)[: flat.shape[0] - offset]
        return write_block_in_dim(flat, new, offset, 0)


def _positions(size: list[int], stride: list[int], offset: int) -> np.ndarray:
    """The position of each element in the storage."""
    index = np.full((1,) * len(size), offset)
    for d, (n, s) in enumerate(zip(size, stride)):
        index = index + (np.arange(n) * s).reshape([-1 if e == d else 1 for e in range(len(size))])
    return index


@lowering("aten.as_strided.default", "aten.as_strided_copy.default", traits=BLOCK)
def _as_strided(
    ctx: Context,
    x: jax.Array,
    size: list[int],
    stride: list[int],
    storage_offset: int | None = None,
) -> jax.Array:
    flat, offset = x.reshape(-1), storage_offset or 0
    if 0 in size:
        return jnp.zeros(size, x.dtype)
    blocks = _Blocks(list(size), list(stride))
    if blocks.dense:
        return blocks.read(flat, offset)
    return jnp.take(flat, _positions(size, stride, offset), mode="clip")


@lowering("aten.as_strided_scatter.default")
def _as_strided_scatter(
    ctx: Context,
    x: jax.Array,
    src: jax.Array,
    size: list[int],
    stride: list[int],
    storage_offset: int | None = None,
) -> jax.Array:
    return _as_strided_write(x, src.astype(x.dtype), size, stride, storage_offset)


@view_write("aten.as_strided.default")
def _as_strided_write(
    base: jax.Array,
    view: jax.Array,
    size: list[int],
    stride: list[int],
    storage_offset: int | None = None,
) -> jax.Array:
    flat, offset = base.reshape(-1), storage_offset or 0
    if 0 in size:
        return base
    blocks = _Blocks(list(size), list(stride))
    if blocks.dense and not blocks.shared:
        return blocks.write(flat, offset, view).reshape(base.shape)
    positions = _positions(size, stride, offset)
    if np.unique(positions).size != positions.size:
        raise NotImplementedError(_SHARED.format("as_strided"))
    return flat.at[positions].set(apart(view), unique_indices=True).reshape(base.shape)


# The same bits in another dtype.


def _real_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Reinterprets real numbers as another dtype, along the last dim if the sizes differ.

    The least significant part comes first, as in the memory of every supported machine.
    """
    if x.dtype.itemsize < dtype.itemsize:
        ratio = dtype.itemsize // x.dtype.itemsize
        x = x.reshape(*x.shape[:-1], x.shape[-1] // ratio, ratio)
    if x.dtype.itemsize != dtype.itemsize:
        x = apart(x)  # XLA joins two such conversions to one of a wrong shape
    bits = lax.bitcast_convert_type(x, dtype)
    return (
        bits.reshape(*x.shape[:-1], -1)
        if x.dtype.itemsize > dtype.itemsize and x.size
        else bits.reshape(bits.shape[: x.ndim])
    )


def _bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    if x.dtype == dtype:
        return x
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = _pairs(x).reshape(*x.shape[:-1], x.shape[-1] * 2) if x.ndim else _pairs(x)
    if dtype == np.bool_:
        return _real_bits(x, np.dtype(np.uint8)) != 0
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real = _real_bits(x, np.finfo(dtype).dtype)
        return _complex(real.reshape(*real.shape[:-1], real.shape[-1] // 2, 2))
    return _real_bits(x, dtype)


@lowering("aten.view.dtype", "aten.view_copy.dtype")
def _view_dtype(ctx: Context, x: jax.Array, dtype: torch.dtype) -> jax.Array:
    return _bits(x, ctx.dtype).reshape(ctx.shape)


@view_write("aten.view.dtype")
def _view_dtype_write(base: jax.Array, view: jax.Array, dtype: torch.dtype) -> jax.Array:
    assert view.dtype == dtypes.to_jax(dtype)
    return _bits(view, base.dtype).reshape(base.shape)


def _pairs(x: jax.Array) -> jax.Array:
    return jnp.stack([x.real, x.imag], axis=-1)


def _complex(x: jax.Array) -> jax.Array:
    return lax.complex(x[..., 0], x[..., 1])


@lowering("aten.view_as_real.default", "aten.view_as_real_copy.default")
def _view_as_real(ctx: Context, x: jax.Array) -> jax.Array:
    return _pairs(x)


@view_write("aten.view_as_real.default")
def _view_as_real_write(base: jax.Array, view: jax.Array) -> jax.Array:
    return _complex(view)


@lowering("aten.view_as_complex.default", "aten.view_as_complex_copy.default")
def _view_as_complex(ctx: Context, x: jax.Array) -> jax.Array:
    return _complex(x)


@view_write("aten.view_as_complex.default")
def _view_as_complex_write(base: jax.Array, view: jax.Array) -> jax.Array:
    return _pairs(view)


# The lowering of `_conj` is in `elementwise`.
@lowering("aten._conj_copy.default")
def _conj_copy(ctx: Context, x: jax.Array) -> jax.Array:
    return jnp.conj(x)


@view_write("aten._conj.default")
def _conj_write(base: jax.Array, view: jax.Array) -> jax.Array:
    return jnp.conj(view)


@lowering("aten._neg_view.default", "aten._neg_view_copy.default")
def _neg_view(ctx: Context, x: jax.Array) -> jax.Array:
    return -x


@view_write("aten._neg_view.default")
def _neg_view_write(base: jax.Array, view: jax.Array) -> jax.Array:
    return -view
