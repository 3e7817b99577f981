"""Operations for partial sums: each device's part of a sum over the batch, and the reduction."""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.sharding import PartitionSpec

from spmd_core import dtypes
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops import registry
from spmd_core.ops.kernels import chunks
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.traits import Parts, Rows
from spmd_core.program.batch_reductions import BatchSum
from spmd_core.program.ir import InsertedEntry, Op, Ref, inserted
from spmd_core.program.reductions import (
    Columns,
    Reduction,
    mapped,
    reduced,
    reduced_block,
    reduced_spec,
    stack_spec,
    without_padding,
)
from spmd_core.runtime.jax_sharding import jax_axis_names

# The names of a partial sum, of an addition of partial or reduced sums, and of a reduction.
PARTIAL_SUM, ADDITION = "spmd::partial_sum", "spmd::add_partial_sums"
REDUCTION = "spmd::reduce_partial_sums"


@dataclass(frozen=True, eq=False)
class Lookup:
    """The gradient of a table from which all parts of the batch look up the same rows.

    Attributes:
        op: the operation that computes the gradient of the table.
        gradient: the spec of its first operand, in which it is linear.
    """

    op: Op
    gradient: Spec


@dataclass(frozen=True, eq=False)
class Sum:
    """A value that is a sum over the batch.

    Attributes:
        op: the operation that sums.
        result: the position of the sum among the operation's results.
        how: how the operands are split in the region.
        spec: the spec of the value, which may be a cast or reshape of that result.
        lookup: the gradient of a table that is computed from that result; None if there is none.
    """

    op: Op
    result: int
    how: BatchSum
    spec: Spec
    lookup: Lookup | None = None

    @property
    def key(self) -> tuple[Hashable, ...]:
        """All that the sum is computed by, apart from its operands."""
        how, lookup = self.how, self.lookup
        split = tuple(tuple(dims.items()) for dims in how.split)
        looked_up = None if lookup is None else (lookup.op.entry, lookup.gradient)
        return self.op.entry, self.result, split, how.once, how.sources, self.spec, looked_up

    @property
    def last_op(self) -> Op:
        """The operation whose result the partial sum replaces."""
        return self.op if self.lookup is None else self.lookup.op

    @property
    def value(self) -> Ref:
        """The result of the operation that sums."""
        return Ref(self.op, self.result)

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The operands of the partial sum: those of the operation, and the indices of a lookup."""
        return (*self.op.operands, *(() if self.lookup is None else (self.lookup.op.operands[1],)))


class PartialSumEntry(InsertedEntry):
    """A partial sum over the batch.

    Attributes:
        part: the sum.
    """

    __slots__ = ("part",)

    def __init__(self, part: Sum, *args: Any, **options: Any) -> None:
        super().__init__(PARTIAL_SUM, *args, **options)
        self.part = part


def partial_sum(part: Sum, reduction: Reduction, *, reduces: bool) -> PartialSumEntry:
    """The operation that computes a partial sum over the batch, in the dtype of the gradient.

    Its operands are the global values `part.operands`, with any shardings.

    Args:
        part: the sum.
        reduction: the axes.
        reduces: whether the result is reduced. Otherwise it is a stack: an array with an additional
            first dim for the parts of the batch, which the batch's axes split, so that each device
            holds its own partial sum.
    """
    spec = part.spec.logical if reduces else stack_of(part.spec, reduction)
    kernel = functools.partial(_lowered, part, reduction, reduces)
    kinds = part.op.entry.number_kinds if part.lookup is None else ()
    entry = PartialSumEntry(part, kernel, (spec,), number_kinds=kinds)
    entry.key = (PARTIAL_SUM, part.key, reduction, reduces)
    return entry


def stack_of(spec: Spec, reduction: Reduction) -> Spec:
    """The spec of a stack of partial sums; a dim that is split unevenly is padded."""
    others = dict(reduction.others)
    sizes = (reduction.size(others.get(dim, ())) for dim in range(len(spec.shape)))
    shape = tuple(-(-n // size) * size for n, size in zip(spec.shape, sizes))
    return Spec.contiguous((reduction.num_parts, *shape), spec.dtype)


def reduction_of(reduction: Reduction, spec: Spec) -> InsertedEntry:
    """The operation that adds up a stack of partial sums over the devices."""
    return inserted(REDUCTION, lambda inputs: reduced(inputs[0], reduction, spec), spec.logical)


def addition(values: Sequence[Ref], dtype: torch.dtype | None = None) -> InsertedEntry:
    """The operation that adds up values, some of which may be stacks, in their own dtypes."""
    found = functools.reduce(torch.promote_types, (value.spec.dtype for value in values))

    def added(inputs: Sequence[jax.Array]) -> jax.Array:
        total: jax.Array = functools.reduce(jnp.add, inputs)
        return total if dtype is None else total.astype(dtypes.to_jax(dtype))

    spec = Spec.contiguous(values[0].spec.shape, dtype or found)
    return inserted(ADDITION, added, spec)


def _lowered(
    part: Sum,
    reduction: Reduction,
    reduces: bool,
    context: registry.Context,
    inputs: Sequence[jax.Array],
    numbers: Sequence[registry.Number],
) -> list[jax.Array]:
    """Lowers a partial sum; see `partial_sum`."""
    entry, lookup = part.op.entry, part.lookup
    kinds = [number.kind for number in numbers]
    outs = _outs(entry.outs)
    operands, indices = inputs, []
    if lookup is not None:
        *operands, looked_up = inputs
        indices = [looked_up]
    rows = (
        _RowsOfTable.of(entry, reduction, operands[1].size, reduces=reduces)
        if lookup is None and entry.spec.shape == part.spec.shape and len(operands) > 1
        else None
    )
    columns = _columns(part, context.platform)

    def local(blocks: list[jax.Array], values: list[jax.Array], looked_up: Any) -> Any:
        if rows is not None:
            grad, own_indices = blocks
            total = rows.gradient(reduction, grad, own_indices, context.platform)
            total = total.astype(dtypes.to_jax(part.spec.dtype))
            if not reduces:
                return total[None]
            is_scattered = bool(rows.gathered)
            return reduced_block(
                total, reduction, part.spec, is_scattered=is_scattered, columns=columns
            )
        num_chunks = _num_chunks(part, reduction, context.platform) if reduces else 1
        if num_chunks > 1:
            return _in_chunks(entry.kernel, part, reduction, blocks, num_chunks, context.platform)
        for i in part.how.once:
            own = blocks[i]
            blocks[i] = jnp.where(_part(reduction) == 0, own, jnp.zeros_like(own))
        typed = [registry.Number(value, kind) for value, kind in zip(values, kinds)]
        inner = registry.Context(outs, context.platform)
        found = _rows_here(blocks, reduction) if entry.traits.rows is Rows.READ else None
        total = entry.kernel(inner, blocks, typed)[part.result]
        total = total if found is None else jnp.where(found[..., None], total, 0)
        if lookup is not None:
            read = total.reshape(lookup.gradient.shape)
            inner = registry.Context(_outs(lookup.op.entry.outs), context.platform)
            total = lookup.op.entry.kernel(inner, [read, *looked_up], [])[0]
        total = total.astype(dtypes.to_jax(part.spec.dtype))
        if not reduction.others:  # else blocks are smaller, and the sum is not reshaped
            total = total.reshape(part.spec.shape)
        if not reduces:
            return total[None]
        return reduced_block(total, reduction, part.spec, columns=columns)

    in_specs = [reduction.spec(split) for split in part.how.split]
    function = mapped(
        local,
        reduction,
        (in_specs, [PartitionSpec()] * len(numbers), [PartitionSpec()] * len(indices)),
        reduced_spec(reduction) if reduces else stack_spec(reduction),
    )
    total = function(list(operands), [number.value for number in numbers], indices)
    return [without_padding(total, part.spec) if reduces else total]


def _columns(part: Sum, platform: str) -> Columns:
    """How the columns of a partial sum are scattered."""
    if platform != "cpu":
        return Columns.AS_THEY_ARE
    traits, shape = part.op.entry.traits, part.spec.shape
    is_whole = part.lookup is None and part.value.spec.shape == shape
    is_product = is_whole and len(shape) == 2 and traits.is_product and traits.rows is None
    return Columns.TRANSPOSED if is_product and not traits.images else Columns.IN_BLOCKS


def _num_chunks(part: Sum, reduction: Reduction, platform: str) -> int:
    """The number of chunks, along its other dim, in which a scattered gradient is computed.

    Each device's partial sum is as large as the gradient before the scatter. Chunks bound this
    transient memory on TPUs.
    """
    shape, entry = part.spec.shape, part.op.entry
    may_be_cut = entry.traits.parts is Parts.CHUNKS and not entry.number_kinds and len(shape) == 2
    if platform != "tpu" or not may_be_cut or reduction.of_activation or reduction.dim is None:
        return 1
    if any(dim != reduction.dim for dim, _ in reduction.others):
        return 1
    by_others = math.prod(reduction.size(axes) for _, axes in reduction.others)
    return chunks.count(shape[1 - reduction.dim], part.spec.num_bytes // by_others)


def _in_chunks(
    kernel: Callable[..., Any],
    part: Sum,
    reduction: Reduction,
    blocks: list[jax.Array],
    num_chunks: int,
    platform: str,
) -> jax.Array:
    """Inside the region: a gradient, computed and scattered chunk by chunk."""
    assert reduction.dim is not None
    dim = 1 - reduction.dim
    sources = [(i, d % blocks[i].ndim) for i, d in part.how.sources[dim]]
    size = part.spec.shape[dim] // num_chunks
    shape = tuple(size if d == dim else n for d, n in enumerate(part.spec.shape))
    context = registry.Context((registry.Out(shape, part.spec.dtype),), platform)
    made: list[jax.Array] = []
    for piece in range(num_chunks):
        own = [*blocks]
        for i, d in sources:
            own[i] = lax.slice_in_dim(own[i], piece * size, (piece + 1) * size, axis=d)
        own = chunks.wait(own, made)
        total = kernel(context, own, [])[part.result].astype(dtypes.to_jax(part.spec.dtype))
        made.append(reduced_block(total, reduction, part.spec))
    return jnp.concatenate(made, axis=dim)


def _part(reduction: Reduction) -> jax.Array:
    """Inside the region: the number of this device's part of the batch."""
    names = jax_axis_names(reduction.mesh)
    return lax.axis_index(tuple(names[axis] for axis in reduction.batch_axes))


def _rows_here(operands: list[jax.Array], reduction: Reduction) -> jax.Array:
    """Inside the region: which indices point to rows that this device has.

    Changes the operands of the lookup in place, so that the indices count the device's own rows.
    """
    table, indices = operands
    own = indices - _part(reduction) * table.shape[0]
    found = (own >= 0) & (own < table.shape[0])
    operands[1] = jnp.where(found, own, 0)
    return found


@dataclass(frozen=True)
class _RowsOfTable:
    """The gradient of a table that is split by rows, computed for each device's own rows.

    A partial sum for the complete table takes as much memory as the table. If the devices along the
    axes of the reduction look up fewer rows than the table has, the gradients of these rows are
    gathered instead, and each device adds up those of its own rows.

    Attributes:
        num_rows: the number of rows of the table.
        padding_row: the row without a gradient; negative for none.
        axes: the axes that split the rows before the reduction scatters.
        gathered: the axes along which the looked-up rows are gathered; none for a reduction.
    """

    num_rows: int
    padding_row: int
    axes: tuple[int, ...]
    gathered: tuple[int, ...]

    @classmethod
    def of(
        cls, entry: Entry, reduction: Reduction, num_indices: int, *, reduces: bool
    ) -> "_RowsOfTable | None":
        """The form for an operation; None unless it computes the gradient of such a table."""
        if entry.traits.rows is not Rows.WRITTEN:
            return None
        num_rows = entry.spec.shape[0]
        axes = dict(reduction.others).get(0, ())
        gathered = reduction.scattered if reduces and reduction.dim == 0 else ()
        others = [axis for axis in reduction.batch_axes if axis not in gathered]
        if num_indices // reduction.size(others) >= num_rows:
            gathered = ()
        if not axes and not gathered:
            return None
        return cls(num_rows, (entry.arguments or {})["padding_idx"], axes, gathered)

    def gradient(
        self, reduction: Reduction, grad: jax.Array, indices: jax.Array, platform: str
    ) -> jax.Array:
        """Inside the region: the gradient of this device's rows, complete if rows are gathered.

        TPUs gather in chunks of columns, each of which waits for the last but one.
        """
        names, axes, num_chunks, gather = jax_axis_names(reduction.mesh), self.axes, 1, None
        if self.gathered:
            axes = (*axes, *self.gathered)
            along = tuple(names[axis] for axis in self.gathered)
            gather = functools.partial(lax.all_gather, axis_name=along, tiled=True)
            indices = gather(indices)
            num_bytes = indices.size * grad.shape[-1] * grad.dtype.itemsize
            num_chunks = chunks.count(grad.shape[-1], num_bytes) if platform == "tpu" else 1
        num_own = -(-self.num_rows // reduction.size(axes))
        own = indices - num_own * lax.axis_index(tuple(names[axis] for axis in axes))
        is_own = (own >= 0) & (own < num_own) & (indices != self.padding_row)
        # The row past the end does not exist: the scatter drops writes to it.
        rows = jnp.where(is_own, own, num_own)
        made: list[jax.Array] = []
        for piece in jnp.split(grad, num_chunks, axis=-1):
            (piece,) = chunks.wait([piece], made)
            values = (piece if gather is None else gather(piece)).astype(opmath(grad.dtype))
            total = jnp.zeros((num_own, values.shape[-1]), values.dtype)
            made.append(total.at[rows].add(values, mode="drop", wrap_negative_indices=False))
        return jnp.concatenate(made, axis=-1)


def _outs(specs: Sequence[Spec]) -> tuple[registry.Out, ...]:
    return tuple(registry.Out(spec.shape, spec.dtype) for spec in specs)
