"""Stacks: the data of layers' parameters as one device array, and the operations between both.

A loop over layers reads one parameter of all layers as one array, [number of layers, ...]. If each
layer's had a buffer of its own, every step would copy all of them into that array. So the data of
these parameters lies in the array: the value of each is a leaf whose data is a `Row`. Tensors,
storages and writes know nothing of it; a cut takes the whole array as one input, and returns
the new values of all rows as one result (`program.stacked_state`).
"""

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Entry, Spec, Value
from spmd_core.ops.kernels import stacks
from spmd_core.ops.kernels.stacks import ROW as ROW
from spmd_core.ops.kernels.stacks import STACK as STACK
from spmd_core.ops.kernels.stacks import UNSTACK as UNSTACK
from spmd_core.ops.kernels.stacks import WITH_ROW as WITH_ROW
from spmd_core.ops.kernels.traits import BLOCK
from spmd_core.sharding.sharding import Sharding


class StackEntry(Entry):
    """Stacks its operands, tensors of one spec, along a new first dim."""

    __slots__ = ()


class UnstackEntry(Entry):
    """Its results are the rows of its operand: `StackEntry` reversed."""

    __slots__ = ()


@functools.lru_cache(maxsize=4096)
def stack_entry(row: Spec, count: int) -> StackEntry:
    """The operation that stacks tensors of this spec; one object for equal arguments."""
    return StackEntry(
        STACK, lambda ctx, inputs, numbers: stacks.stacked(inputs), (stacked_spec(row, count),)
    )


@functools.lru_cache(maxsize=4096)
def unstack_entry(row: Spec, count: int) -> UnstackEntry:
    """The operation whose results are the rows, of this spec, of a stack."""
    return UnstackEntry(
        UNSTACK,
        lambda ctx, inputs, numbers: stacks.unstacked(inputs[0]),
        (row.logical,) * count,
        structure=tuple(range(count)),
    )


@functools.lru_cache(maxsize=4096)
def row_entry(row: Spec, count: int) -> Entry:
    """The operation that reads a row, of this spec, of a stack at an index that it computes."""
    return Entry(
        ROW, lambda ctx, inputs, numbers: [stacks.row(*inputs)], (row.logical,), traits=BLOCK
    )


@functools.lru_cache(maxsize=4096)
def with_row_entry(row: Spec, count: int) -> Entry:
    """The operation that gives a stack another row, of this spec, at an index that it computes."""
    return Entry(
        WITH_ROW,
        lambda ctx, inputs, numbers: [stacks.with_row(*inputs)],
        (stacked_spec(row, count),),
    )


def stacked_spec(row: Spec, count: int) -> Spec:
    """The spec of a stack of tensors of this spec."""
    return Spec.contiguous((count, *row.shape), row.dtype)


def stacked_sharding(row: Sharding) -> Sharding:
    """The sharding of a stack whose rows have this one: no device splits the first dim."""
    stack = Sharding.of(row.mesh, ((), *row.dims), row.ndim + 1)
    return stack.with_hints(tuple(dim + 1 for dim in row.open_dims), row.priority)


def row_sharding(stack: Sharding) -> Sharding | None:
    """The sharding of the rows of a stack that has this one."""
    if len(stack.dims) < 2:
        return None
    row = Sharding.of(stack.mesh, stack.dims[1:], len(stack.dims) - 1)
    open_dims = tuple(dim - 1 for dim in stack.open_dims if dim > 0)
    return row.with_hints(open_dims, stack.priority)


class Stack:
    """Values whose data are the rows of one array.

    Attributes:
        value: the array, as a leaf.
        row: the spec of each row.
        owners: for each row, the storage whose value that row was when the stack was made; None
            without one.
    """

    __slots__ = ("owners", "row", "value")

    def __init__(
        self, value: Value, row: Spec, owners: tuple[weakref.ref[Storage] | None, ...]
    ) -> None:
        self.value, self.row, self.owners = value, row, owners

    @property
    def is_held(self) -> bool:
        """Whether a row is still the value of its storage."""
        for storage in self.storages():
            row = None if storage is None else storage.value.data
            if row.__class__ is Row and row.stack is self:
                return True
        return False

    @property
    def is_whole(self) -> bool:
        """Whether each row is the computed value of its storage."""
        for i, storage in enumerate(self.storages()):
            value = None if storage is None else storage.committed
            if value is None or value.data.__class__ is not Row:
                return False
            if value.data.stack is not self or value.data.index != i:
                return False
        return True

    def storages(self) -> list[Storage | None]:
        """The owners; None for those that are gone."""
        return [None if owner is None else owner() for owner in self.owners]


class StackStorage(Storage):
    """What receives a result that is a stack: the new values of several storages.

    Attributes:
        rows: these storages.
    """

    __slots__ = ("rows",)
    rows: Sequence[Storage]

    @staticmethod
    def of(rows: Sequence[Storage], value: Value, sharding: Sharding | None) -> "StackStorage":
        """That of these storages, before the result is there.

        Args:
            rows: the storages.
            value: the pending stack of their values.
            sharding: that of the stack; None for none.
        """
        made: StackStorage = StackStorage.__new__(StackStorage)
        made.rows, made.value, made.spec = rows, value, value.spec
        made.version, made.committed, made.recorder, made.inference = 0, None, None, False
        made.sharding = sharding
        return made


def any_made() -> bool:
    """Whether this process has ever stacked tensors: if not, there are no stacks to look for."""
    return any(made.cache_info().currsize for made in (stack_entry, unstack_entry))


@dataclass(frozen=True, slots=True)
class Row:
    """The data of a leaf that is a row of a stack."""

    stack: Stack
    index: int
