"""How an operation's result is a sum over the batch, so that each device can sum its own part."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_core.graph.values import Entry, Spec
from spmd_core.ops.kernels.traits import Parts, Rows
from spmd_core.program.dim_rules import DimRule, dims
from spmd_core.program.reductions import Reduction

# An operand, and one of its dims.
_OperandDim = tuple[int, int]


@dataclass(frozen=True)
class BatchSum:
    """How a result of an operation is a sum over a split batch.

    Attributes:
        split: for each operand, the axes that split its dims.
        once: the operands that are added to the sum, such as a bias: only one device may add them.
        sources: for each dim of the result, the (operand, dim) pairs from whose shards a shard of
            it is computed; empty if it cannot be computed by shards.
    """

    split: tuple[dict[int, tuple[int, ...]], ...]
    once: frozenset[int]
    sources: tuple[tuple[_OperandDim, ...], ...]


def batch_sum(
    entry: Entry, result: int, inputs: Sequence[Spec], reduction: Reduction
) -> BatchSum | None:
    """How a result is a sum over the batch; None if it is not, or the batch is split unevenly."""
    traits = entry.traits
    if traits.parts is Parts.NONE:
        return None
    rule = dims(entry, inputs)
    sequence = reduction.sequence_axes
    batch = _batch(rule, result, of_activation=reduction.of_activation)
    once = _added_once(rule, result, batch)
    following = tuple((i, dim + 1) for i, dim in batch) if sequence else ()
    if traits.rows is Rows.READ and reduction.of_activation:
        batch = ((0, 0),)  # the rows of the table that each device has
    if not batch or (sequence and not _is_summed(rule, result, following)):
        return None
    batch_axes = tuple(axis for axis in reduction.batch_axes if axis not in sequence)
    split: tuple[dict[int, tuple[int, ...]], ...] = tuple({} for _ in inputs)
    for places, axes in ((batch, batch_axes), (following, sequence)):
        for i, dim in places:
            split[i][dim] = axes
    shape = entry.outs[result].shape
    sources = tuple(
        rule.sources(result, dim) if traits.parts >= Parts.DIMS else () for dim in range(len(shape))
    )
    for dim, axes in reduction.others:
        scattered = reduction.scattered if dim == reduction.dim else ()
        if scattered and shape[dim] % reduction.size((*axes, *scattered)):
            return None  # the padding of uneven shards would lie inside the dim
        if dim == 0 and traits.rows is Rows.WRITTEN:
            continue
        if not sources[dim]:
            return None
        for i, own in sources[dim]:
            split[i][own] = axes
    is_even = all(
        x.shape[dim] % reduction.size(axes) == 0
        for x, own in zip(inputs, split)
        for dim, axes in own.items()
    )
    return BatchSum(split, once, sources) if is_even else None


def _batch(rule: DimRule, result: int, *, of_activation: bool) -> tuple[_OperandDim, ...]:
    """The dims of operands that are the batch; empty if the result is no sum over it.

    The batch is the first dim of an operand; of a matrix, which may be transposed, either dim. For
    an activation, whose features stand for the batch, all dims that it sums over are the batch.
    """
    for own in rule.operands:
        for factors in own:
            places = rule.dims_of(factors)
            if not places or not _is_summed(rule, result, places):
                continue
            if of_activation:
                return places if {*rule.sums[result]} == {*factors} else ()
            is_first = any(dim == 0 for _, dim in places)
            if is_first and all(dim == 0 or len(rule.operands[i]) == 2 for i, dim in places):
                return places
    return ()


def _is_summed(rule: DimRule, result: int, places: Sequence[_OperandDim]) -> bool:
    """Whether these dims exist, have the same factors, and the result is a sum over them."""
    found = {rule.operands[i][dim] for i, dim in places if dim < len(rule.operands[i])}
    if len(found) != 1:
        return False
    (factors,) = found
    return {*rule.dims_of(factors)} == {*places} and {*factors} <= {*rule.sums[result]}


def _added_once(rule: DimRule, result: int, batch: Sequence[_OperandDim]) -> frozenset[int]:
    factors = {x for i, dim in batch for x in rule.operands[i][dim]}
    return frozenset[int]().union(*(rule.sums[result][factor] for factor in factors))
