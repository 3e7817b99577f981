"""Finds the indices in a graph that must be checked: all but those known to lie in their dim.

Known are positions that an operation computes (`argmax`, `topk`, `sort`, `arange`, `randint`), and
indices that an earlier operation of the same graph has checked: a backward writes where its forward
has read, and a recomputation reads the same places again. Operations that only move or select
elements are looked through.
"""

from collections.abc import Mapping

import torch

from spmd_core.graph.values import Entry, Indices
from spmd_core.ops.barrier import BARRIER
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.index_flag import Check
from spmd_core.program.ir import Graph, Op, Ref

# Casts between these dtypes keep every index into a dim that fits a device.
_WIDE = (torch.int32, torch.int64)


def needed(graph: Graph) -> list[tuple[Check, Op, Ref]]:
    """The checks that a program makes, in the order of its operations.

    Each comes with the operation, and with the value that has the indices.
    """
    if not any(op.entry.indices for op in graph.ops):
        return []
    known: dict[Ref, list[Indices]] = {}
    found = []
    for op in graph.ops:
        for accepted in op.entry.indices:
            value = _origin(op.operands[accepted.input])
            if not _is_known(value, accepted, known):
                found.append((Check(op.source.position, accepted), op, value))
                known.setdefault(value, []).append(accepted)
    return found


def bounds_of(value: Ref) -> tuple[int, int] | None:
    """The lowest and the highest integer that a value can have; None if that is not known."""
    while isinstance(op := value.producer, Op):
        bounds = _bounds(op.entry, value.result)
        if bounds is not None:
            return bounds
        source = _source(op, value.result, Elements.CHOSEN)
        if source is None:
            return None
        value = source
    return None


def _origin(value: Ref) -> Ref:
    """The value from which an index was rearranged, up to a mark, whose layout is known."""
    while isinstance(op := value.producer, Op):
        if op.entry.sharding is not None:
            break
        source = _source(op, value.result, Elements.REPEATED)
        if source is None or source.spec.dtype != value.spec.dtype:
            break
        value = source
    return value


def _is_known(value: Ref, accepted: Indices, known: Mapping[Ref, list[Indices]]) -> bool:
    """Whether each element of a value is known to be accepted, or was checked before."""
    while True:
        if any(_implies(other, accepted) for other in known.get(value, ())):
            return True
        if not isinstance(op := value.producer, Op):
            return False
        bounds = _bounds(op.entry, value.result)
        if bounds is not None:
            return accepted.low <= bounds[0] and bounds[1] <= accepted.high
        source = _source(op, value.result, Elements.CHOSEN)
        if source is None:
            return False
        value = source


def _source(op: Op, result: int, elements: Elements) -> Ref | None:
    """The value whose elements a result has; None if none is known."""
    if op.entry.name == BARRIER:
        return op.operands[result]
    source = op.source_of_elements(elements)
    if source is None or source.spec.dtype == op.entry.outs[result].dtype:
        return source
    is_wide = {source.spec.dtype, op.entry.outs[result].dtype} <= {*_WIDE}
    return source if is_wide else None


def _implies(known: Indices, wanted: Indices) -> bool:
    """Whether all indices that one rule accepts are accepted by the other."""
    return (
        wanted.low <= known.low
        and known.high <= wanted.high
        and (known.skip is None or known.skip == wanted.skip)
    )


def _bounds(entry: Entry, index: int) -> tuple[int, int] | None:
    """The lowest and the highest element that a result can have; None if that is not known."""
    spec, bounds = entry.outs[index], entry.traits.bounds
    if bounds is None or entry.arguments is None or spec.dtype not in _WIDE:
        return None
    return bounds(entry.arguments, index, spec.num_elements)
