"""Sums over the channels of split images: one all-reduce for all axes that split them.

XLA's partitioner reduces over one split dim after the other: with a batch, rows and columns that
are split, each sum for a channel would take three all-reduces. Here a `jax.shard_map` has each
device sum its own block, and one all-reduce joins the sums. Sizes need not divide evenly: blocks
are padded with zeros to the size of the largest.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd_core.ops.registry import ImageLayout

_CHANNELS = 1  # their dim, in (batch, channel, ...)


class SplitImages:
    """Images whose batch or positions are split, for sums over all dims but the channels."""

    def __init__(self, layout: ImageLayout, shape: Sequence[int]) -> None:
        self._layout, self._shape = layout, tuple(shape)
        self._summed = tuple(dim for dim in range(len(shape)) if dim != _CHANNELS)
        self._names = tuple(name for dim in self._summed for name in layout.axes[dim])

    @staticmethod
    def of(layout: ImageLayout | None, shape: Sequence[int]) -> "SplitImages | None":
        """The images; None if no layout is known, or each device has all elements of a channel."""
        if layout is None or len(layout.axes) != len(shape) or 0 in shape:
            return None
        found = SplitImages(layout, shape)
        return found if any(layout.num_parts(dim) > 1 for dim in found._summed) else None

    def moments(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The mean and the biased variance of each channel: (channel,), of the dtype of `x`.

        In two passes, because the mean of the squares less the square of the mean loses digits.
        """
        total = math.prod(self._shape[dim] for dim in self._summed)

        def part(x: jax.Array) -> list[jax.Array]:
            count = jnp.asarray(total, x.dtype)
            mean = lax.psum(jnp.sum(x, axis=self._summed), self._names) / count
            deviation = x - jnp.expand_dims(mean, self._summed)
            own = self._own(x.shape)
            deviation = deviation if own is None else jnp.where(own, deviation, 0)
            squares = jnp.sum(jnp.square(deviation), axis=self._summed)
            return [mean, lax.psum(squares, self._names) / count]

        mean, variance = self._run(part, [x], [])
        return mean, variance

    def sums(
        self,
        function: Callable[..., Sequence[jax.Array]],
        images: Sequence[jax.Array],
        by_channel: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """The sums for each channel of two arrays, by one all-reduce: each (channel,).

        Args:
            function: returns the two arrays from `(*images, *by_channel)`. Their elements are zero
                where those of all images are.
            images: arrays of the images' shape.
            by_channel: arrays of shape (channel,); the function gets them with dims for the others.
        """

        def part(*blocks: jax.Array) -> list[jax.Array]:
            own = blocks[: len(images)]
            spread = [jnp.expand_dims(x, self._summed) for x in blocks[len(images) :]]
            found = [jnp.sum(x, axis=self._summed) for x in function(*own, *spread)]
            return list(lax.psum(jnp.stack(found), self._names))

        return self._run(part, images, by_channel)

    def _block(self, dim: int) -> int:
        return -(-self._shape[dim] // self._layout.num_parts(dim))

    def _padded_size(self, dim: int) -> int:
        return self._block(dim) * self._layout.num_parts(dim)

    def _own(self, shape: Sequence[int]) -> jax.Array | None:
        """Which elements of a block of this shape are not padding; None if no device has any.

        Channels that are padding are cut off at the end.
        """
        found = None
        for dim in self._summed:
            if self._padded_size(dim) == self._shape[dim]:
                continue
            start = lax.axis_index(self._layout.axes[dim]) * shape[dim]
            along = [shape[d] if d == dim else 1 for d in range(len(shape))]
            inside = lax.broadcasted_iota(start.dtype, along, dim) + start < self._shape[dim]
            found = inside if found is None else found & inside
        return found

    def _run(
        self,
        function: Callable[..., list[jax.Array]],
        images: Sequence[jax.Array],
        by_channel: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Has every device run a function, with two results for each of its channels."""
        split = PartitionSpec(*(axes or None for axes in self._layout.axes))
        channel = PartitionSpec(self._layout.axes[_CHANNELS] or None)
        padded = [self._padded(x, range(len(self._shape))) for x in images]
        padded += [self._padded(x, [_CHANNELS]) for x in by_channel]
        mapped: Any = jax.shard_map(
            function,
            mesh=self._layout.mesh,
            in_specs=tuple([split] * len(images) + [channel] * len(by_channel)),
            out_specs=[channel] * 2,
            check_vma=False,
        )
        return [x[: self._shape[_CHANNELS]] for x in mapped(*padded)]

    def _padded(self, x: jax.Array, dims: Sequence[int]) -> jax.Array:
        """Zeros at the end of each dim, so that all devices have blocks of one size."""
        edges = [(0, self._padded_size(dim) - n) for n, dim in zip(x.shape, dims, strict=True)]
        return jnp.pad(x, edges) if any(map(sum, edges)) else x
