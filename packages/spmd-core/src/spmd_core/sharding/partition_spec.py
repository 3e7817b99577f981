"""Partition specs, as users write them, and their check against a mesh."""

from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np

from spmd_core.arguments import require_bool
from spmd_core.errors import MeshError, PartitionSpecError
from spmd_core.sharding.mesh import Mesh

Axis: TypeAlias = int | str
"""A mesh axis, by index (negative counts from the last) or by name."""

Entry: TypeAlias = int | str | tuple[int | str, ...] | None
"""How one tensor dim is split: not (None), over a mesh axis, or over a tuple of axes, major first.
"""

PartitionSpecLike: TypeAlias = tuple[Entry, ...]
"""What is accepted as a partition spec: a tuple, or a `PartitionSpec`, with an entry per dim."""


class PartitionSpec(tuple[Entry, ...]):
    """How each dim of a tensor is split over a mesh, written as in jax: one argument for each dim.

    It equals the tuple of its arguments, and either is accepted wherever a partition spec is asked
    for. Only `shard_map` tells them apart: one `PartitionSpec` there stands for every argument, or
    every result.

    Args:
        entries: for each dim None (not split), a mesh axis by name or index, or a tuple of axes,
            the major one first.

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

    def __new__(cls, *entries: Entry) -> Self:
        for entry in entries:
            axes = entry if isinstance(entry, (tuple, list)) else (entry,)
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
            mesh lacks, or an axis is used twice.
        MeshError: `mesh` is not a Mesh.

    Example:
        >>> validate_spec(Mesh(range(8), (2, 2, 2), ("x", "y", "z")), (("z", 0), None, -2))
        ((2, 0), (), (1,))
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"a partition spec belongs to a Mesh; got {mesh!r} of type {type(mesh).__name__}. "
            "Pass Mesh(device_ids, mesh_shape, axis_names)."
        )
    if not isinstance(spec, (tuple, list)):
        raise PartitionSpecError(_wrong_spec_type(mesh, spec))
    dims = tuple(_entry_axes(mesh, entry, spec) for entry in spec)
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
    return dims


def _entry_axes(
    mesh: Mesh, entry: Axis | tuple[Axis, ...] | None, spec: PartitionSpecLike
) -> tuple[int, ...]:
    """The axis indices of one entry of `spec`; `spec` is for error messages."""
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
