"""Lowers the sums over the batch that `batch_sums` found: each device's part, then a reduction."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd_core import dtypes
from spmd_core.graph.values import Spec
from spmd_core.ops import registry
from spmd_core.program.gradient_plans import MARK_SUM, Gradient, Plans, Reduction, Sum, Total
from spmd_core.program.program_graph import Graph
from spmd_core.runtime.jax_sharding import jax_axis_names, jax_mesh


class PartialSums:
    """The sums of one program, while it is lowered.

    A sum that is joined with others is kept as a stack: an array with an additional first dim for
    the parts of the batch, which the batch's axes split. So each device holds its own part.

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
        self._parts: dict[tuple[int, int], jax.Array] = {}  # by mark and number
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
            self._parts[mark, part.number] = array
            made.append(array)
        return made

    def gradient(self, mark: int) -> jax.Array | None:
        """The reduced gradient at a mark; None if it is not reduced there."""
        gradient = self._plans.gradients.get(mark)
        if gradient is None:
            return None
        if mark not in self._stacked:
            return self._total(gradient.found, mark)
        self._add_stacks(mark, gradient)
        if mark in self._joined:
            return None
        total = _reduced(
            self._stacks.pop((mark,)), gradient.reduction, self._graph.nodes[mark].entry.spec
        )
        rest = self._rest.pop((mark,), None)
        return total if rest is None else total + rest

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
                stacks.append(self._parts[mark, found.number])
            else:
                others.append(self._read(found))

        collect(gradient.found)
        self._stacks[mark,] = functools.reduce(jnp.add, stacks)
        if others:
            self._rest[mark,] = functools.reduce(jnp.add, others)

    def _total(self, found: Sum | Total | int, mark: int) -> jax.Array:
        """A gradient that is not joined, from its reduced parts."""
        if isinstance(found, Sum):
            return self._parts[mark, found.number]
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
        indices = [] if lookup is None else [self._read(lookup.inputs[1])]

        def local(blocks: list[jax.Array], values: list[jax.Array], rows: list[jax.Array]) -> Any:
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
                total = lookup.entry.kernel(context, [read, *rows], [])[0]
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
        return _cut(total, reduction, part.spec) if reduces else total


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


def _reduce(total: jax.Array, reduction: Reduction, spec: Spec) -> jax.Array:
    """Inside the region: the sum of all devices' parts, or this device's shard of it."""
    names = jax_axis_names(reduction.mesh)
    if reduction.axis is not None and reduction.dim is not None:
        # Only a dim that no other axis splits may be uneven.
        padding = [(0, 0)] * total.ndim
        padding[reduction.dim] = (0, -spec.shape[reduction.dim] % reduction.size((reduction.axis,)))
        total = lax.psum_scatter(
            jnp.pad(total, padding),
            names[reduction.axis],
            scatter_dimension=reduction.dim,
            tiled=True,
        )
    rest = [axis for axis in reduction.batch_axes if axis != reduction.axis]
    over = tuple(names[axis] for axis in rest if reduction.size((axis,)) > 1)
    return lax.psum(total, over) if over else total


def _cut(total: jax.Array, reduction: Reduction, spec: Spec) -> jax.Array:
    """The reduced sum without the padding of its scattered dim."""
    if reduction.dim is None:
        return total
    return lax.slice_in_dim(total, 0, spec.shape[reduction.dim], axis=reduction.dim)


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
    return _cut(mapped(stack), reduction, spec)
