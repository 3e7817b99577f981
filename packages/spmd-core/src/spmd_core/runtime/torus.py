"""Splits collectives over a TPU's torus into stages that libtpu compiles as what they are.

libtpu 0.0.52 compiles a reduce-scatter, also jax's own `psum_scatter`, as an all-reduce and a slice
if its groups are all devices of a slice, and the slice is a torus of three dims, or of two dims of
equal size from 4 on (v4-16, v5e-16, v5e-64, v5p-128, v6e-256, but not v5e-32): each device then
holds the whole sum, and sends twice as much. Fewer devices that differ in three coordinates scatter
what is padded, and permute. So a scatter over either becomes one over the larger part of the axis
and one over the rest, which together send the bytes of one.

GPT-2 4B over 8 TPU v4 then sends half of the bytes.

It compiles an all-gather as an all-reduce of arrays that are zero elsewhere if its groups are all
devices of a slice with at least 4 in each of three dims (v4-128, v5p-128, v5p-512, but not v5p-64
or 32 devices of v5p-128), which sends twice as much, too. So such a gather has the same stages, in
the other order: the last one, which moves most, is over two dims of the torus.
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import jax
import numpy as np
from jax import lax

from spmd_core.runtime import devices
from spmd_core.runtime.jax_sharding import jax_axis_names
from spmd_core.sharding.mesh import Mesh

Groups = tuple[tuple[int, ...], ...]
_MOST_DIMS = 2
# From this size on, of the two dims of a slice that are equal, or of all three.
_LEAST_SIDE = 4


def scatter(x: jax.Array, mesh: Mesh, axes: tuple[int, ...], dim: int) -> jax.Array:
    """Inside a manual region: this device's block of the sum of all arrays along some mesh axes.

    Args:
        x: each device's own array; the axes together divide its dim.
        mesh: the region's.
        axes: the numbers of the axes, the major one first.
        dim: of the array, which is cut into blocks.
    """
    names = jax_axis_names(mesh)
    for groups in stages(mesh, axes):
        x = lax.psum_scatter(
            x,
            tuple(names[axis] for axis in axes),
            scatter_dimension=dim,
            axis_index_groups=groups,
            tiled=True,
        )
    return x


def gather(x: jax.Array, mesh: Mesh, axes: tuple[int, ...], dim: int) -> jax.Array:
    """Inside a manual region: the whole array, of which each device has its block.

    Args:
        x: this device's block.
        mesh: the region's.
        axes: the numbers of the axes that split the dim, the major one first.
        dim: of the array.
    """
    names = jax_axis_names(mesh)
    for groups in gather_stages(mesh, axes):
        x = lax.all_gather(
            x,
            tuple(names[axis] for axis in axes),
            axis=dim,
            axis_index_groups=groups,
            tiled=True,
        )
    return x


@lru_cache(maxsize=1024)
def stages(mesh: Mesh, axes: tuple[int, ...]) -> tuple[Groups | None, ...]:
    """The groups of positions along some axes that scatter together, stage by stage.

    Positions are counted along all of these axes, the major one first. A single None, which stands
    for all positions, if no split is needed or none is known.
    """
    placed = _placed(mesh, axes)
    if placed is None:
        return (None,)
    coords, is_whole = placed
    return _stages(coords, is_whole=is_whole)


@lru_cache(maxsize=1024)
def gather_stages(mesh: Mesh, axes: tuple[int, ...]) -> tuple[Groups | None, ...]:
    """As `stages`, of an all-gather."""
    placed = _placed(mesh, axes)
    if placed is None:
        return (None,)
    coords, is_whole = placed
    sides = [len(np.unique(x)) for x in coords[:, 0].T]
    is_summed = is_whole and len(sides) == _MOST_DIMS + 1 and min(sides) >= _LEAST_SIDE
    return _stages(coords, is_whole=is_whole)[::-1] if is_summed else (None,)


def _placed(mesh: Mesh, axes: tuple[int, ...]) -> tuple[np.ndarray, bool] | None:
    """The coordinates of devices, of shape (position along the axes, other positions, dim).

    And whether the positions along the axes are all of a slice. None if no coordinates are known.
    """
    found = devices.all_devices()
    coords = [getattr(found[i], "coords", None) for i in mesh.ids]
    size = math.prod(mesh.mesh_shape[axis] for axis in axes)
    slices = {getattr(x, "slice_index", None) for x in found}
    if None in coords:
        return None
    grid = np.array(coords).reshape(*mesh.mesh_shape, -1)
    along = np.moveaxis(grid, axes, range(len(axes)))
    is_whole = size * len(slices) >= len(found)
    return along.reshape(size, -1, grid.shape[-1]), is_whole


def _stages(coords: np.ndarray, *, is_whole: bool) -> tuple[Groups | None, ...]:
    """The same, by coordinates.

    Of the splits into two, that whose groups extend in the fewest dims, and of these that with the
    largest first stage.

    Args:
        coords: of shape (position along the axes, other positions, dim).
        is_whole: whether the positions along the axes are all of a slice.

    Example:
        >>> box = np.array([(x, y, z) for z in (0, 1) for y in (0, 1) for x in (0, 1)])
        >>> _stages(box[:, None], is_whole=True)
        (((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 1), (2, 3), (4, 5), (6, 7)))
        >>> _stages(box[:4, None], is_whole=False)
        (None,)
    """
    size = len(coords)
    sides = [n for n in (len(np.unique(x)) for x in coords[:, 0].T) if n > 1]
    is_square = len(sides) == 2 and sides[0] == sides[1] >= _LEAST_SIDE
    num_dims = _num_dims(coords, range(size))
    if num_dims <= _MOST_DIMS and not (is_whole and is_square):
        return (None,)
    splits = []
    for minor in range(2, size):
        if size % minor == 0:
            # Block number i of the result belongs to position i: the first stage gives a position
            # the part with the number i // minor, the second one i % minor of that part.
            first = tuple(tuple(range(start, size, minor)) for start in range(minor))
            second = tuple(tuple(range(start, start + minor)) for start in range(0, size, minor))
            splits.append((first, second))

    def most_dims(split: tuple[Groups, Groups]) -> int:
        return max(_num_dims(coords, group) for group in itertools.chain(*split))

    best = min(splits, key=most_dims, default=None)
    return (None,) if best is None or most_dims(best) >= num_dims else best


def _num_dims(coords: np.ndarray, group: Sequence[int]) -> int:
    """In how many coordinates the devices of a group differ, at most over the other positions."""
    block = coords[list(group)]
    return int((block != block[:1]).any(axis=0).sum(axis=-1).max())


devices.on_exchange += [stages.cache_clear, gather_stages.cache_clear]
