"""Operations on stacks: one in place of as many alike operations as the stacks have rows.

A stack is an array whose first dim counts its rows, such as one parameter of all layers
(`graph.stacks`). The pass `stacked_operations` finds the operations and makes these entries.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.graph.stacks import stacked_sharding, stacked_spec, unstack_entry
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops import registry
from spmd_core.ops.kernels.stacks import UNSTACK
from spmd_core.ops.kernels.traits import Elements, Parts, Traits


class StackedEntry(Entry):
    """An operation on the rows of stacks, as one operation on the stacks.

    Its operands are those of the operation on a row, each a stack or one value that all rows read,
    and so are its numbers. `arguments` are those of the operation on a row.

    Attributes:
        number_shapes: the shape of each number: one for each row, or one for all.
    """

    __slots__ = ("number_shapes",)
    number_shapes: tuple[tuple[int, ...], ...]


def stacked(
    row: Entry, count: int, *, operands: tuple[bool, ...], numbers: tuple[bool, ...]
) -> Entry:
    """The operation on stacks that does to each row what an operation does.

    Args:
        row: the operation on one row.
        count: the number of rows.
        operands: for each operand, whether it is a stack.
        numbers: for each number, whether it comes as an array with one for each row.
    """
    outs = tuple(stacked_spec(spec, count) for spec in row.outs)
    if row.sharding is not None:
        return Entry(
            row.name,
            row.kernel,
            outs,
            sharding=stacked_sharding(row.sharding),
            along=row.along,
            summed_over=row.summed_over,
            traits=row.traits,
        )
    entry = StackedEntry(
        # Not the name of the operation on a row: passes that look for that one would take the dims
        # in its arguments for those of a stack.
        f"stacked.{row.name}",
        functools.partial(_on_stacks, row, operands, numbers),
        outs,
        structure=row.structure,
        as_list=row.as_list,
        number_kinds=row.number_kinds,
        arguments=row.arguments,
        traits=_traits(row.traits, operands),
    )
    entry.number_shapes = tuple((count,) if own else () for own in numbers)
    return entry


def _on_stacks(
    row: Entry,
    operands: tuple[bool, ...],
    numbers: tuple[bool, ...],
    context: registry.Context,
    inputs: Sequence[jax.Array],
    given: Sequence[registry.Number],
) -> list[jax.Array]:
    outs = tuple(registry.Out(spec.shape, spec.dtype) for spec in row.outs)

    def on_row(arrays: list[jax.Array], values: list[jax.Array]) -> list[jax.Array]:
        typed = [registry.Number(x, kind) for x, kind in zip(values, row.number_kinds)]
        return list(row.kernel(replace(context, outs=outs), arrays, typed))

    axes = [[0 if own else None for own in given] for given in (operands, numbers)]
    values = [number.value for number in given]
    # The number of rows is that of the operands: a partial sum calls this for blocks.
    results: list[jax.Array] = jax.vmap(on_row, in_axes=axes)([*inputs], values)
    return results


def _traits(row: Traits, operands: tuple[bool, ...]) -> Traits:
    """The traits of the operation on stacks, from those of the one on a row."""
    elements = row.elements
    if elements < Elements.NEW and not operands[row.source]:
        elements = max(elements, Elements.REPEATED)
    # A gradient has the dims of its operand, but for the rows.
    num_gradients = next((n for n, i in enumerate(row.gradients) if not operands[i]), None)
    return replace(
        row,
        elements=elements,
        parts=min(row.parts, Parts.DIMS),  # the chunks are those of a matrix
        gradients=row.gradients[:num_gradients],
        bounds=None,  # of the operation on a row, from its arguments
    )


def rows(spec: Spec, count: int, chosen: Sequence[int]) -> Entry:
    """The operation whose results are some rows of a stack.

    Args:
        spec: of a row.
        count: the number of rows of the stack.
        chosen: the rows, in ascending order.
    """
    if len(chosen) == count:
        return unstack_entry(spec, count)

    def kernel(context: Any, inputs: list[jax.Array], numbers: Any) -> list[jax.Array]:
        return [jax.lax.index_in_dim(inputs[0], i, 0, keepdims=False) for i in chosen]

    return Entry(UNSTACK, kernel, (spec.logical,) * len(chosen))


def vector(spec: Spec, order: Sequence[int]) -> Entry:
    """The operation that takes a vector's elements from several vectors and scalars.

    Args:
        spec: of the result.
        order: the position of each of its elements among those of all operands.
    """
    positions = np.asarray(order)

    def kernel(context: Any, inputs: list[jax.Array], numbers: Any) -> list[jax.Array]:
        return [jnp.concatenate([x.reshape(-1) for x in inputs])[positions]]

    return Entry("stacked.aten::stack", kernel, (spec.logical,))
