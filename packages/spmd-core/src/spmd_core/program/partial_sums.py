"""Lowers the sums over the batch that `batch_sums` found: each device's part, then a reduction."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd_core import dtypes
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops import registry
from spmd_core.ops.kernels import pieces
from spmd_core.ops.kernels.precision import opmath
from spmd_core.program.gradient_plans import MARK_SUM, Gradient, Plans, Reduction, Sum, Total
from spmd_core.program.program_graph import Graph
from spmd_core.runtime import torus
from spmd_core.runtime.jax_sharding import jax_axis_names, jax_mesh


class PartialSums:
    """The sums of one program, while it is lowered.

    A sum that is joined with others is kept as a stack: an array with an additional first dim for
    the parts of the batch, which the batch's axes split. So each device holds its own part.

    Attributes:
        parts: sums that their mark has not read yet, by the mark's position and the sum's number.

    Args:
        graph: the program's.
        plans: what to lower.
        platform: as in `registry.Context`.
        read: gives the value of a number.
    """

    def __init__(
        self, graph: Graph, plans: Plans, platform: str, read: Callable[[int], jax.Array]
    ) -> None:
        self._graph, self._plans, self._platform, self._read = graph, plans, platform, read
        self._joined = {mark for marks in plans.joined.values() for mark in marks}
        # An activation's gradient that adds up several sums is reduced once. A parameter's are
        # reduced one by one: its parts may be computed far from each other.
        adds_up = {
            mark
            for mark, gradient in plans.gradients.items()
            if graph.nodes[mark].entry.name == MARK_SUM and isinstance(gradient.found, Total)
        }
        self._stacked = self._joined | adds_up
        self.parts: dict[tuple[int, int], jax.Array] = {}
        self._stacks: dict[tuple[int, ...], jax.Array] = {}  # by the marks that it adds up
        self._rest: dict[tuple[int, ...], jax.Array] = {}  # values that are added as they are

    def lower(
        self, position: int, inputs: Sequence[jax.Array], numbers: Sequence[registry.Number]
    ) -> list[jax.Array]:
        """Lowers the sums that belong to an operation, with its operands; returns the arrays."""
        made = []
        for mark, part in self._plans.sums.get(position, ()):
            operands = inputs if part.lookup is None else self._operands(part.node)
            array = self._sum(
                part,
                self._plans.gradients[mark].reduction,
                operands,
                numbers if part.lookup is None else (),
                reduces=mark not in self._stacked,
            )
            self.parts[mark, part.number] = array
            made.append(array)
        return made

    def gradient(self, mark: int) -> jax.Array | None:
        """The reduced gradient at a mark; None if it is not reduced there."""
        gradient = self._plans.gradients.get(mark)
        if gradient is None:
            return None
        if mark not in self._stacked:
            total = self._total(gradient.found, mark)
            self._forget_parts(mark)
            return total
        self._add_stacks(mark, gradient)
        self._forget_parts(mark)
        if mark in self._joined:
            return None
        total = _reduced(
            self._stacks.pop((mark,)), gradient.reduction, self._graph.nodes[mark].entry.spec
        )
        rest = self._rest.pop((mark,), None)
        return total if rest is None else total + rest

    def _forget_parts(self, mark: int) -> None:
        for key in [key for key in self.parts if key[0] == mark]:
            del self.parts[key]

    def addition(self, position: int) -> tuple[jax.Array | None, list[jax.Array]]:
        """The reduced gradient where an addition ends a join, else None; and the new arrays."""
        marks = self._plans.joined.get(position)
        if marks is None:
            return None, []
        for sums in (self._stacks, self._rest):
            terms = [sums.pop(key) for key in [*sums] if set(key) <= set(marks)]
            if terms:
                sums[marks] = functools.reduce(jnp.add, terms)
        made = [x for x in (self._stacks.get(marks), self._rest.get(marks)) if x is not None]
        if position not in self._plans.ends:
            return None, made
        spec = self._graph.nodes[position].entry.spec
        total = _reduced(self._stacks[marks], self._plans.gradients[marks[0]].reduction, spec)
        rest = self._rest.get(marks)
        return (total if rest is None else total + rest), []

    def _add_stacks(self, mark: int, gradient: Gradient) -> None:
        """Adds up the stacks of one mark's gradient, and its other terms."""
        stacks, others = [], []

        def collect(found: Sum | Total | int) -> None:
            if isinstance(found, Total):
                for term in found.terms:
                    collect(term)
            elif isinstance(found, Sum):
                stacks.append(self.parts[mark, found.number])
            else:
                others.append(self._read(found))

        collect(gradient.found)
        self._stacks[mark,] = functools.reduce(jnp.add, stacks)
        if others:
            self._rest[mark,] = functools.reduce(jnp.add, others)

    def _total(self, found: Sum | Total | int, mark: int) -> jax.Array:
        """A gradient that is not joined, from its reduced parts."""
        if isinstance(found, Sum):
            return self.parts[mark, found.number]
        if not isinstance(found, Total):
            return self._read(found)
        dtype = dtypes.to_jax(self._graph.nodes[found.node].entry.spec.dtype)
        terms = (self._total(term, mark) for term in found.terms)
        return functools.reduce(jnp.add, terms).astype(dtype)

    def _operands(self, position: int) -> list[jax.Array]:
        return [self._read(number) for number in self._graph.nodes[position].inputs]

    def _sum(
        self,
        part: Sum,
        reduction: Reduction,
        inputs: Sequence[jax.Array],
        numbers: Sequence[registry.Number],
        *,
        reduces: bool,
    ) -> jax.Array:
        """A sum over the batch in the dtype of the gradient: reduced, or as a stack.

        Args:
            part: the sum.
            reduction: the axes.
            inputs: of the operation, whole, whatever their shardings.
            numbers: the operation's.
            reduces: whether the result is reduced.
        """
        entry = self._graph.nodes[part.node].entry
        kinds = [number.kind for number in numbers]
        outs = _outs(entry.outs)
        lookup = None if part.lookup is None else self._graph.nodes[part.lookup.node]
        rows = (
            _RowsOfTable.of(entry, reduction, inputs[1].size, reduces=reduces)
            if part.lookup is None and entry.spec.shape == part.spec.shape and len(inputs) > 1
            else None
        )
        indices = [] if lookup is None else [self._read(lookup.inputs[1])]

        def local(blocks: list[jax.Array], values: list[jax.Array], looked_up: Any) -> Any:
            if rows is not None:
                grad, own_indices = blocks
                total = rows.gradient(reduction, grad, own_indices, self._platform)
                total = total.astype(dtypes.to_jax(part.spec.dtype))
                if not reduces:
                    return total[None]
                return _reduce(total, reduction, part.spec, is_scattered=rows.gathered is not None)
            num_pieces = self._num_pieces(part, reduction) if reduces else 1
            if num_pieces > 1:
                return _in_pieces(entry.kernel, part, reduction, blocks, num_pieces, self._platform)
            if part.once is not None and part.once < len(blocks):
                own = blocks[part.once]
                blocks[part.once] = jnp.where(_part(reduction) == 0, own, jnp.zeros_like(own))
            typed = [registry.Number(value, kind) for value, kind in zip(values, kinds)]
            context = registry.Context(outs, self._platform)
            found = _rows_here(blocks, reduction) if entry.name == "aten::embedding" else None
            total = entry.kernel(context, blocks, typed)[part.result]
            total = total if found is None else jnp.where(found[..., None], total, 0)
            if part.lookup is not None and lookup is not None:
                read = total.reshape(part.lookup.gradient.shape)
                context = registry.Context(_outs(lookup.entry.outs), self._platform)
                total = lookup.entry.kernel(context, [read, *looked_up], [])[0]
            total = total.astype(dtypes.to_jax(part.spec.dtype))
            if not reduction.others:  # else a block's dims are smaller, and no view changed them
                total = total.reshape(part.spec.shape)
            return _reduce(total, reduction, part.spec) if reduces else total[None]

        in_specs = [reduction.spec(split) for split in part.split_dims]
        mapped = _mapped(
            local,
            reduction,
            (in_specs, [PartitionSpec()] * len(numbers), [PartitionSpec()] * len(indices)),
            _reduced_spec(reduction) if reduces else _stack_spec(reduction),
        )
        total = mapped(list(inputs), [number.value for number in numbers], indices)
        return _cut(total, part.spec) if reduces else total

    def _num_pieces(self, part: Sum, reduction: Reduction) -> int:
        """Into how many pieces of its other dim a gradient that is scattered along one is cut.

        A device's part is as large as the whole gradient. TPUs, where a step has to fit, get
        pieces.
        """
        shape, entry = part.spec.shape, self._graph.nodes[part.node].entry
        is_known = len(part.sources) == len(shape) == 2 and not entry.number_kinds
        if self._platform != "tpu" or not is_known or reduction.dim is None:
            return 1
        if any(dim != reduction.dim for dim, _ in reduction.others):
            return 1
        by_others = math.prod(reduction.size(axes) for _, axes in reduction.others)
        return pieces.count(shape[1 - reduction.dim], part.spec.num_bytes // by_others)


def _in_pieces(
    kernel: Callable[..., Any],
    part: Sum,
    reduction: Reduction,
    blocks: list[jax.Array],
    num_pieces: int,
    platform: str,
) -> jax.Array:
    """Inside the region: a gradient, computed and scattered piece by piece."""
    assert reduction.dim is not None
    dim = 1 - reduction.dim
    sources = [(i, d % blocks[i].ndim) for i, d in part.sources[dim]]
    size = part.spec.shape[dim] // num_pieces
    shape = tuple(size if d == dim else n for d, n in enumerate(part.spec.shape))
    context = registry.Context((registry.Out(shape, part.spec.dtype),), platform)
    made: list[jax.Array] = []
    for piece in range(num_pieces):
        own = [*blocks]
        for i, d in sources:
            own[i] = lax.slice_in_dim(own[i], piece * size, (piece + 1) * size, axis=d)
        own = pieces.wait(own, made)
        total = kernel(context, own, [])[part.result].astype(dtypes.to_jax(part.spec.dtype))
        made.append(_reduce(total, reduction, part.spec))
    return jnp.concatenate(made, axis=dim)


def _part(reduction: Reduction) -> jax.Array:
    """Inside the region: the number of this device's part of the batch."""
    names = jax_axis_names(reduction.mesh)
    return lax.axis_index(tuple(names[axis] for axis in reduction.batch_axes))


def _rows_here(operands: list[jax.Array], reduction: Reduction) -> jax.Array:
    """Inside the region: which indices are of rows that this device has.

    Changes the operands of a lookup, table and indices, to the indices of the device's own rows.
    """
    table, indices = operands
    own = indices - _part(reduction) * table.shape[0]
    found = (own >= 0) & (own < table.shape[0])
    operands[1] = jnp.where(found, own, 0)
    return found


@dataclass(frozen=True)
class _RowsOfTable:
    """The gradient of the rows of a table that a device has, where the table is split by rows.

    The partial sums of a whole table take as much memory as the table. If the devices along the
    axis of the reduction look up fewer rows than it has, these rows' gradients are gathered
    instead, and each device adds up those of its own rows.

    Attributes:
        num_rows: of the table.
        padding_row: the row without a gradient; negative for none.
        axes: those that split the rows before the reduction scatters.
        gathered: the axis along which the looked up rows are gathered; None for a reduction.
    """

    num_rows: int
    padding_row: int
    axes: tuple[int, ...]
    gathered: int | None

    @classmethod
    def of(
        cls, entry: Entry, reduction: Reduction, num_indices: int, *, reduces: bool
    ) -> "_RowsOfTable | None":
        """For the gradient of a table that is split by rows, else None."""
        if entry.name != "aten::embedding_dense_backward":
            return None
        num_rows = entry.spec.shape[0]
        axes = dict(reduction.others).get(0, ())
        gathered = reduction.axis if reduces and reduction.dim == 0 else None
        if gathered is not None:
            others = [axis for axis in reduction.batch_axes if axis != gathered]
            if num_indices // reduction.size(others) >= num_rows:
                gathered = None
        if not axes and gathered is None:
            return None
        return cls(num_rows, (entry.arguments or {})["padding_idx"], axes, gathered)

    def gradient(
        self, reduction: Reduction, grad: jax.Array, indices: jax.Array, platform: str
    ) -> jax.Array:
        """Inside the region: what this device adds up, which is all of it where it is gathered.

        TPUs gather in pieces of the rows, each behind the one before the last.
        """
        names, axes, num_pieces, gather = jax_axis_names(reduction.mesh), self.axes, 1, None
        if self.gathered is not None:
            axes = (*axes, self.gathered)
            gather = functools.partial(lax.all_gather, axis_name=names[self.gathered], tiled=True)
            indices = gather(indices)
            num_bytes = indices.size * grad.shape[-1] * grad.dtype.itemsize
            num_pieces = pieces.count(grad.shape[-1], num_bytes) if platform == "tpu" else 1
        num_own = -(-self.num_rows // reduction.size(axes))
        own = indices - num_own * lax.axis_index(tuple(names[axis] for axis in axes))
        is_own = (own >= 0) & (own < num_own) & (indices != self.padding_row)
        # The row past the end does not exist: the scatter drops writes to it.
        rows = jnp.where(is_own, own, num_own)
        made: list[jax.Array] = []
        for piece in jnp.split(grad, num_pieces, axis=-1):
            (piece,) = pieces.wait([piece], made)
            values = (piece if gather is None else gather(piece)).astype(opmath(grad.dtype))
            total = jnp.zeros((num_own, values.shape[-1]), values.dtype)
            made.append(total.at[rows].add(values, mode="drop", wrap_negative_indices=False))
        return jnp.concatenate(made, axis=-1)


def _outs(specs: Sequence[Spec]) -> tuple[registry.Out, ...]:
    return tuple(registry.Out(spec.shape, spec.dtype) for spec in specs)


def _mapped(
    function: Callable[..., Any], reduction: Reduction, in_specs: Any, out_specs: Any
) -> Callable[..., jax.Array]:
    """`function` of each device's blocks, in a manual region over the reduction's axes."""
    names = jax_axis_names(reduction.mesh)
    mapped: Callable[..., jax.Array] = jax.shard_map(
        function,
        mesh=jax_mesh(reduction.mesh),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={names[axis] for axis in reduction.axes},
        check_vma=False,
    )
    return mapped


def _reduce(
    total: jax.Array, reduction: Reduction, spec: Spec, *, is_scattered: bool = False
) -> jax.Array:
    """Inside the region: the sum of all devices' parts, or this device's shard of it.

    With `is_scattered`, `total` is such a shard already, summed along the axis that scatters.
    """
    names = jax_axis_names(reduction.mesh)
    if reduction.axis is not None and reduction.dim is not None and not is_scattered:
        # Only a dim that no other axis splits may be uneven.
        padding = [(0, 0)] * total.ndim
        padding[reduction.dim] = (0, -spec.shape[reduction.dim] % reduction.size((reduction.axis,)))
        total = torus.scatter(
            jnp.pad(total, padding), reduction.mesh, reduction.axis, reduction.dim
        )
    rest = [axis for axis in reduction.batch_axes if axis != reduction.axis]
    over = tuple(names[axis] for axis in rest if reduction.size((axis,)) > 1)
    return lax.psum(total, over) if over else total


def _cut(total: jax.Array, spec: Spec) -> jax.Array:
    """The reduced sum without the padding of its scattered dim, and of rows that devices cut."""
    return lax.slice(total, (0,) * total.ndim, spec.shape)


def _reduced_spec(reduction: Reduction) -> PartitionSpec:
    split = dict(reduction.others)
    if reduction.axis is not None and reduction.dim is not None:
        split[reduction.dim] = (*split.get(reduction.dim, ()), reduction.axis)
    return reduction.spec(split)


def _stack_spec(reduction: Reduction) -> PartitionSpec:
    others = {dim + 1: axes for dim, axes in reduction.others}
    return reduction.spec({0: reduction.batch_axes, **others})


def _reduced(stack: jax.Array, reduction: Reduction, spec: Spec) -> jax.Array:
    """The gradient that a stack adds up to."""
    mapped = _mapped(
        lambda block: _reduce(block[0], reduction, spec),
        reduction,
        _stack_spec(reduction),
        _reduced_spec(reduction),
    )
    return _cut(mapped(stack), spec)
