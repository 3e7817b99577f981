"""Finds operations that can be computed with a dim in another order, and the weights to reorder.

Such an operation treats all indices along the dim alike: it is a copy, a product or a sum.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from spmd_core.graph.values import Entry
from spmd_core.ops.kernels.traits import Elements, Parts
from spmd_core.program.dim_rules import DimRule, dims
from spmd_core.program.ir import Op, Ref
from spmd_core.program.mark_names import is_plain_addition
from spmd_core.program.partial_sums import PartialSumEntry
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding

# A mesh with the number of one of its axes.
MeshAxis: TypeAlias = tuple[Mesh, int]


class Moved(NamedTuple):
    """An operation that is computed with sections in device order (see `sections`).

    Attributes:
        operands: the positions of operands in device order, each with the dim of the sections.
        stays: the result in device order that is only read in this order; None if there is none.
        restored: the results in device order that are read in the original order.
    """

    operands: Mapping[int, int]
    stays: int | None = None
    restored: Mapping[int, int] = MappingProxyType({})


def is_product(entry: Entry) -> bool:
    """Whether an operation is a product that treats all indices along a dim alike."""
    return entry.traits.is_product and _treats_alike(entry)


def _treats_alike(entry: Entry) -> bool:
    """Whether a product or sum does not depend on positions, as attention and windows do."""
    traits = entry.traits
    is_one = traits.is_product or traits.parts is Parts.SUM
    return is_one and traits.query is None and not traits.images and traits.rows is None


def _operands(op: Op, dim: int) -> dict[int, int]:
    """The positions of the operands of a copy or an addition, each with the dim that becomes `dim`.

    Empty if there is none, and for other operations.
    """
    if op.manual is not None or op.is_inserted:
        return {}
    traits, shape = op.entry.traits, op.entry.spec.shape
    if is_plain_addition(op.entry):
        # Operands are broadcast from the right. A dim of one element has no sections.
        places = [(i, dim - len(shape) + len(x.spec.shape)) for i, x in enumerate(op.operands)]
        return {i: d for i, d in places if d >= 0 and op.operands[i].spec.shape[d] == shape[dim]}
    if traits.elements > Elements.PERMUTED:
        return {}
    if traits.elements is Elements.PERMUTED:
        return dict(dims(op.entry, [x.spec for x in op.operands]).sources(0, dim))
    own = op.operands[traits.source].spec.shape
    found = [d for d in range(len(own)) if _around(own, d) == _around(shape, dim)]
    return {traits.source: found[0]} if found else {}


def _around(shape: Sequence[int], dim: int) -> tuple[int, int, int]:
    """The numbers of elements before a dim, along it, and after it."""
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def result_dim(op: Op, dim: int) -> int | None:
    """The dim of a copy's result that corresponds to this dim of its operand."""
    expected = {op.entry.traits.source: dim}
    places = range(len(op.entry.spec.shape))
    return next((d for d in places if _operands(op, d) == expected), None)


def computed_by(op: Op, result: int, dim: int) -> Moved | None:
    """How an operation computes a result in device order.

    None if it does not treat all indices along this dim alike.
    """
    if op.manual is None and is_product(op.entry):
        rule = dims(op.entry, [x.spec for x in op.operands])
        return _moved(rule, rule.results[result][dim], stays=result)
    operands = _operands(op, dim)
    return Moved(operands, stays=0) if operands else None


def read_by(op: Op, value: Ref, dim: int) -> Moved | None:
    """How a copy, a product or a sum reads a value in device order; None as for `computed_by`."""
    entry, position = op.entry, op.operands.index(value)
    if op.manual is not None or op.operands.count(value) > 1:
        return None
    if op.source_of_elements(Elements.PERMUTED) is not None:
        is_read = position == entry.traits.source and result_dim(op, dim) is not None
        return Moved({position: dim}, stays=0) if is_read else None
    if isinstance(entry, PartialSumEntry):
        part = entry.part
        is_whole = part.lookup is None and part.spec.shape == part.value.spec.shape
        if not is_whole or not _treats_alike(part.op.entry):
            return None
        rule = dims(part.op.entry, [x.spec for x in op.operands])
        moved = _moved(rule, rule.operands[position][dim])
        if moved is None or part.result not in moved.restored:
            return moved and moved._replace(restored={})
        before = len(entry.spec.shape) - len(part.spec.shape)  # the dim of a stack
        return moved._replace(restored={0: moved.restored[part.result] + before})
    if not op.is_inserted and _treats_alike(entry):
        rule = dims(entry, [x.spec for x in op.operands])
        return _moved(rule, rule.operands[position][dim])
    return None


def _moved(rule: DimRule, factors: tuple[int, ...], *, stays: int | None = None) -> Moved | None:
    """An operation whose operands and results with these factors are in device order."""
    operands = dict(rule.dims_of(factors))
    restored: dict[int, int] = {}
    for result, own in enumerate(rule.results):
        for dim, found in enumerate(own):
            if found == factors:
                restored[result] = dim
            elif not {*found}.isdisjoint(factors):
                return None
    restored.pop(-1 if stays is None else stays, None)
    return Moved(operands, stays, restored) if operands else None


def step_before(value: Ref, dim: int) -> tuple[Ref, int] | None:
    """The source of a weight that is a copy, with the dim; None to reorder the weight itself.

    Elements are moved before a gather, and in the narrower dtype.
    """
    op = value.op
    source = None if op is None else op.source_of_elements(Elements.PERMUTED)
    if op is None or source is None or source.spec.dtype.itemsize > value.spec.dtype.itemsize:
        return None
    operands = _operands(op, dim)
    if not operands:
        return None
    own = operands[op.entry.traits.source]
    return None if axes_of_weight(source, own) != axes_of_weight(value, dim) else (source, own)


def source_of_weight(value: Ref, dim: int) -> tuple[Ref, int]:
    """The value whose elements are moved to reorder a weight, with its dim."""
    while (step := step_before(value, dim)) is not None:
        value, dim = step
    return value, dim


def axes_of_weight(value: Ref, dim: int) -> tuple[MeshAxis, ...] | None:
    """The axes that split a dim of a weight: an input of the program, a marked value, or a copy.

    None for other values.
    """
    found: tuple[MeshAxis, ...] = ()
    along: set[int] = set()  # the axes that later marks constrain
    while value.manual is None:
        op = value.op
        if isinstance(value.producer, Op):
            sharding = value.producer.entry.sharding
        else:
            sharding = value.producer.leaf.placement.sharding
        own = () if sharding is None else _of_dim(sharding, dim)
        found = (*(axis for axis in own if axis[1] not in along), *found)
        if op is None or (sharding is not None and op.entry.along is None):
            return found
        along.update(op.entry.along or ())
        source = op.source_of_elements(Elements.PERMUTED)
        operands = {} if source is None else _operands(op, dim)
        if source is None or not operands:
            break
        value, dim = source, operands[op.entry.traits.source]
    return None


def axes_of_mark(op: Op, dim: int) -> tuple[MeshAxis, ...]:
    """The axes by which a mark splits a dim; none for another operation."""
    sharding = op.entry.sharding
    return () if sharding is None else _of_dim(sharding, dim)


def _of_dim(sharding: Sharding, dim: int) -> tuple[MeshAxis, ...]:
    mesh = sharding.mesh
    return tuple((mesh, axis) for axis in sharding.dims[dim] if mesh.mesh_shape[axis] > 1)


def num_on_device(value: Ref) -> int:
    """The number of elements of a weight on a device."""
    found = [axes_of_weight(value, dim) or () for dim in range(len(value.spec.shape))]
    sizes = [mesh.mesh_shape[axis] for axes in found for mesh, axis in axes]
    return value.spec.num_elements // math.prod(sizes)
