"""`Sharding`: which device holds which block of a tensor, in a canonical and hashable form."""

import math
import threading
import weakref
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from spmd_core.arguments import checked, require_int
from spmd_core.errors import PartitionSpecError
from spmd_core.sharding import xla_text
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import (
    OPEN,
    Axis,
    PartitionSpecLike,
    split_spec,
    validate_spec,
)

Shape: TypeAlias = tuple[int, ...]
_LAST_PRIORITY = 2**31 - 1


class ShardingType(IntEnum):
    """How a tensor is distributed over its mesh; the numbers are XLA's."""

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


@checked()
@dataclass(frozen=True)
class OpSharding:
    """XLA's description of one sharding: which block each device holds.

    Attributes:
        type: tiled, replicated, or partial (each block on several devices).
        tile_assignment_dimensions: number of blocks along each tensor dim; for PARTIAL, one more
            entry at the end is the number of devices that hold each block. Empty for REPLICATED.
        tile_assignment_devices: device ids in the order of the blocks.
        replicate_on_last_tile_dim: whether `tile_assignment_dimensions` has that additional entry.
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    type: ShardingType
    tile_assignment_dimensions: tuple[int, ...]
    tile_assignment_devices: tuple[int, ...]
    replicate_on_last_tile_dim: bool


@dataclass(frozen=True)
class Manual:
    """The mesh axes of a manual region: the region's tensors have one value per position on them.

    Along these axes each device computes for itself, and the partitioner adds no communication.
    """

    mesh: Mesh
    axes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of positions along the axes: how many values a local tensor has."""
        return math.prod(self.mesh.mesh_shape[axis] for axis in self.axes)


@dataclass(frozen=True, repr=False)
class Sharding:
    """The canonical sharding of tensors of one rank: the mesh axes that split each tensor dim.

    Built with `Sharding.of`, which checks the spec and returns the same object for the same
    sharding. The blocks of a dim that is split over the axes (a, b) are numbered with b running
    fastest. A dim whose size is not a multiple of its number of blocks is padded at its end in
    device memory.

    A mark has more to say to the partitioner: which dims it may split further, and which mark
    decides where two differ (`Sharding.marked`). Data has its blocks by `mesh` and `dims` alone.

    Attributes:
        mesh: the mesh.
        dims: for each tensor dim, the mesh axis indices that split it, major first. An axis of size
            1 is kept, although it splits nothing.
        open_dims: the dims, ascending, that the partitioner may split further inside of a program.
        priority: of several marks in a program, those of a lower number are propagated first.

    Example:
        >>> sharding = Sharding.of(Mesh(range(8), (4, 2), ("data", "model")), ("model", None), 2)
        >>> sharding.tiles, sharding.text
        ((2, 1), '{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}')
        >>> sharding.padded_shape((5, 3)), sharding.shard_shape((5, 3))
        ((6, 3), (3, 3))
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    mesh: Mesh
    dims: tuple[tuple[int, ...], ...]
    open_dims: tuple[int, ...] = ()
    priority: int = 0
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        used = [axis for axes in self.dims for axis in axes]
        assert len(set(used)) == len(used), self.dims
        assert all(0 <= axis < len(self.mesh.mesh_shape) for axis in used), self.dims
        key = (self.mesh, self.dims, self.open_dims, self.priority)
        object.__setattr__(self, "_hash", hash(key))

    @classmethod
    def of(cls, mesh: Mesh, partition_spec: PartitionSpecLike, ndim: int) -> "Sharding":
        """The sharding that `partition_spec` describes for tensors of rank `ndim`.

        A spec with fewer than `ndim` entries replicates the remaining dims.

        Raises:
            PartitionSpecError: the spec does not fit the mesh, or is longer than `ndim`.
            MeshError: `mesh` is not a Mesh.
        """
        return cls._of_rank(mesh, validate_spec(mesh, partition_spec), ndim, partition_spec)

    @classmethod
    def of_dims(cls, mesh: Mesh, dims: tuple[tuple[int, ...], ...]) -> "Sharding":
        """The sharding that splits each dim over axes of the mesh, given by their indices.

        Unlike `of`, it checks nothing: for those who compute many.
        """
        return cls._of_parts(mesh, dims, (), 0)

    @classmethod
    def marked(
        cls, mesh: Mesh, partition_spec: PartitionSpecLike, ndim: int, *, priority: int = 0
    ) -> "Sharding":
        """As `of`, for a mark: the spec may have open dims, and the mark a priority.

        Raises:
            TypeError, ValueError: the priority is not a whole number of at least 0.

        Example:
            >>> mesh = Mesh(range(8), (4, 2), ("data", "model"))
            >>> mark = Sharding.marked(mesh, (("data", PartitionSpec.OPEN),), 2, priority=1)
            >>> mark.partition_spec, mark.open_dims, mark.priority
            (('data', None), (0,), 1)
        """
        dims, open_dims = split_spec(mesh, partition_spec)
        found = cls._of_rank(mesh, dims, ndim, partition_spec)
        priority = require_int("priority", priority, least=0, most=_LAST_PRIORITY)
        return found.with_hints(open_dims, priority)

    def with_hints(self, open_dims: tuple[int, ...], priority: int) -> "Sharding":
        """The same blocks, with other open dims and another priority."""
        return self._of_parts(self.mesh, self.dims, open_dims, priority)

    @property
    def has_hints(self) -> bool:
        """Whether a dim is open, or the priority is another than the highest."""
        return bool(self.open_dims) or self.priority > 0

    @property
    def at_rest(self) -> "Sharding":
        """How data lies that is marked so: without open dims and priority."""
        return self.with_hints((), 0) if self.has_hints else self

    @classmethod
    def _of_rank(
        cls,
        mesh: Mesh,
        dims: tuple[tuple[int, ...], ...],
        ndim: int,
        partition_spec: PartitionSpecLike,
    ) -> "Sharding":
        """The sharding for tensors of rank `ndim`; the spec is for the error message."""
        ndim = require_int("ndim", ndim, least=0)
        if len(dims) > ndim:
            raise PartitionSpecError(
                "a partition spec must not have more entries than the tensor has dims; "
                f"got {tuple(partition_spec)!r} with {len(dims)} entries "
                f"for a tensor of rank {ndim}. Keep at most {ndim} entries; "
                "an omitted entry replicates its dim."
            )
        return cls._of_parts(mesh, dims + ((),) * (ndim - len(dims)), (), 0)

    @classmethod
    def _of_parts(
        cls,
        mesh: Mesh,
        dims: tuple[tuple[int, ...], ...],
        open_dims: tuple[int, ...],
        priority: int,
    ) -> "Sharding":
        key = (mesh, dims, open_dims, priority)
        sharding = _interned.get(key)
        if sharding is None:
            with _interned_lock:
                sharding = _interned.setdefault(key, cls(*key))
        return sharding

    @property
    def ndim(self) -> int:
        """Rank of the tensors."""
        return len(self.dims)

    @cached_property
    def tiles(self) -> tuple[int, ...]:
        """Number of blocks along each tensor dim."""
        return tuple(math.prod(self.mesh.mesh_shape[axis] for axis in axes) for axes in self.dims)

    @cached_property
    def num_shards(self) -> int:
        """Number of different blocks; the mesh holds `mesh.size() // num_shards` copies of each."""
        return math.prod(self.tiles)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole tensor."""
        return self.num_shards == 1

    @cached_property
    def partition_spec(self) -> PartitionSpecLike:
        """The canonical partition spec, of length `ndim`, without what is open.

        Each entry is None, one axis, or a tuple of two or more axes. Axes are given by name, or by
        index in an unnamed mesh.
        """
        names: tuple[Axis, ...] = (
            tuple(range(len(self.mesh.mesh_shape)))
            if self.mesh.axis_names is None
            else self.mesh.axis_names
        )
        entries = (tuple(names[axis] for axis in axes) for axes in self.dims)
        return tuple(
            None if not entry else entry[0] if len(entry) == 1 else entry for entry in entries
        )

    @property
    def marked_spec(self) -> PartitionSpecLike:
        """The partition spec with `PartitionSpec.OPEN` in the open dims."""
        entries = []
        for dim, entry in enumerate(self.partition_spec):
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            is_open = dim in self.open_dims
            entries.append(entry if not is_open else (*axes, OPEN) if axes else OPEN)
        return tuple(entries)

    @property
    def priority_text(self) -> str:
        """Behind the text of a mark: its priority, if that is not the highest one."""
        return f" at priority {self.priority}" if self.priority else ""

    @cached_property
    def tile_assignment(self) -> np.ndarray:
        """Sorted ids of the devices that hold each block.

        A read-only int64 array of shape `(*tiles, num_replicas)`.
        """
        split = [axis for axes in self.dims for axis in axes]
        rest = [axis for axis in range(len(self.mesh.mesh_shape)) if axis not in split]
        assignment = np.sort(
            self.mesh.get_logical_mesh().transpose(*split, *rest).reshape(*self.tiles, -1), axis=-1
        )
        assignment.flags.writeable = False
        return assignment

    @property
    def type(self) -> ShardingType:
        """Replicated, tiled (one device per block), or partial (several devices per block)."""
        if self.is_replicated:
            return ShardingType.REPLICATED
        return ShardingType.PARTIAL if self.tile_assignment.shape[-1] > 1 else ShardingType.TILED

    @property
    def op_sharding(self) -> OpSharding:
        """XLA's description of this sharding."""
        kind = self.type
        if kind is ShardingType.REPLICATED:
            return OpSharding(kind, (), (), False)
        is_partial = kind is ShardingType.PARTIAL
        dimensions = self.tile_assignment.shape if is_partial else self.tiles
        return OpSharding(
            kind, tuple(dimensions), tuple(self.tile_assignment.reshape(-1).tolist()), is_partial
        )

    @cached_property
    def text(self) -> str:
        """XLA's text (GSPMD, V1) of this sharding.

        Such as `{replicated}` or `{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}`.
        """
        op = self.op_sharding
        if op.type is ShardingType.REPLICATED:
            return xla_text.REPLICATED
        return xla_text.tiled(
            op.tile_assignment_dimensions,
            op.tile_assignment_devices,
            is_partial=op.replicate_on_last_tile_dim,
        )

    def padded_shape(self, shape: Shape) -> Shape:
        """`shape` with each size rounded up to a multiple of its dim's number of blocks."""
        self._check_shape(shape)
        return tuple(-(-size // tile) * tile for size, tile in zip(shape, self.tiles, strict=True))

    def shard_shape(self, shape: Shape) -> Shape:
        """Shape of each device's block of a tensor of logical shape `shape`, padding included."""
        self._check_shape(shape)
        return tuple(-(-size // tile) for size, tile in zip(shape, self.tiles, strict=True))

    def indices(self, shape: Shape) -> tuple[tuple[slice, ...], ...]:
        """For each mesh position, the slices of the logical tensor that its device holds.

        Positions are in the order of `mesh.device_ids`. Slices stop at `shape`, so a block that is
        all padding has `start == stop` in some dim. Every slice has explicit bounds and step None.

        Example:
            >>> Sharding.of(Mesh(range(4), (4,)), (0,), 1).indices((5,))
            ((slice(0, 2, None),), (slice(2, 4, None),), (slice(4, 5, None),), (slice(5, 5, None),))
        """
        per_dim = []
        for size, block, coordinates in zip(
            shape, self.shard_shape(shape), self._block_coordinates, strict=True
        ):
            per_dim.append(
                [
                    slice(min(index * block, size), min((index + 1) * block, size))
                    for index in coordinates.tolist()
                ]
            )
        return tuple(zip(*per_dim, strict=True)) if per_dim else ((),) * self.mesh.size()

    def replica_ids(self) -> tuple[int, ...]:
        """For each mesh position, the rank of its device among the holders of its block.

        Ranks follow the device ids: 0 for the lowest.
        """
        return self._replica_ids

    def __repr__(self) -> str:
        if not self.has_hints:
            return f"Sharding.of({self.mesh!r}, {self.partition_spec!r}, {self.ndim})"
        return (
            f"Sharding.marked({self.mesh!r}, {self.marked_spec!r}, {self.ndim}, "
            f"priority={self.priority})"
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # `dims` is itself a valid spec. `of` keeps one object per sharding, and the hash, which
        # differs between processes, stays out of the pickle.
        if not self.has_hints:
            return Sharding.of, (self.mesh, self.dims, self.ndim)
        return Sharding._of_parts, (self.mesh, self.dims, self.open_dims, self.priority)

    @cached_property
    def _block_coordinates(self) -> tuple[np.ndarray, ...]:
        """For each tensor dim, the index along it of the block at each mesh position.

        Int64 arrays of shape `(mesh.size(),)`.
        """
        mesh_shape = self.mesh.mesh_shape
        positions = np.unravel_index(np.arange(self.mesh.size()), mesh_shape)
        per_dim = []
        for axes in self.dims:
            index = np.zeros(self.mesh.size(), dtype=np.int64)
            for axis in axes:
                index = index * mesh_shape[axis] + positions[axis]
            per_dim.append(index)
        return tuple(per_dim)

    @cached_property
    def _replica_ids(self) -> tuple[int, ...]:
        ranks = list(range(self.tile_assignment.shape[-1])) * self.num_shards
        rank_by_id = dict(zip(self.tile_assignment.reshape(-1).tolist(), ranks, strict=True))
        return tuple(rank_by_id[device_id] for device_id in self.mesh.ids)

    def _check_shape(self, shape: Shape) -> None:
        if len(shape) != self.ndim:
            raise PartitionSpecError(
                "a sharding serves tensors of one rank; "
                f"got the shape {tuple(shape)} of rank {len(shape)} for {self!r} of rank "
                f"{self.ndim}. "
                f"Build a sharding for it: Sharding.of(mesh, partition_spec, {len(shape)})."
            )
        for size in shape:
            if type(size) is not int or size < 0:
                require_int("a size of shape", size, least=0)


@dataclass(frozen=True)
class Border:
    """An operation that takes a tensor into a manual region or out of it.

    Attributes:
        manual: the region's axes.
        sharding: the sharding of the whole tensor, over manual axes alone.
        is_exit: whether the tensor leaves the region.
    """

    manual: Manual
    sharding: Sharding
    is_exit: bool


# Weak: a sharding lives as long as some tensor or program refers to it, so a process that builds
# many meshes does not keep them all.
# Guarded by: `_interned_lock`. Cleared by: never, a cache.
_interned: "weakref.WeakValueDictionary[tuple[object, ...], Sharding]" = (
    weakref.WeakValueDictionary()
)
# Reentrant: the garbage collector may run a finalizer that builds a sharding while this thread
# holds the lock.
_interned_lock = threading.RLock()


def from_text(text: str, ndim: int) -> Sharding:
    """The sharding, over an unnamed mesh, that XLA's text describes for tensors of rank `ndim`.

    Raises:
        PartitionSpecError: the text is no sharding into blocks, or is for another rank.

    Example:
        >>> from_text("{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}", 2).indices((4, 4))[0]
        (slice(0, 2, None), slice(0, 4, None))
    """
    if text.strip() == xla_text.REPLICATED:
        return Sharding.of(Mesh([0], (1,)), (), ndim)
    blocks, is_manual = xla_text.blocks(text, num_devices=1)
    if is_manual or blocks.ndim != ndim:
        raise PartitionSpecError(
            "a sharding's text is '{replicated}' or '{devices=[tiles]ids}' with a tile for each of "
            f"{ndim} dims and every id; got {text!r}. Pass what tensor.sharding_spec gives."
        )
    ids = [device_id for holders in blocks.reshape(-1) for device_id in holders]
    num_holders = len(ids) // blocks.size
    mesh_shape = (*blocks.shape, num_holders) if num_holders > 1 else blocks.shape
    return Sharding.of(Mesh(ids, mesh_shape), tuple(range(ndim)), ndim)


def op_sharding(mesh: Mesh, partition_spec: PartitionSpecLike) -> OpSharding:
    """XLA's description of `partition_spec` for a tensor of the spec's length.

    This is the method `Mesh.get_op_sharding`.

    Raises:
        PartitionSpecError: the spec does not fit the mesh.

    Example:
        >>> Mesh(range(4), (2, 2), ("a", "b")).get_op_sharding(("b",)).tile_assignment_devices
        (0, 2, 1, 3)
    """
    return Sharding.of(mesh, partition_spec, len(validate_spec(mesh, partition_spec))).op_sharding


Mesh.get_op_sharding = op_sharding
