"""Partition specs, as users write them, and their check against a mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final, Self, TypeAlias

import numpy as np

from spmd_core.arguments import require_bool
from spmd_core.errors import MeshError, PartitionSpecError
from spmd_core.sharding.mesh import Mesh

Axis: TypeAlias = int | str
"""A mesh axis, by index (negative counts from the last) or by name."""


class Open(Enum):
    """What ends an open dim's axes in a partition spec: the partitioner may split it further."""

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    OPEN = "open"

    def __repr__(self) -> str:
        return "PartitionSpec.OPEN"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return getattr, (PartitionSpec, "OPEN")


OPEN: Final = Open.OPEN

Entry: TypeAlias = int | str | Open | tuple[int | str | Open, ...] | None
"""How one tensor dim is split: not (None), over a mesh axis, or over a tuple of axes, major first.

`PartitionSpec.OPEN` alone, or behind the axes of a tuple, makes the dim open.
"""

PartitionSpecLike: TypeAlias = tuple[Entry, ...]
"""What is accepted as a partition spec: a tuple, or a `PartitionSpec`, with an entry per dim."""


class PartitionSpec(tuple[Entry, ...]):
    """How each dim of a tensor is split over a mesh, written as in jax: one argument for each dim.

    It equals the tuple of its arguments, and either is accepted wherever a partition spec is asked
    for. Only `shard_map` tells them apart: one `PartitionSpec` there stands for every argument, or
    every result.

    A dim is closed: it is split as its entry says, and no further. `PartitionSpec.OPEN` makes it
    open, which is Shardy's `{"fsdp", ?}`: `("fsdp", PartitionSpec.OPEN)` is split over fsdp at
    least, and `PartitionSpec.OPEN` alone is left to the partitioner, as jax's `UNCONSTRAINED`.
    `mark_sharding` and `constrain` accept open dims.

    Attributes:
        OPEN: what ends the axes of an open dim.

    Args:
        entries: for each dim None (not split), a mesh axis by name or index, or a tuple of axes,
            the major one first; or an open dim.

    Raises:
        PartitionSpecError: an argument is none of these.

    Example:
        >>> PartitionSpec("fsdp", None)
        PartitionSpec('fsdp', None)
        >>> PartitionSpec("fsdp", None) == ("fsdp", None)
        True
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies
    __slots__ = ()
    OPEN: ClassVar[Open] = OPEN

    def __new__(cls, *entries: Entry) -> Self:
        for entry in entries:
            axes, _ = _split_open(entry, entries)
            if entry is not None and not all(map(_is_axis, axes)):
                raise PartitionSpecError(
                    "an entry of a partition spec is None, a mesh axis by its name (str) or its "
                    f"index (int), or a tuple of these axes; got {entry!r}, of type "
                    f"{type(entry).__name__}. Write for instance PartitionSpec('fsdp', None)."
                )
        return super().__new__(cls, entries)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"PartitionSpec({', '.join(map(repr, self))})"


def _split_open(entry: Any, spec: Sequence[Any]) -> tuple[tuple[Any, ...], bool]:
    """The axes of an entry, as written, and whether the dim is open; `spec` is for the message.

    Raises:
        PartitionSpecError: the marker is not the last of the entry.
    """
    axes = tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
    is_open = bool(axes) and axes[-1] is OPEN
    axes = axes[:-1] if is_open else axes
    inside = [x for axis in axes for x in (axis if isinstance(axis, (tuple, list)) else (axis,))]
    if OPEN in inside:
        raise PartitionSpecError(
            "PartitionSpec.OPEN stands once in an open dim's entry, behind its axes; "
            f"got {entry!r} in {tuple(spec)!r}. Write for instance ('fsdp', PartitionSpec.OPEN)."
        )
    return axes, is_open


def _is_axis(axis: object) -> bool:
    return isinstance(axis, str) or (
        not isinstance(axis, (bool, np.bool_)) and hasattr(type(axis), "__index__")
    )


@dataclass(frozen=True)
class ShardingSpec:
    """A mesh with a partition spec, for instance for a data loader.

    Attributes:
        mesh: the mesh whose axes the spec names.
        partition_spec: one entry for each tensor dim; a list is accepted and stored as a tuple.
        minibatch: whether the tensors to be sharded hold this process's part of the batch instead
            of the whole batch.

    Raises:
        PartitionSpecError: the spec does not fit the mesh. The tensor's rank is checked when the
            spec is applied.

    Example:
        >>> spec = ShardingSpec(Mesh(range(8), (4, 2), ("data", "model")), ("data", None))
        >>> spec.can_apply(2), spec.can_apply(3)
        (True, False)
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    mesh: Mesh
    partition_spec: PartitionSpecLike
    minibatch: bool = False

    def __post_init__(self) -> None:
        validate_spec(self.mesh, self.partition_spec)
        require_bool("minibatch", self.minibatch)
        entries = (
            tuple(entry) if isinstance(entry, list) else entry for entry in self.partition_spec
        )
        object.__setattr__(self, "partition_spec", tuple(entries))

    def can_apply(self, tensor: Any) -> bool:
        """Whether the spec has one entry for each dim of `tensor`.

        Stricter than applying the spec, which replicates the dims that a short spec leaves out: a
        loader uses this to select the tensors of a batch that the spec is for.

        Args:
            tensor: an object with `ndim` or `dim()`, or the rank itself as an int.
        """
        return len(self.partition_spec) == _rank_of(tensor)


def validate_spec(mesh: Mesh, spec: PartitionSpecLike) -> tuple[tuple[int, ...], ...]:
    """Checks a partition spec against a mesh; returns the mesh axis indices of each entry.

    Raises:
        PartitionSpecError: the spec or an entry has a wrong type, an entry names an axis that the
            mesh lacks, or an axis is used twice; or a dim is open.
        MeshError: `mesh` is not a Mesh.

    Example:
        >>> validate_spec(Mesh(range(8), (2, 2, 2), ("x", "y", "z")), (("z", 0), None, -2))
        ((2, 0), (), (1,))
    """
    dims, open_dims = split_spec(mesh, spec)
    if open_dims:
        raise PartitionSpecError(
            "an open dim belongs to a mark of a tensor, by spmd.mark_sharding or spmd.constrain; "
            f"here each dim is split as its entry says; got {tuple(spec)!r}. "
            "Leave PartitionSpec.OPEN out."
        )
    return dims


def split_spec(
    mesh: Mesh, spec: PartitionSpecLike
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Checks a partition spec that may have open dims against a mesh.

    Returns:
        The mesh axis indices of each entry, and the open dims.

    Raises:
        PartitionSpecError, MeshError: as for `validate_spec`; or `OPEN` stands before an axis.

    Example:
        >>> mesh = Mesh(range(8), (4, 2), ("x", "y"))
        >>> split_spec(mesh, (("x", PartitionSpec.OPEN), None, PartitionSpec.OPEN))
        (((0,), (), ()), (0, 2))
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"a partition spec belongs to a Mesh; got {mesh!r} of type {type(mesh).__name__}. "
            "Pass Mesh(device_ids, mesh_shape, axis_names)."
        )
    if not isinstance(spec, (tuple, list)):
        raise PartitionSpecError(_wrong_spec_type(mesh, spec))
    dims, open_dims = [], []
    for dim, entry in enumerate(spec):
        axes, is_open = _split_open(entry, spec)
        dims.append(_entry_axes(mesh, axes if is_open else entry, spec))
        open_dims += [dim] if is_open else []
    used: set[int] = set()
    for axis in (axis for axes in dims for axis in axes):
        if axis in used:
            name = axis if mesh.axis_names is None else mesh.axis_names[axis]
            raise PartitionSpecError(
                "a mesh axis may shard a tensor once; "
                f"got axis {name!r} more than once in {tuple(spec)!r}. "
                "Keep it in one place, and write None for a dim that should not be sharded."
            )
        used.add(axis)
    return tuple(dims), tuple(open_dims)


def _entry_axes(mesh: Mesh, entry: Any, spec: PartitionSpecLike) -> tuple[int, ...]:
    """The axis indices of one entry of `spec`, without `OPEN`; `spec` is for error messages."""
    if entry is None:
        return ()
    if not isinstance(entry, (tuple, list)):
        return (mesh.axis_index(entry),)
    axes: tuple[Any, ...] = tuple(entry)
    for axis in axes:
        if axis is None or isinstance(axis, (tuple, list)):
            raise PartitionSpecError(
                "a tuple inside a partition spec must hold mesh axes only, by index or name; "
                f"got {axis!r} in {tuple(spec)!r}. "
                f"List the axes of one dim side by side, such as {tuple(mesh.shape())!r}."
            )
    return tuple(mesh.axis_index(axis) for axis in axes)


def _wrong_spec_type(mesh: Mesh, spec: object) -> str:
    is_axis = any(
        type(spec) is type(axis) and spec == axis
        for axis in (*mesh.shape(), *range(len(mesh.mesh_shape)))
    )
    example = repr((spec if is_axis else next(iter(mesh.shape())),))
    return (
        "a partition spec must be a tuple with one entry for each tensor dim; "
        f"got {spec!r} of type {type(spec).__name__}. "
        f"Write {example} to shard the first dim, or () to replicate."
    )


def _rank_of(tensor: Any) -> int:
    if isinstance(tensor, (int, np.integer)):
        return int(tensor)
    if hasattr(tensor, "ndim"):
        return int(tensor.ndim)
    if hasattr(tensor, "dim"):
        return int(tensor.dim())
    raise TypeError(
        "a rank is asked of a tensor, an array or an int; "
        f"got {tensor!r} of type {type(tensor).__name__}. Pass the tensor itself."
    )
