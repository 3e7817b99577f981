"""Arrays that are padded along dims of varying size, some of which are merged from several dims.

If an `(8, n)` array that is padded to `(8, 64)` is flattened, it has padding between its elements.
Here the array keeps both dims, as the *factors* of the one dim of size 8 * n, so that no element
moves, and a mesh axis that splits the 8 still splits it. `compacted` moves the elements of such a
dim to the front, for operations that depend on positions along it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.program.affine_sizes import Affine, GrowthRefusedError, Size, Sizes, quotient, times
from spmd_core.program.program_graph import ReplicateDims

# Products of sizes that are equal at this number are equal at every number.
_LARGE = (1 << 40) + 15


@dataclass(frozen=True)
class Capacity:
    """The greatest value of the number for which arrays are padded, and the actual value.

    Attributes:
        bound: the greatest value.
        number: the actual value, a traced 0-dim int64 array.
        replicate_dims: replicates some dims of an array. The partitioner errs on slices of split
            dims whose starts are not constant.
    """

    bound: int
    number: jax.Array
    replicate_dims: ReplicateDims = field(default=lambda x, dims: x)

    def at_bound(self, size: Size) -> int:
        return size if isinstance(size, int) else int(size.at(self.bound))

    def shape(self, sizes: Iterable[Size]) -> tuple[int, ...]:
        """The shape with padding."""
        return tuple(self.at_bound(size) for size in sizes)

    def value(self, size: Size, dtype: Any = np.int64) -> Any:
        """The size at the actual number, as a value of the program."""
        if isinstance(size, int):
            return np.asarray(size, dtype)
        return size.at(self.number).astype(dtype)

    def is_element(self, shape: tuple[int, ...], sizes: Sizes, dims: Iterable[int]) -> jax.Array:
        """For each position of a shape, whether it is an element and not padding of these dims."""
        inside: Any = True
        for dim in sorted(dims):
            position = lax.broadcasted_iota(np.int64, shape, dim)
            inside = inside & (position < self.value(sizes[dim]))
        return jnp.broadcast_to(inside, shape)


@dataclass(frozen=True)
class Padded:
    """An array with padding after the elements of each factor of varying size.

    Attributes:
        array: its dims are the factors of all dims in order, each padded to its capacity.
        sizes: the sizes of the dims, without padding.
        factors: for each dim, the sizes of the array's dims from which it is merged, the major one
            first; a dim that is not merged is its own factor.
        uniform: dims along which all elements are known to be equal.
    """

    array: Any
    sizes: Sizes
    factors: tuple[Sizes, ...]
    uniform: frozenset[int] = field(default=frozenset())

    @staticmethod
    def plain(array: Any, sizes: Sizes) -> "Padded":
        """An array without merged dims."""
        return Padded(array, sizes, tuple((size,) for size in sizes))

    @property
    def is_plain(self) -> bool:
        """Whether no dim is merged from others."""
        return all(len(own) == 1 for own in self.factors)

    @property
    def growing(self) -> set[int]:
        """The dims of varying size."""
        return {dim for dim, size in enumerate(self.sizes) if isinstance(size, Affine)}

    @property
    def flat(self) -> "Padded":
        """The same array, with each factor as a dim."""
        return Padded.plain(self.array, tuple(size for own in self.factors for size in own))

    def dims_of(self, dim: int) -> range:
        """The array's dims that are the factors of this dim."""
        start = sum(len(own) for own in self.factors[:dim])
        return range(start, start + len(self.factors[dim]))

    def all_dims_of(self, dims: Iterable[int]) -> list[int]:
        return [own for dim in dims for own in self.dims_of(dim)]


def filled(capacity: Capacity, x: Padded, dims: set[int], value: Any) -> jax.Array:
    """The array of a plain `x`, with `value` as the padding of those of the dims that vary."""
    assert x.is_plain
    dims = dims & x.growing
    if not dims:
        return x.array
    inside = capacity.is_element(x.array.shape, x.sizes, dims)
    return jnp.where(inside, x.array, jnp.asarray(value, x.array.dtype))


def compacted(capacity: Capacity, x: Padded, dims: Iterable[int] | None = None) -> Padded:
    """`x` with single factors for these dims (default: all): padding comes last. Moves elements.

    Raises:
        GrowthRefusedError: the product of the factors is not an affine function of the number.
    """
    chosen = range(len(x.sizes)) if dims is None else {*dims}
    return with_factors(
        capacity, x, tuple((s,) if d in chosen else x.factors[d] for d, s in enumerate(x.sizes))
    )


def with_factors(capacity: Capacity, x: Padded, factors: tuple[Sizes, ...]) -> Padded:
    """`x` with other factors for its dims."""
    array = x.array
    start = 0
    for dim, (before, after) in enumerate(zip(x.factors, factors, strict=True)):
        if before != after and dim in x.uniform:
            array = _uniform(capacity, array, start, len(before), after)
        elif before != after:
            array = _relaid(capacity, array, start, before, after)
        start += len(after)
    return replace(x, array=array, factors=factors)


def common_factors(operands: Sequence[Padded]) -> tuple[Sizes, ...]:
    """Common factors of each dim for operands of equal shape.

    They are those of an operand whose dim is merged, if there is one: to change its factors would
    move its elements.
    """
    found = []
    for dim in range(len(operands[0].sizes)):
        fixed = [x.factors[dim] for x in operands if dim not in x.uniform]
        merged = [own for own in fixed if len(own) > 1]
        found.append([*merged, *fixed, operands[0].factors[dim]][0])
    return tuple(found)


def _uniform(capacity: Capacity, array: Any, start: int, num: int, after: Sizes) -> jax.Array:
    """Other factors for some dims along which all elements are equal."""
    first = lax.slice_in_dim(array, 0, 1, axis=start)
    for dim in range(start + 1, start + num):
        first = lax.slice_in_dim(first, 0, 1, axis=dim)
    head, tail = array.shape[:start], array.shape[start + num :]
    first = first.reshape((*head, *(1 for _ in after), *tail))
    return jnp.broadcast_to(first, (*head, *capacity.shape(after), *tail))


def _relaid(capacity: Capacity, array: Any, start: int, before: Sizes, after: Sizes) -> jax.Array:
    """Moves the elements of some adjacent dims to their places under other factors."""
    shape = capacity.shape(after)
    rest: Any = np.int64(0)  # position among all elements, without padding
    step: Any = np.int64(1)
    for dim in reversed(range(len(after))):
        rest = rest + lax.broadcasted_iota(np.int64, shape, dim) * step
        step = step * capacity.value(after[dim])
    position: Any = np.int64(0)  # in the array, with padding
    room = 1
    for k in reversed(range(len(before))):
        size = capacity.value(before[k])
        position = position + (rest % size if k else rest) * room
        rest = rest // size
        room *= capacity.at_bound(before[k])
    head, tail = array.shape[:start], array.shape[start + len(before) :]
    array = capacity.replicate_dims(array, range(start, start + len(before)))
    flat = array.reshape((*head, room, *tail))
    taken = jnp.take(flat, position.reshape(-1), axis=start, mode="clip")
    return taken.reshape((*head, *shape, *tail))


def reshaped(capacity: Capacity, x: Padded, sizes: Sizes) -> Padded:
    """`x` in another shape. No element moves if the reshape only merges or splits complete dims.

    Raises:
        GrowthRefusedError: there are no elements.
    """
    if 0 in x.sizes or 0 in sizes:
        raise GrowthRefusedError("a reshape of no elements")
    array, flat = x.array, x.flat.sizes
    is_uniform = [dim in x.uniform for dim, own in enumerate(x.factors) for _ in own]
    factors: list[Sizes] = []
    uniform: set[int] = set()
    done = 0  # the number of dims of the array that have their final shape
    for before, after in _groups(flat, sizes):
        left = tuple(flat[k] for k in before)
        right = tuple(sizes[k] for k in after)
        array, own = _regrouped(capacity, array, done, left, right)
        if all(is_uniform[k] for k in before if flat[k] != 1):
            uniform.update(after)
        factors += own
        done += sum(len(o) for o in own)
    return Padded(array, sizes, tuple(factors), frozenset(uniform))


def _groups(before: Sizes, after: Sizes) -> Iterator[tuple[range, range]]:
    """Pairs of adjacent dims of a reshape's two shapes, in the smallest groups of equal size."""

    def at_large(size: Size) -> int:
        return size if isinstance(size, int) else int(size.at(_LARGE))

    i = j = 0
    while i < len(before) or j < len(after):
        k, m = i, j
        left = right = 1
        if i < len(before):
            left, i = at_large(before[i]), i + 1
        if j < len(after):
            right, j = at_large(after[j]), j + 1
        while left != right:
            if (left < right and i < len(before)) or j == len(after):
                if i == len(before):
                    raise GrowthRefusedError("a reshape mixes dims that grow")
                left, i = left * at_large(before[i]), i + 1
            else:
                right, j = right * at_large(after[j]), j + 1
        yield range(k, i), range(m, j)


def _regrouped(
    capacity: Capacity, array: Any, start: int, before: Sizes, after: Sizes
) -> tuple[jax.Array, list[Sizes]]:
    """Reshapes some adjacent dims; returns the array and the factors of the new dims."""
    original, head, tail = array, array.shape[:start], array.shape[start + len(before) :]

    def as_dims(sizes: Iterable[Size]) -> jax.Array:
        return array.reshape((*head, *capacity.shape(sizes), *tail))

    waiting = [*before]
    atoms: list[Size] = []
    factors: list[Sizes] = []
    for size in after:
        rest, own = size, []
        while rest != 1:
            first = waiting.pop(0)
            if (found := quotient(rest, first)) is not None:
                own.append(first)
                rest = found
            elif (left := quotient(first, rest)) is not None:
                if isinstance(first, Affine) and isinstance(rest, int):
                    # The varying factor would be the minor one of two dims, each with padding.
                    array = as_dims((*atoms, *own, first, *waiting))
                    place = start + len(atoms) + len(own)
                    array = _relaid(capacity, array, place, (first,), (rest, left))
                own.append(rest)
                waiting.insert(0, left)
                rest = 1
            else:
                moved = _relaid(capacity, original, start, before, after)
                return moved, [(size,) for size in after]
        factors.append(_joined(own))
        atoms += own
    return as_dims(size for own in factors for size in own), factors


def _joined(factors: Sequence[Size]) -> Sizes:
    """Adjacent factors, merged where a fixed one follows, so that padding still comes last."""
    found: list[Size] = []
    for size in factors:
        if found and isinstance(size, int):
            found.append(times(found.pop(), size))
        elif size != 1:
            found.append(size)
    return tuple(found) or (1,)
