"""The reduction of partial sums over devices: its axes, and its form in a manual region."""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd_core.graph.values import Spec
from spmd_core.runtime import torus
from spmd_core.runtime.jax_sharding import jax_axis_names, jax_mesh
from spmd_core.sharding.mesh import Mesh


class Columns(enum.Enum):
    """How the columns of a matrix are scattered.

    XLA's CPU backend scatters along the major dim of a layout: it would transpose the whole matrix,
    and each shard back.

    Attributes:
        AS_THEY_ARE: XLA chooses.
        TRANSPOSED: as the rows of the transpose, which the CPU backend computes in place of a
            matrix product.
        IN_BLOCKS: each device's columns are copied first, row by row, to a matrix of their own.
    """

    AS_THEY_ARE = enum.auto()
    TRANSPOSED = enum.auto()
    IN_BLOCKS = enum.auto()


@dataclass(frozen=True)
class Reduction:
    """How a gradient is reduced over the batch. Axes are numbers of mesh axes.

    Attributes:
        mesh: the mesh.
        batch_axes: the axes that split the batch, the major one first, followed by
            `sequence_axes`.
        scattered: the axes over which the gradient is reduce-scattered, the major one first; none
            for an all-reduce.
        dim: the dim of the gradient that `scattered` splits.
        others: the dims that other axes split, each with these axes, none of which splits the
            batch. If other axes split `dim`, too, those of `scattered` are the minor ones.
        of_activation: whether the value is an activation or its gradient, a sum over features.
        sequence_axes: those of the batch's axes that split the sequence, the second dim.
    """

    mesh: Mesh
    batch_axes: tuple[int, ...]
    scattered: tuple[int, ...] = ()
    dim: int | None = None
    others: tuple[tuple[int, tuple[int, ...]], ...] = ()
    of_activation: bool = False
    sequence_axes: tuple[int, ...] = ()

    @property
    def num_parts(self) -> int:
        """The number of parts into which the batch is split."""
        return self.size(self.batch_axes)

    @property
    def axes(self) -> frozenset[int]:
        """All axes that split the batch or the gradient."""
        return frozenset(self.batch_axes).union(*(axes for _, axes in self.others))

    def size(self, axes: Sequence[int]) -> int:
        """The number of positions along some axes."""
        return math.prod(self.mesh.mesh_shape[axis] for axis in axes)

    def spec(self, axes: Mapping[int, tuple[int, ...]]) -> PartitionSpec:
        """The partition spec of an array whose dims are split by these axes."""
        names = jax_axis_names(self.mesh)
        split = {dim: tuple(names[axis] for axis in by) for dim, by in axes.items()}
        return PartitionSpec(*(split.get(dim) for dim in range(max(split, default=-1) + 1)))


def mapped(
    function: Callable[..., Any], reduction: Reduction, in_specs: Any, out_specs: Any
) -> Callable[..., jax.Array]:
    """Has each device apply `function` to its blocks, in a manual region over the axes."""
    names = jax_axis_names(reduction.mesh)
    found: Callable[..., jax.Array] = jax.shard_map(
        function,
        mesh=jax_mesh(reduction.mesh),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={names[axis] for axis in reduction.axes},
        check_vma=False,
    )
    return found


def reduced_block(
    total: jax.Array,
    reduction: Reduction,
    spec: Spec,
    *,
    is_scattered: bool = False,
    columns: Columns = Columns.AS_THEY_ARE,
) -> jax.Array:
    """Inside the region: the sum of all devices' partial sums, or this device's shard of it.

    With `is_scattered`, `total` is already reduce-scattered. `columns` says how the last dim of a
    matrix is scattered.
    """
    names = jax_axis_names(reduction.mesh)
    if reduction.dim is not None and not is_scattered:
        # Only a dim that no other axis splits may be split unevenly.
        padding = [(0, 0)] * total.ndim
        num_shards = reduction.size(reduction.scattered)
        padding[reduction.dim] = (0, -spec.shape[reduction.dim] % num_shards)
        total = jnp.pad(total, padding)
        if total.ndim != 2 or reduction.dim == 0:
            columns = Columns.AS_THEY_ARE
        total = _scattered(total, reduction, reduction.dim, columns)
    rest = [axis for axis in reduction.batch_axes if axis not in reduction.scattered]
    over = tuple(names[axis] for axis in rest if reduction.size((axis,)) > 1)
    return lax.psum(total, over) if over else total


def _scattered(total: jax.Array, reduction: Reduction, dim: int, columns: Columns) -> jax.Array:
    mesh, axes = reduction.mesh, reduction.scattered
    if columns is Columns.TRANSPOSED:
        return torus.scatter(total.T, mesh, axes, 0).T
    if columns is Columns.IN_BLOCKS:
        blocks = total.reshape(len(total), reduction.size(axes), -1).swapaxes(0, 1)
        return lax.squeeze(torus.scatter(blocks, mesh, axes, 0), (0,))
    return torus.scatter(total, mesh, axes, dim)


def without_padding(total: jax.Array, spec: Spec) -> jax.Array:
    """The reduced sum without the padding of dims that are split unevenly."""
    return lax.slice(total, (0,) * total.ndim, spec.shape)


def reduced_spec(reduction: Reduction) -> PartitionSpec:
    """The partition spec of the reduced sum."""
    split = dict(reduction.others)
    if reduction.dim is not None:
        split[reduction.dim] = (*split.get(reduction.dim, ()), *reduction.scattered)
    return reduction.spec(split)


def stack_spec(reduction: Reduction) -> PartitionSpec:
    """The partition spec of a stack: an array with a first dim for the parts of the batch."""
    others = {dim + 1: axes for dim, axes in reduction.others}
    return reduction.spec({0: reduction.batch_axes, **others})


def reduced(stack: jax.Array, reduction: Reduction, spec: Spec) -> jax.Array:
    """The gradient that is the sum over a stack."""
    function = mapped(
        lambda block: reduced_block(block[0], reduction, spec),
        reduction,
        stack_spec(reduction),
        reduced_spec(reduction),
    )
    return without_padding(function(stack), spec)
