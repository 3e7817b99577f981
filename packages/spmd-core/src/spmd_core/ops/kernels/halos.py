"""Windows over split images: each device fetches the rows of others that its windows read.

XLA's partitioner errs on strided and dilated windows over split dims, and moves more than necessary
(docs/explanation/xla_errors.md). Here a `jax.shard_map` gives each device its own block, neighbors
exchange the rows at their borders (halos), and the window operation itself runs on one device's
array. Sizes need not divide evenly: blocks are padded with zeros to the size of the largest, and
each device slices the rows at which its windows start.

"Rows" are the elements along a split dim. The global image has `size` rows; device i has those from
`i * block` on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from spmd_core.ops.registry import ImageLayout


@dataclass(frozen=True)
class SplitDim:
    """Windows along one split dim.

    Attributes:
        dim: the dim of the images, counted from 0.
        axes: the mesh axes that split it, the major one first.
        axis_sizes: the sizes of these axes.
        mesh_order: the positions in `axes` of the axes in the order of the mesh.
        size, num: the rows of the input, and of the result.
        stride, padding: the stride and padding of the windows.
        reach: the rows of a window, from the first to the last, with those that it skips.
    """

    dim: int
    axes: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    mesh_order: tuple[int, ...]
    size: int
    num: int
    stride: int
    padding: int
    reach: int

    @property
    def count(self) -> int:
        """The number of blocks."""
        return math.prod(self.axis_sizes)

    @property
    def block(self) -> int:
        """The rows of the input on each device."""
        return -(-self.size // self.count)

    @property
    def num_block(self) -> int:
        """The rows of the result on each device."""
        return -(-self.num // self.count)

    @property
    def read(self) -> list[range]:
        """For each device, the rows that its results read; rows outside the image are padding."""
        found = []
        for i in range(self.count):
            start = i * self.num_block * self.stride - self.padding
            num = min(self.num_block, self.num - i * self.num_block)
            length = (num - 1) * self.stride + self.reach if num > 0 else 0
            found.append(range(start, start + length))
        return found

    @property
    def readers(self) -> list[range]:
        """For each device, the results that read its rows; some may be outside the result."""
        found = []
        for i in range(self.count):
            begin, end = i * self.block + self.padding, (i + 1) * self.block + self.padding
            first = -((self.reach - 1 - begin) // self.stride)
            found.append(range(first, max(first, (end - 1) // self.stride + 1)))
        return found

    @property
    def num_read(self) -> int:
        """The number of rows that a full block of results reads."""
        return (self.num_block - 1) * self.stride + self.reach

    @property
    def num_readers(self) -> int:
        """The most results that read rows of one device."""
        return max(1, *map(len, self.readers))


class Images:
    """One operation of windows over split images.

    Attributes:
        dims: the split dims after the channels.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, axes: Sequence[tuple[str, ...]], dims: Sequence[SplitDim]
    ) -> None:
        self._mesh, self._axes, self.dims = mesh, tuple(axes), tuple(dims)

    @staticmethod
    def of(
        layout: ImageLayout | None,
        shape: Sequence[int],
        sizes: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        *,
        needs_all_channels: bool,
    ) -> "Images | None":
        """The operation; None if no layout is known, or no spatial dim is split.

        Args:
            layout: the layout of the images.
            shape: the shape of the input.
            sizes: the sizes of the result's spatial dims, which are the last dims.
            kernel, stride, padding, dilation: of the windows, one number for each spatial dim.
            needs_all_channels: whether each device needs all channels.
        """
        if layout is None or len(layout.axes) != len(shape) or 0 in (*shape, *sizes):
            return None
        lead, dims = len(shape) - len(sizes), []
        axes = list(layout.axes)
        if needs_all_channels:
            axes[lead - 1] = ()
        for d, (size, num) in enumerate(zip(shape[lead:], sizes)):
            own = axes[lead + d]
            counts = tuple(layout.mesh.shape[axis] for axis in own)
            if min(size, num) == 1 or math.prod(counts) == 1:
                # The partitioner crashes on some reshapes of split dims of one element.
                axes[lead + d] = ()
                continue
            names = layout.mesh.axis_names
            order = tuple(own.index(name) for name in names if name in own)
            reach = dilation[d] * (kernel[d] - 1) + 1
            rows = (size, num, stride[d], padding[d], reach)
            dims.append(SplitDim(lead + d, own, counts, order, *rows))
        return Images(layout.mesh, axes, dims) if dims else None

    def _count(self, axes: Sequence[str]) -> int:
        return math.prod(self._mesh.shape[axis] for axis in axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The mesh axes that split the images."""
        return tuple(axis for axes in self._axes for axis in axes)

    def padding(self, padding: Sequence[int]) -> tuple[int, ...]:
        """The windows' padding inside a block: none along split dims, whose rows include it."""
        split, lead = {dim.dim for dim in self.dims}, len(self._axes) - len(padding)
        return tuple(0 if lead + d in split else pad for d, pad in enumerate(padding))

    def run(
        self,
        function: Callable[..., Any],
        images: Sequence[jax.Array],
        others: Sequence[jax.Array],
        shapes: Sequence[tuple[int, ...] | None],
    ) -> list[jax.Array]:
        """Has every device run `function(*images, *others)` on its own blocks.

        Args:
            function: returns an array for each of `shapes`.
            images: arrays that are split like the layout.
            others: replicated arrays.
            shapes: the global shapes of the results that are split like the layout; None for a
                replicated result.
        """
        split, same = PartitionSpec(*(axes or None for axes in self._axes)), PartitionSpec()
        padded = [
            jnp.pad(x, [(0, p - n) for n, p in zip(x.shape, self._padded(x.shape))]) for x in images
        ]
        mapped: Callable[..., list[jax.Array]] = jax.shard_map(
            lambda *blocks: list(function(*blocks)),
            mesh=self._mesh,
            in_specs=tuple([split] * len(images) + [same] * len(others)),
            out_specs=[same if shape is None else split for shape in shapes],
            check_vma=False,
        )
        results = mapped(*padded, *others)
        return [
            x if shape is None else lax.slice(x, (0,) * x.ndim, shape)
            for x, shape in zip(results, shapes)
        ]

    def _padded(self, shape: Sequence[int]) -> list[int]:
        counts = map(self._count, self._axes)
        return [-(-n // count) * count for n, count in zip(shape, counts)]

    def num_inside(self, sizes: Sequence[int]) -> list[int]:
        """The sizes of a device's block of the result, in the spatial dims."""
        split, lead = {dim.dim: dim.num_block for dim in self.dims}, len(self._axes) - len(sizes)
        return [split.get(lead + d, num) for d, num in enumerate(sizes)]

    # Inside `run`: on one device's blocks.

    def windows(self, x: jax.Array) -> jax.Array:
        """The rows that this device's results read; rows outside the image are zeros."""
        for dim in self.dims:
            x = _fetched(x, dim, dim.block, dim.size, dim.read, dim.num_read)
        return x

    def read_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `windows` of a block, whose other dims are those of `shape`."""
        lengths = {dim.dim: dim.num_read for dim in self.dims}
        return tuple(lengths.get(d, n) for d, n in enumerate(shape))

    def returned(self, read: jax.Array) -> jax.Array:
        """The transpose of `windows`: values return to the devices of the rows, which add them."""
        blocks = {dim.dim: dim.block for dim in self.dims}
        shape = tuple(blocks.get(d, n) for d, n in enumerate(read.shape))
        block = jax.ShapeDtypeStruct(shape, read.dtype)
        total: jax.Array = jax.linear_transpose(self.windows, block)(read)[0]
        return total

    def window_starts(self) -> dict[int, jax.Array]:
        """By dim, the number of the first row of `windows`."""
        return {dim.dim: _own(dim, [rows.start for rows in dim.read]) for dim in self.dims}

    def readers(self, grad: jax.Array) -> jax.Array:
        """The rows of a result that read this device's input; rows outside the result are zeros."""
        for dim in self.dims:
            grad = _fetched(grad, dim, dim.num_block, dim.num, dim.readers, dim.num_readers)
        return grad

    def read_by_readers(self, x: jax.Array) -> jax.Array:
        """The input rows that `readers` read, with zeros in place of other devices' rows."""
        for dim in self.dims:
            x = _shifted(
                x, dim, self._reader_starts(dim), (dim.num_readers - 1) * dim.stride + dim.reach
            )
        return x

    def own_of_readers(self, x: jax.Array) -> jax.Array:
        """The transpose of `read_by_readers`: this device's rows of what `readers` read."""
        for dim in self.dims:
            x = _shifted(x, dim, [-start for start in self._reader_starts(dim)], dim.block)
        return x

    @staticmethod
    def _reader_starts(dim: SplitDim) -> list[int]:
        """For each device, the first row that its readers read, counted from its first row."""
        return [
            results.start * dim.stride - dim.padding - i * dim.block
            for i, results in enumerate(dim.readers)
        ]


def _own(dim: SplitDim, values: Sequence[int]) -> jax.Array:
    """This device's value."""
    index: Any = 0
    for axis, size in zip(dim.axes, dim.axis_sizes):
        index = index * size + lax.axis_index(axis)
    return jnp.asarray(values)[index]


def _sent(x: jax.Array, dim: SplitDim, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends `x` from block `source` to block `target` for each pair; zeros on other targets.

    `lax.ppermute` counts devices in the order of the mesh's axes, which may not be the dim's.
    """
    order = dim.mesh_order
    sizes = [dim.axis_sizes[i] for i in order]

    def position(block: int) -> int:
        at = np.unravel_index(block, dim.axis_sizes)
        return int(np.ravel_multi_index([at[i] for i in order], sizes))

    names = tuple(dim.axes[i] for i in order)
    return lax.ppermute(x, names, [(position(a), position(b)) for a, b in pairs])


def _fetched(
    x: jax.Array, dim: SplitDim, block: int, size: int, wanted: Sequence[range], length: int
) -> jax.Array:
    """`length` rows of the global array, from the first wanted row on; zeros outside the array.

    Rows that this device does not want may be zeros, too.
    """
    before, after = [], []
    for i, rows in enumerate(wanted):
        first, last = max(rows.start, 0), min(rows.stop, size)
        before.append(i * block - first if first < last else 0)
        after.append(last - (i + 1) * block if first < last else 0)
    if dim.count == 2 and 0 < max(before) == max(after) <= block:
        parts = _with_other_half(x, dim, max(before))
    else:
        low, high = _neighbors(x, dim, before, block, -1), _neighbors(x, dim, after, block, 1)
        parts = [*low[::-1], x, *high]
    wide = jnp.concatenate(parts, axis=dim.dim) if len(parts) > 1 else x
    starts = [rows.start - i * block + max(0, *before) for i, rows in enumerate(wanted)]
    return _shifted(wide, dim, starts, length)


def _with_other_half(x: jax.Array, dim: SplitDim, num: int) -> list[jax.Array]:
    """The block, with `num` rows of the other one at one side, and zeros at the other side.

    Two devices exchange the rows at their border in one collective.
    """
    is_first = _own(dim, [1, 0]) == 1
    size = x.shape[dim.dim]
    first, last = (
        lax.slice_in_dim(x, start, start + num, axis=dim.dim) for start in (0, size - num)
    )
    got = _sent(jnp.where(is_first, last, first), dim, [(0, 1), (1, 0)])
    nothing = jnp.zeros_like(got)
    return [jnp.where(is_first, nothing, got), x, jnp.where(is_first, got, nothing)]


def _neighbors(
    x: jax.Array, dim: SplitDim, needs: Sequence[int], block: int, side: int
) -> list[jax.Array]:
    """The rows before (side -1) or after (1) the block, as many as any device needs.

    Rows of the nearest device come first. A device that needs none gets zeros.
    """
    parts, left = [], max(needs)
    distance = 0
    while left > 0:
        distance, num = distance + 1, min(block, left)
        pairs = [
            (i + side * distance, i)
            for i, need in enumerate(needs)
            if need > (distance - 1) * block and 0 <= i + side * distance < dim.count
        ]
        start = x.shape[dim.dim] - num if side < 0 else 0
        edge = lax.slice_in_dim(x, start, start + num, axis=dim.dim)
        parts.append(_sent(edge, dim, pairs))
        left -= num
    return parts


def _shifted(x: jax.Array, dim: SplitDim, starts: Sequence[int], length: int) -> jax.Array:
    """`length` rows from this device's start on; zeros out of bounds of `x`."""
    low = max(0, -min(starts))
    high = max(0, max(starts) + length - x.shape[dim.dim])
    edges = [(low, high, 0) if d == dim.dim else (0, 0, 0) for d in range(x.ndim)]
    x = lax.pad(x, jnp.zeros((), x.dtype), edges)
    if min(starts) == max(starts):
        return lax.slice_in_dim(x, starts[0] + low, starts[0] + low + length, axis=dim.dim)
    at = _own(dim, [start + low for start in starts])
    return lax.dynamic_slice_in_dim(x, at, length, axis=dim.dim)
