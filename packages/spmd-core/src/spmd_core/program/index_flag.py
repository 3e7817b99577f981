"""Checks a program's indices on the devices; the token is the first check that failed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.graph.values import Indices

# The token of a program without a failed check.
NONE_FAILED = np.iinfo(np.int32).max
# For each dim, the names of the axes that split it, the major one first; none if the dim is
# replicated, or its sharding is not known.
Split = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Check:
    """One check of a program.

    Attributes:
        position: the operation's position among the recorded operations.
        accepted: the indices that the operation accepts.
        inside: the name of the operation that takes the indices, if the recorded one runs it in a
            body.
    """

    position: int
    accepted: Indices
    inside: str = ""


class Flag:
    """The token of one program: on each device, the number of its first check that failed.

    Attributes:
        checks: the program's checks.
        out_sharding: the sharding of the token.

    Args:
        checks: the program's checks.
        splits: how the indices of each check are split.
        mesh: the program's mesh.
    """

    def __init__(
        self, checks: Sequence[Check], splits: Sequence[Split], mesh: jax.sharding.Mesh
    ) -> None:
        self.checks = checks
        self._splits = splits
        used = {axis for split in splits for axes in split for axis in axes}
        self._mesh, self._axes = mesh, tuple(name for name in mesh.axis_names if name in used)
        # All processes must see the same token.
        self._agrees = _num_processes_of(mesh) > 1
        spec = PartitionSpec() if self._agrees else PartitionSpec(*self._axes)
        self.out_sharding = NamedSharding(mesh, spec)

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of the result of `look` for the check of this number."""
        own = {axis for axes in self._splits[number] for axis in axes}
        return tuple(self._mesh.shape[axis] if axis in own else 1 for axis in self._axes)

    def look(self, number: int, indices: jax.Array) -> jax.Array:
        """int32: the number of the check if it failed, else the largest int32."""
        check, split = self.checks[number], self._splits[number]
        outside = self._on_each_device(_outside(indices, check.accepted), split)
        return lax.select(
            outside,
            lax.full_like(outside, number, np.int32),
            lax.full_like(outside, NONE_FAILED, np.int32),
        )

    def first(self, found: Sequence[jax.Array]) -> jax.Array:
        """int32, one element for each position along the axes; the largest int32 if none failed.

        Args:
            found: the result of `look` for each check, or of `first` for several.
        """
        shape = tuple(self._mesh.shape[axis] for axis in self._axes)
        first = lax.full(shape, NONE_FAILED, np.int32)
        for each in found:
            first = lax.min(first, lax.broadcast_in_dim(each, shape, range(len(shape))))
        return first

    def token(self, found: Sequence[jax.Array]) -> jax.Array:
        """As `first`; one number where several processes have to see the same."""
        token = self.first(found)
        return lax.reduce_min(token, range(token.ndim)) if self._agrees else token

    def _on_each_device(self, outside: jax.Array, split: Split) -> jax.Array:
        """Whether any element is true, by position along the axes: rank `len(self._axes)`."""
        shape: list[int] = []
        kept: dict[str, int] = {}  # the dim of each axis in the shape
        padding = []
        for dim, n in enumerate(outside.shape):
            axes = split[dim] if dim < len(split) else ()
            sizes = [self._mesh.shape[axis] for axis in axes]
            kept |= {axis: len(shape) + i for i, axis in enumerate(axes)}
            each = -(-n // math.prod(sizes))
            padding.append((0, each * math.prod(sizes) - n, 0))
            shape += [*sizes, each]
        if any(high for _, high, _ in padding):
            outside = lax.pad(outside, np.False_, padding)
        parts = lax.reduce_or(
            lax.reshape(outside, shape),
            [dim for dim in range(len(shape)) if dim not in kept.values()],
        )
        order = sorted(kept, key=kept.__getitem__)
        own = [axis for axis in self._axes if axis in kept]
        parts = lax.transpose(parts, [order.index(axis) for axis in own])
        if own:
            parts = lax.with_sharding_constraint(
                parts, NamedSharding(self._mesh, PartitionSpec(*own))
            )
        return lax.expand_dims(parts, [i for i, axis in enumerate(self._axes) if axis not in kept])


def _num_processes_of(mesh: jax.sharding.Mesh) -> int:
    return len({device.process_index for device in mesh.devices.flat})


def _outside(indices: jax.Array, accepted: Indices) -> jax.Array:
    dtype = indices.dtype
    limits = np.iinfo(dtype)

    def bound(value: int) -> np.ndarray:
        return np.asarray(min(max(value, limits.min), limits.max), dtype)

    if accepted.high < accepted.low:
        outside = lax.full_like(indices, True, np.bool_)
    else:
        outside = lax.lt(indices, lax.full_like(indices, bound(accepted.low)))
        if accepted.high < limits.max:
            outside |= lax.gt(indices, lax.full_like(indices, bound(accepted.high)))
    if accepted.skip is not None and limits.min <= accepted.skip <= limits.max:
        outside &= lax.ne(indices, lax.full_like(indices, bound(accepted.skip)))
    return outside
