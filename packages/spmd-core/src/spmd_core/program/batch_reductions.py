"""How operations sum over the batch, so that each device can sum over its own part of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_core.graph.values import Entry, Spec
from spmd_core.program.reductions import Reduction


@dataclass(frozen=True)
class BatchReduction:
    """How results of an operation sum over the batch.

    Attributes:
        batch_dims: for each input, the dim that is the batch; None for an input without one.
        sources: for each dim of the result, the inputs and their dims whose parts make a part of
            it; empty where the operation's code asks for the whole dim.
        rows: inputs that have the dims of the result, but for the last one.
        once: an input that is added to the sum, so that one device alone adds it.
        cuts_rows: whether devices cut the first dim of the result themselves.
    """

    batch_dims: tuple[int | None, ...]
    sources: tuple[tuple[tuple[int, int], ...], ...] = ()
    rows: tuple[int, ...] = ()
    once: int | None = None
    cuts_rows: bool = False

    def sources_of(self, dim: int, rank: int) -> tuple[tuple[int, int], ...]:
        """The inputs and their dims whose parts make a part of this dim of the result."""
        if self.rows:
            return tuple((i, dim) for i in self.rows) if dim < rank - 1 else ()
        return self.sources[dim] if dim < len(self.sources) else ()


# By operation and by torch's result. Results after the last one that is listed sum over its batch.
_BATCH_REDUCTIONS = {
    # x, weight, bias
    "aten::linear": {0: BatchReduction((-1, 1, None), rows=(0,), once=2)},
    # table, indices
    "aten::embedding": {0: BatchReduction((0, None), rows=(1,))},
    # x, gradient, weight
    "aten::linear_backward": {
        0: BatchReduction((None, -1, 0), rows=(0, 1)),
        1: BatchReduction((0, 0, None), (((1, -1), (2, 0)), ((0, -1), (2, 1)))),
        2: BatchReduction((0, 0, None)),
    },
    # gradient, x, weight
    "aten::convolution_backward": {1: BatchReduction((0, 0, None))},
    # gradient, x, mean, rstd, weight, bias
    "aten::native_layer_norm_backward": {1: BatchReduction((0, 0, 0, 0, None, None))},
    # gradient, indices
    "aten::embedding_dense_backward": {0: BatchReduction((0, 0), cuts_rows=True)},
    "aten::mm": {0: BatchReduction((1, 0), (((0, 0),), ((1, 1),)))},
    "aten::sum.dim_IntList": {0: BatchReduction((0,))},
}


def batch_split(
    entry: Entry, result: int, inputs: Sequence[Spec], reduction: Reduction
) -> tuple[dict[int, tuple[int, ...]], ...] | None:
    """For each input the axes that split its dims; None if the result is not a sum over the batch.

    The parts have to be equal.
    """
    how = batch_reduction(entry, result)
    if how is None or not _is_linear(entry, inputs):
        return None
    if how.rows and not reduction.of_activation:
        return None  # a sum over features, whereas the batch is split
    shape = entry.outs[result].shape
    batch_dims = tuple(
        dim if dim is None else dim % max(len(x.shape), 1) for dim, x in zip(how.batch_dims, inputs)
    )
    sequence = reduction.sequence_axes
    if sequence and not _sums_over_sequences(entry, inputs):
        return None
    batch_axes = tuple(axis for axis in reduction.batch_axes if axis not in sequence)
    split: tuple[dict[int, tuple[int, ...]], ...] = tuple(
        {} if dim is None else {dim: batch_axes} | ({dim + 1: sequence} if sequence else {})
        for dim in batch_dims
    )
    for dim, axes in reduction.others:
        scattered = () if dim != reduction.dim or reduction.axis is None else (reduction.axis,)
        if scattered and shape[dim] % reduction.size((*axes, *scattered)):
            return None  # the padding would lie within the dim
        if dim == 0 and how.cuts_rows:
            continue
        sources = how.sources_of(dim, len(shape))
        if not sources:
            return None
        for i, d in sources:
            split[i][d % len(inputs[i].shape)] = axes
    batch = {
        x.shape[dim] if x.shape else 0 for x, dim in zip(inputs, batch_dims) if dim is not None
    }
    is_even = all(
        x.shape[dim] % reduction.size(axes) == 0
        for x, own in zip(inputs, split)
        for dim, axes in own.items()
        if x.shape
    )
    return split if is_even and len(batch) == 1 and 0 not in batch else None


def batch_reduction(entry: Entry, result: int) -> BatchReduction | None:
    """How a result of an operation sums over the batch; None if it does not, as far as known."""
    rules = _BATCH_REDUCTIONS.get(entry.name, {})
    torch_result = result if entry.structure is None else entry.structure.index(result)
    first = max((listed for listed in rules if listed <= torch_result), default=None)
    return None if first is None else rules[first]


def _sums_over_sequences(entry: Entry, inputs: Sequence[Spec]) -> bool:
    """Whether a sum over the batch, the first dim, is one over the second dim too."""
    rank = len(inputs[0].shape)
    if entry.name == "aten::sum.dim_IntList":
        return rank > 2 and {0, 1} <= _summed_dims(entry, rank)
    with_sequences = ("aten::linear_backward", "aten::embedding_dense_backward")
    is_norm = entry.name == "aten::native_layer_norm_backward" and len(inputs[4].shape) < rank - 1
    return rank > 2 and (entry.name in with_sequences or is_norm)


def _is_linear(entry: Entry, inputs: Sequence[Spec]) -> bool:
    """Whether there is a batch, and the operation is the sum of its results for parts of the batch.

    That may depend on its static arguments.
    """
    ranks = [len(x.shape) for x in inputs]
    if entry.name == "aten::linear":
        return ranks[0] > 0 and ranks[1] == 2  # x, weight
    if entry.name == "aten::linear_backward":
        return ranks[0] > 1 and ranks[2] == 2  # x, weight
    if entry.name == "aten::native_layer_norm_backward":
        return len(ranks) > 4 and ranks[4] < ranks[0]  # weight, gradient
    if entry.name == "aten::sum.dim_IntList":
        return 0 in _summed_dims(entry, ranks[0])
    if entry.name != "aten::embedding_dense_backward":
        return True
    # With this flag, a row's gradient is scaled by how often the whole batch uses the row.
    return entry.arguments is not None and not entry.arguments["scale_grad_by_freq"]


def _summed_dims(entry: Entry, rank: int) -> set[int]:
    """The dims of a tensor of this rank over which a sum goes; no dims mean all."""
    dims = (entry.arguments or {}).get("dim")
    return {dim % rank for dim in dims} if dims else set(range(rank))
