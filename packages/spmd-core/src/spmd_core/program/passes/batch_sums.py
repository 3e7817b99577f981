"""Finds the marked values that are sums over devices, so that these reduce them once.

The gradient of a parameter is a sum over the batch. If the batch is split, each device can sum over
its own part, and one reduction remains: a reduce-scatter if the batch's axes also split the
parameter, else an all-reduce. If the partitioner is only told the sharding of the whole gradient,
it emits an all-reduce, and relies on a later pass to turn that and the slice into a reduce-scatter.
XLA has that pass for GPU and TPU, but not for the CPU, where it joins the all-reduces of all
parameters into one. It also reduces in the dtype of the sum, which is bfloat16 under autocast, and
reduces each of several gradients that a program adds up, as it does to accumulate them.

Therefore the operations that compute such a gradient are found in the graph, and lowered inside a
manual region over the batch's axes (`partial_sums`): those whose reduction scatters, whose sum has
another dtype than the gradient, or which are added up. The values are those of the whole
operations, whatever the shardings of their inputs. A gradient that is computed in another way is
left to the partitioner.

The same holds for the activations of tensor parallelism, and for their gradients: a linear layer
whose input's features are split sums over these (`modules/tensor_parallel.py` marks such a sum with
the axes that split them). "The batch" stands for the features there. Several such
sums that are added up, as are gradients of layers with one input, are always found: the partitioner
joins them only where nothing else, such as the gradient of an adapter, is added in between.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from spmd_core.graph.values import Entry, Spec
from spmd_core.ops.registry import ImageLayout
from spmd_core.program.gradient_plans import (
    MARK_SUM,
    UNCHANGED,
    Gradient,
    Lookup,
    Plans,
    Reduction,
    Sum,
    Total,
    is_plain_addition,
    sums,
    uses,
)
from spmd_core.program.joined_gradients import Joins
from spmd_core.program.program_graph import Graph, Node
from spmd_core.program.split_dims import data_splits


@dataclass(frozen=True)
class _BatchReduction:
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
    "aten::linear": {0: _BatchReduction((-1, 1, None), rows=(0,), once=2)},
    # table, indices
    "aten::embedding": {0: _BatchReduction((0, None), rows=(1,))},
    # x, gradient, weight
    "aten::linear_backward": {
        0: _BatchReduction((None, -1, 0), rows=(0, 1)),
        1: _BatchReduction((0, 0, None), (((1, -1), (2, 0)), ((0, -1), (2, 1)))),
        2: _BatchReduction((0, 0, None)),
    },
    # gradient, x, weight
    "aten::convolution_backward": {1: _BatchReduction((0, 0, None))},
    # gradient, x, mean, rstd, weight, bias
    "aten::native_layer_norm_backward": {1: _BatchReduction((0, 0, 0, 0, None, None))},
    # gradient, indices
    "aten::embedding_dense_backward": {0: _BatchReduction((0, 0), cuts_rows=True)},
    "aten::mm": {0: _BatchReduction((1, 0), (((0, 0),), ((1, 1),)))},
    "aten::sum.dim_IntList": {0: _BatchReduction((0,))},
}


def find(
    graph: Graph,
    is_local: Callable[[int], bool],
    split_dims: frozenset[int] = frozenset(),
    images: Mapping[int, ImageLayout] = MappingProxyType({}),
) -> Plans:
    """The marked gradients of a graph to reduce in manual regions.

    Args:
        graph: the recorded operations.
        is_local: whether the value of a number is local to a manual region.
        split_dims: the dims that the program splits, as in `registry.Context`.
        images: the layouts of convolutions, by the node's position, where they are known.
    """
    marks = [i for i, node in enumerate(graph.nodes) if node.entry.summed_over is not None]
    if not marks or graph.growth is not None or len(graph.device_ids) == 1:
        return Plans()
    finder = _Finder(graph, split_dims, images)
    found: dict[int, Gradient] = {}
    for mark in marks:
        node = graph.nodes[mark]
        reduction = None if is_local(node.inputs[0]) else finder.reduction(node.entry)
        total = None if reduction is None else finder.sum(node.inputs[0], reduction)
        if reduction is not None and total is not None:
            found[mark] = Gradient(total, reduction)
    joins = Joins(graph, found)
    joined_marks = {mark for marks in joins.marks.values() for mark in marks}
    gradients = {
        mark: gradient
        for mark, gradient in found.items()
        if mark in joined_marks or finder.gains(gradient)
    }
    lowered: dict[int, list[tuple[int, Sum]]] = {}
    for mark, gradient in gradients.items():
        for part in sums(gradient.found):
            lowered.setdefault(part.position, []).append((mark, part))
    replaced = {n for each in lowered.values() for _, part in each for n in part.replaced}
    return Plans(gradients, lowered, joins.marks, joins.ends, frozenset(replaced | joins.replaced))


class _Finder:
    """Finds the sums over the batch in a graph."""

    def __init__(
        self, graph: Graph, split_dims: frozenset[int], images: Mapping[int, ImageLayout]
    ) -> None:
        self._graph, self._split, self._images = graph, split_dims, images
        self._uses = uses(graph)
        self._made_by = [
            (position, result)
            for position, node in enumerate(graph.nodes)
            for result in range(len(node.entry.outs))
        ]
        # The longest first: a gradient sums over all axes that split the batch.
        self._splits = data_splits(graph)

    def reduction(self, mark: Entry) -> Reduction | None:
        """How the gradient with this mark is reduced; None if that is left to the partitioner."""
        assert mark.sharding is not None and mark.summed_over is not None
        mesh = mark.sharding.mesh
        split = {
            dim: tuple(axis for axis in axes if mesh.mesh_shape[axis] > 1)
            for dim, axes in enumerate(mark.sharding.dims)
        }
        # A manual region is over all devices of its program, in the program's order.
        if mesh.ids != self._graph.device_ids:
            return None
        choices = self._choices(mark)
        if mark.name == MARK_SUM:
            split |= self._batch_of_activation(mark, split)
        whole = None
        for batch_axes, sequence_axes in choices:
            by_batch = [
                (dim, axis) for dim, axes in split.items() for axis in axes if axis in batch_axes
            ]
            if not by_batch and whole is None:
                others = tuple((d, axes) for d, axes in split.items() if axes)
                whole = Reduction(
                    mesh,
                    batch_axes,
                    others=others,
                    of_activation=mark.name == MARK_SUM,
                    sequence_axes=sequence_axes,
                )
            if len(by_batch) == 1 and split[by_batch[0][0]][-1] == by_batch[0][1]:
                ((dim, axis),) = by_batch
                rest = {d: axes[:-1] if d == dim else axes for d, axes in split.items()}
                others = tuple((d, axes) for d, axes in rest.items() if axes)
                return Reduction(
                    mesh,
                    batch_axes,
                    axis,
                    dim,
                    others,
                    of_activation=mark.name == MARK_SUM,
                    sequence_axes=sequence_axes,
                )
        return whole

    def _choices(self, mark: Entry) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The axes that a marked gradient may be summed over; those of the sequence come apart."""
        assert mark.sharding is not None and mark.summed_over is not None
        known = [split for split in self._splits if split.mesh == mark.sharding.mesh]
        if mark.name == MARK_SUM:
            return [(mark.summed_over, ())]
        if mark.summed_over:
            # The mark speaks of the batch; no other axis of the data may split a sequence of it.
            given = mark.summed_over
            sequences = [split.sequence for split in known if {*split.batch} <= {*given}]
            sequence = next((axes for axes in sequences if {*axes}.isdisjoint(given)), ())
            return [((*given, *sequence), sequence)]
        return [((*split.batch, *split.sequence), split.sequence) for split in known]

    def _batch_of_activation(
        self, mark: Entry, split: Mapping[int, tuple[int, ...]]
    ) -> dict[int, tuple[int, ...]]:
        """The axes that split an activation's batch as they split the program's data."""
        assert mark.sharding is not None
        used = {*(mark.summed_over or ()), *(axis for axes in split.values() for axis in axes)}
        mesh, shape = mark.sharding.mesh, mark.spec.shape
        if len(shape) < 2 or split[0]:
            return {}
        for known in self._splits:
            if known.mesh != mesh:
                continue
            by_dim = {0: known.batch, 1: known.sequence if len(shape) > 2 else ()}
            # A sequence may be split further by the axes that the sum is scattered over.
            found = {
                dim: (*(axis for axis in axes if mesh.mesh_shape[axis] > 1), *split[dim])
                for dim, axes in by_dim.items()
                if axes and used.isdisjoint(axes)
            }
            sizes = {
                dim: math.prod(mesh.mesh_shape[axis] for axis in axes)
                for dim, axes in found.items()
            }
            even = {dim: found[dim] for dim, n in sizes.items() if n > 1 and shape[dim] % n == 0}
            if even:
                return even
        return {}

    def sum(self, number: int, reduction: Reduction) -> Sum | Total | None:
        """The value of this number as a sum over the batch, or None."""
        found = self._made(number)
        if found is None:
            return None
        spec = found[1].entry.outs[found[2]]
        while found is not None and self._passes_on(found[1], number, reduction):
            number = found[1].inputs[0]
            found = self._made(number)
        if found is None:
            return None
        position, node, result = found
        if is_plain_addition(node.entry):
            is_same = node.entry.spec.shape == spec.shape
            return self._total(position, node, reduction) if is_same else None
        if node.entry.outs[result].shape != spec.shape and reduction.others:
            return None  # other axes split dims of the gradient, which that result lacks
        if "convolution" in node.entry.name and self._splits_positions(position, node):
            return None
        split_dims = _split_dims(node.entry, result, self._specs(node), reduction)
        if split_dims is not None:
            how = _batch_reduction(node.entry, result)
            assert how is not None
            return Sum(
                position, result, number, split_dims, spec, once=how.once, sources=how.sources
            )
        return self._lookup(position, node, number, reduction, spec)

    def _passes_on(self, node: Node, number: int, reduction: Reduction) -> bool:
        """Whether a value, of this number, is its operand, so that a sum is looked for there."""
        if node.entry.name == MARK_SUM:
            # A sum that only goes into this one, which is reduced for both.
            return node.entry.summed_over == reduction.batch_axes and self._uses[number] == 1
        return node.entry.name in UNCHANGED

    def _splits_positions(self, position: int, node: Node) -> bool:
        """Whether the program may split what a convolution's windows move over.

        Inside a region over the batch, XLA's partitioner returns zeros for the gradient of a weight
        where that split is uneven.
        """
        layout = self._images.get(position)
        if layout is not None:
            return any(layout.axes[2:])
        rank = max(len(spec.shape) for spec in self._specs(node))
        return any(dim >= 2 - rank for dim in self._split)

    def _lookup(
        self, position: int, node: Node, number: int, reduction: Reduction, spec: Spec
    ) -> Sum | None:
        """The gradient of a table of which the whole batch looks up the same rows."""
        if node.entry.name != "aten::embedding_dense_backward" or reduction.others:
            return None
        if reduction.sequence_axes:
            return None  # each part of the batch looks up a part of the rows
        found = self.sum(node.inputs[0], reduction)
        if not isinstance(found, Sum) or found.lookup is not None:
            return None
        if node.entry.number_kinds or self._graph.nodes[found.node].entry.number_kinds:
            return None
        lookup = Lookup(position, number, found.spec)
        return replace(found, spec=spec, lookup=lookup)

    def gains(self, gradient: Gradient) -> bool:
        """Whether the partitioner would reduce a gradient, used once, less well.

        It would all-reduce what can be scattered, or reduce in the dtype of the sum. Of several
        sums over features, such as those of layers with one input, it would reduce each by itself
        where something else is added in between, such as the gradient of an adapter.
        """
        parts = [*sums(gradient.found)]
        # A sum behind a lookup is small. With a further axis, its region takes more memory.
        scatters = gradient.reduction.axis is not None and not any(p.lookup for p in parts)
        dtypes = (self._graph.nodes[p.node].entry.outs[p.result].dtype for p in parts)
        if gradient.reduction.of_activation and len(parts) > 1:
            return True
        return scatters or any(dtype != p.spec.dtype for dtype, p in zip(dtypes, parts))

    def _total(self, position: int, node: Node, reduction: Reduction) -> Total | None:
        """Autograd adds up the gradients of a parameter that is used more than once."""
        terms = [
            self.sum(number, reduction) if spec.shape == node.entry.spec.shape else None
            for number, spec in zip(node.inputs, self._specs(node))
        ]
        if not any(terms):
            return None
        return Total(position, tuple(t or n for t, n in zip(terms, node.inputs)))

    def _made(self, number: int) -> tuple[int, Node, int] | None:
        """The node that computes a value, with its position, and which of its results that is."""
        if number < 0:
            return None
        position, result = self._made_by[number]
        return position, self._graph.nodes[position], result

    def _specs(self, node: Node) -> list[Spec]:
        specs = []
        for number in node.inputs:
            made = self._made(number)
            specs.append(
                self._graph.leaves[-number - 1].spec
                if made is None
                else made[1].entry.outs[made[2]]
            )
        return specs


def _split_dims(
    entry: Entry, result: int, inputs: Sequence[Spec], reduction: Reduction
) -> tuple[dict[int, tuple[int, ...]], ...] | None:
    """For each input the axes that split its dims; None if the result is not a sum over the batch.

    The parts have to be equal.
    """
    how = _batch_reduction(entry, result)
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
    split_dims: tuple[dict[int, tuple[int, ...]], ...] = tuple(
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
            split_dims[i][d % len(inputs[i].shape)] = axes
    batch = {
        x.shape[dim] if x.shape else 0 for x, dim in zip(inputs, batch_dims) if dim is not None
    }
    is_even = all(
        x.shape[dim] % reduction.size(axes) == 0
        for x, split in zip(inputs, split_dims)
        for dim, axes in split.items()
        if x.shape
    )
    return split_dims if is_even and len(batch) == 1 and 0 not in batch else None


def _batch_reduction(entry: Entry, result: int) -> _BatchReduction | None:
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
