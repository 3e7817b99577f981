"""Computes split parameters' gradients as reduce-scatters of the devices' sums over the batch.

The gradient of a parameter is a sum over the batch. If the batch is split, each device can sum over
its own part, and one reduce-scatter remains. If the partitioner is only told the sharding of the
whole gradient, it emits an all-reduce first, and relies on a later pass to turn that and the slice
into a reduce-scatter. XLA has that pass for GPU and TPU, but not for the CPU, where it joins the
all-reduces of all parameters into one. Therefore the operations that compute such a gradient are
found in the graph, and lowered inside a manual region over the batch's axes. The values are those
of the whole operations, whatever the shardings of their inputs. A gradient that is computed in
another way is left to the partitioner.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd_core import dtypes
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops import registry
from spmd_core.program.program_graph import Graph, Node
from spmd_core.runtime.jax_sharding import jax_axis_names, jax_mesh
from spmd_core.sharding.mesh import Mesh


@dataclass(frozen=True)
class Scatter:
    """How a gradient is reduce-scattered; axes are numbers of axes of the mesh.

    Attributes:
        mesh: the mesh.
        batch_axes: the axes that split the batch, the major one first; `axis` is one of them.
        axis: the axis over which the gradient is scattered.
        dim: the dim of the gradient that `axis` splits.
        others: the dims that are split by other axes, with these, none of which splits the batch.
            Of the axes that split a dim, `axis` is the minor one.
    """

    mesh: Mesh
    batch_axes: tuple[int, ...]
    axis: int
    dim: int
    others: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def num_parts(self) -> int:
        """Into how many parts the batch is split."""
        return self.size(self.batch_axes)

    def size(self, axes: Sequence[int]) -> int:
        """The number of positions along some axes."""
        return math.prod(self.mesh.mesh_shape[axis] for axis in axes)

    def spec(self, axes: Mapping[int, tuple[int, ...]]) -> PartitionSpec:
        """The partition spec of an array whose dims are split by these axes."""
        names = jax_axis_names(self.mesh)
        split = {dim: tuple(names[axis] for axis in by) for dim, by in axes.items()}
        return PartitionSpec(*(split.get(dim) for dim in range(max(split, default=-1) + 1)))


@dataclass(frozen=True)
class Sum:
    """A value that is a sum over the batch.

    Attributes:
        node: the position of the operation that computes it.
        result: which of the operation's results it is.
        number: the value's, as in `Node.inputs`.
        split_dims: for each input of the operation, the axes that split its dims in the region.
        spec: the spec of the value, which may be a conversion of that result.
    """

    node: int
    result: int
    number: int
    split_dims: tuple[Mapping[int, tuple[int, ...]], ...]
    spec: Spec


@dataclass(frozen=True)
class Total:
    """A value that adds up two others, at least one of which is a `Sum` or a `Total`.

    Attributes:
        node: the position of the addition.
        terms: its operands; a number is that of a value that is used as it is.
    """

    node: int
    terms: "tuple[Sum | Total | int, ...]"


@dataclass(frozen=True)
class Plans:
    """The gradients to compute as reduce-scatters.

    Attributes:
        gradients: by the position of the mark of a gradient, what it adds up, and how it is
            scattered.
        sums: by the position of an operation, its sums, each with the position of the mark.
        replaced: the numbers of the values that are then not used.
    """

    gradients: Mapping[int, "Sum | Total"]
    sums: Mapping[int, Sequence[tuple[int, Sum, Scatter]]]
    replaced: frozenset[int]


@dataclass(frozen=True)
class _BatchReduction:
    """How an operation sums over the batch.

    Attributes:
        batch_dims: for each input, the dim that is the batch; None for an input without one.
        first_summed: the first of torch's results that is a sum over the batch; those after it are
            sums too.
        sources: for each dim of that first result, the inputs and their dims whose parts make a
            part of it; empty where the operation's code asks for the whole dim.
    """

    batch_dims: tuple[int | None, ...]
    first_summed: int
    sources: tuple[tuple[tuple[int, int], ...], ...] = ()


_BATCH_REDUCTIONS = {
    # x, gradient, weight
    "aten::linear_backward": _BatchReduction(
        (0, 0, None), 1, (((1, -1), (2, 0)), ((0, -1), (2, 1)))
    ),
    # gradient, x, weight
    "aten::convolution_backward": _BatchReduction((0, 0, None), 1),
    # gradient, x, mean, rstd, weight, bias
    "aten::native_layer_norm_backward": _BatchReduction((0, 0, 0, 0, None, None), 1),
    # gradient, indices
    "aten::embedding_dense_backward": _BatchReduction((0, 0), 0),
    "aten::mm": _BatchReduction((1, 0), 0, (((0, 0),), ((1, 1),))),
}

# They pass a gradient on; a view only where it has the shape of its base.
_UNCHANGED = ("aten::_to_copy", "aten::view", "aten::clone", "spmd::mark_sharding")


def find(graph: Graph, is_local: Callable[[int], bool]) -> Plans:
    """The marked gradients of a graph that can be computed as reduce-scatters.

    Args:
        graph: the recorded operations.
        is_local: whether the value of a number is local to a manual region.
    """
    gradients: dict[int, Sum | Total] = {}
    sums: dict[int, list[tuple[int, Sum, Scatter]]] = {}
    marked = [(i, node) for i, node in enumerate(graph.nodes) if node.entry.summed_over is not None]
    if marked and graph.growth is None and len(graph.device_ids) > 1:
        finder = _Finder(graph)
        for mark, node in marked:
            scatter = None if is_local(node.inputs[0]) else finder.scatter(node.entry)
            found = None if scatter is None else finder.sum(node.inputs[0], scatter)
            if scatter is None or found is None:
                continue
            gradients[mark] = found
            for part in _sums(found):
                sums.setdefault(part.node, []).append((mark, part, scatter))
    replaced = frozenset(part.number for each in sums.values() for _, part, _ in each)
    return Plans(gradients, sums, replaced)


def _sums(found: Sum | Total | int) -> Iterator[Sum]:
    if isinstance(found, Sum):
        yield found
    elif isinstance(found, Total):
        for term in found.terms:
            yield from _sums(term)


class _Finder:
    """Finds the sums over the batch in a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made_by = [
            (position, result)
            for position, node in enumerate(graph.nodes)
            for result in range(len(node.entry.outs))
        ]
        # The longest first: a gradient sums over all axes that split the batch.
        splits = dict.fromkeys(self._batch_splits())
        self._splits = sorted(splits, key=lambda split: -len(split[1]))

    def _batch_splits(self) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
        """The axes that split the first dim of the program's data, as far as marks tell.

        Data is what is no weight: integers, and what has more than two dims.
        """
        placed = [(leaf.spec, leaf.placement.sharding) for leaf in self._graph.leaves]
        marks = [(node.entry.spec, node.entry.sharding) for node in self._graph.nodes]
        for spec, sharding in (*placed, *marks):
            if sharding is None or not sharding.dims or not sharding.dims[0]:
                continue
            if not spec.dtype.is_floating_point or len(spec.shape) > 2:
                yield sharding.mesh, sharding.dims[0]

    def scatter(self, mark: Entry) -> Scatter | None:
        """How the gradient with this mark is reduce-scattered; None if it cannot be."""
        assert mark.sharding is not None and mark.summed_over is not None
        mesh = mark.sharding.mesh
        split = {
            dim: tuple(axis for axis in axes if mesh.mesh_shape[axis] > 1)
            for dim, axes in enumerate(mark.sharding.dims)
        }
        # A manual region is over all devices of its program, in the program's order.
        if mesh.ids != self._graph.device_ids:
            return None
        inferred = [axes for other, axes in self._splits if other == mesh]
        for batch_axes in [mark.summed_over] if mark.summed_over else inferred:
            by_batch = [
                (dim, axis) for dim, axes in split.items() for axis in axes if axis in batch_axes
            ]
            if len(by_batch) == 1 and split[by_batch[0][0]][-1] == by_batch[0][1]:
                ((dim, axis),) = by_batch
                others = {d: axes[:-1] if d == dim else axes for d, axes in split.items()}
                return Scatter(
                    mesh, batch_axes, axis, dim, tuple((d, a) for d, a in others.items() if a)
                )
        return None

    def sum(self, number: int, scatter: Scatter) -> Sum | Total | None:
        """The value of this number as a sum over the batch, or None."""
        found = self._made(number)
        if found is None:
            return None
        spec = found[1].entry.outs[found[2]]
        while found is not None and found[1].entry.name in _UNCHANGED:
            number = found[1].inputs[0]
            found = self._made(number)
        if found is None:
            return None
        position, node, result = found
        if node.entry.outs[result].shape != spec.shape:
            return None
        if node.entry.name == "aten::add.Tensor" and _is_plain(node.entry):
            return self._total(position, node, scatter)
        split_dims = _split_dims(node.entry, result, self._specs(node), scatter)
        return None if split_dims is None else Sum(position, result, number, split_dims, spec)

    def _total(self, position: int, node: Node, scatter: Scatter) -> Total | None:
        """Autograd adds up the gradients of a parameter that is used more than once."""
        terms = [
            self.sum(number, scatter) if spec.shape == node.entry.spec.shape else None
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
    entry: Entry, result: int, inputs: Sequence[Spec], scatter: Scatter
) -> tuple[dict[int, tuple[int, ...]], ...] | None:
    """For each input the axes that split its dims; None if the result is not a sum over the batch.

    The parts have to be equal.
    """
    reduction = _BATCH_REDUCTIONS.get(entry.name)
    if reduction is None:
        return None
    torch_result = result if entry.structure is None else entry.structure.index(result)
    if torch_result < reduction.first_summed or not _is_linear(entry, inputs):
        return None
    shape = entry.outs[result].shape
    batch_dims = reduction.batch_dims[: len(inputs)]
    split_dims: tuple[dict[int, tuple[int, ...]], ...] = tuple(
        {} if dim is None else {dim: scatter.batch_axes} for dim in batch_dims
    )
    sources = reduction.sources if torch_result == reduction.first_summed else ()
    for dim, axes in scatter.others:
        if dim == scatter.dim and shape[dim] % scatter.size((*axes, scatter.axis)):
            return None  # the padding would lie within the dim
        if dim >= len(sources) or not sources[dim]:
            return None
        for i, d in sources[dim]:
            split_dims[i][d % len(inputs[i].shape)] = axes
    batch = {
        x.shape[dim] if x.shape else 0 for x, dim in zip(inputs, batch_dims) if dim is not None
    }
    is_even = all(
        x.shape[dim] % scatter.size(axes) == 0
        for x, split in zip(inputs, split_dims)
        for dim, axes in split.items()
        if x.shape
    )
    return split_dims if is_even and len(batch) == 1 and 0 not in batch else None


def _is_plain(addition: Entry) -> bool:
    """Whether an addition has no factor."""
    return not addition.number_kinds and (addition.arguments or {}).get("alpha", 1) == 1


def _is_linear(entry: Entry, inputs: Sequence[Spec]) -> bool:
    """Whether there is a batch, and the operation is the sum of its results for parts of the batch.

    That may depend on its static arguments.
    """
    ranks = [len(x.shape) for x in inputs]
    if entry.name == "aten::linear_backward":
        return ranks[0] > 1 and ranks[2] == 2  # x, weight
    if entry.name == "aten::native_layer_norm_backward":
        return len(ranks) > 4 and ranks[4] < ranks[0]  # weight, gradient
    if entry.name != "aten::embedding_dense_backward":
        return True
    # With this flag, a row's gradient is scaled by how often the whole batch uses the row.
    return entry.arguments is not None and not entry.arguments["scale_grad_by_freq"]


def reduce_scattered(
    entry: Entry,
    found: Sum,
    scatter: Scatter,
    platform: str,
    inputs: Sequence[jax.Array],
    numbers: Sequence[registry.Number],
) -> jax.Array:
    """The sum of the devices' parts, of which each device keeps its shard; in the dtype of `found`.

    Args:
        entry: the operation.
        found: which of its results.
        scatter: the axes.
        platform: as in `registry.Context`.
        inputs: whole, whatever their shardings.
        numbers: the operation's.
    """
    names = jax_axis_names(scatter.mesh)
    kinds = [number.kind for number in numbers]
    rest = tuple(
        names[axis]
        for axis in scatter.batch_axes
        if axis != scatter.axis and scatter.size((axis,)) > 1
    )
    outs = tuple(registry.Out(s.shape, s.dtype) for s in entry.outs)
    # Only a dim that no other axis splits may be uneven.
    padding = [(0, 0)] * len(found.spec.shape)
    padding[scatter.dim] = (0, -found.spec.shape[scatter.dim] % scatter.size((scatter.axis,)))

    def part(blocks: list[jax.Array], values: list[jax.Array]) -> jax.Array:
        typed = [registry.Number(value, kind) for value, kind in zip(values, kinds)]
        total = entry.kernel(registry.Context(outs, platform), blocks, typed)[found.result]
        total = lax.psum_scatter(
            jnp.pad(total.astype(dtypes.to_jax(found.spec.dtype)), padding),
            names[scatter.axis],
            scatter_dimension=scatter.dim,
            tiled=True,
        )
        return lax.psum(total, rest) if rest else total

    in_specs = [scatter.spec(split) for split in found.split_dims]
    others = dict(scatter.others)
    out_specs = scatter.spec({**others, scatter.dim: (*others.get(scatter.dim, ()), scatter.axis)})
    axes = {*scatter.batch_axes}.union(*(axes for _, axes in scatter.others))
    mapped: Callable[[list[Any], list[Any]], jax.Array] = jax.shard_map(
        part,
        mesh=jax_mesh(scatter.mesh),
        in_specs=(in_specs, [PartitionSpec()] * len(numbers)),
        out_specs=out_specs,
        axis_names={names[axis] for axis in axes},
        check_vma=False,
    )
    total = mapped(list(inputs), [number.value for number in numbers])
    return lax.slice_in_dim(total, 0, found.spec.shape[scatter.dim], axis=scatter.dim)
