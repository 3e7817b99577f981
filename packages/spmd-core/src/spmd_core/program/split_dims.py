"""Collects how the leaves, marks and results of a program split their dims."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax.sharding import NamedSharding

from spmd_core.graph.values import Spec
from spmd_core.program.ir import Graph
from spmd_core.program.splits import Splits
from spmd_core.runtime.jax_sharding import CommonMesh, named_sharding
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding

# The name of torch's product of rows in groups.
GROUPED = "aten::_grouped_mm"
# The sharding of a leaf, mark or result, with the spec of its tensor.
Placed: TypeAlias = tuple[Spec, NamedSharding]


def shardings(graph: Graph) -> list[Placed]:
    """The sharding of each leaf, mark and result."""
    marked = [
        (op.entry.outs[0], named_sharding(op.entry.sharding, graph.device_ids))
        for op in graph.all_ops()
        if op.entry.sharding
    ]
    placed = [(x.leaf.spec, x.leaf.placement.device_sharding) for x in graph.inputs]
    results = [
        (output.spec, output.placement.device_sharding)
        for output in graph.recorded.outputs
        if output.placement is not None
    ]
    return [*marked, *placed, *results]


def split_dims(found: Sequence[Placed]) -> frozenset[int]:
    """The dims that any of these shardings splits, as negative numbers: -1 is the last dim.

    Floating-point and complex tensors with at most two dims are assumed to be weights, and left
    out. Integer tensors may be indices into a table, whose rows add a last dim to the result, so a
    split dim of an integer tensor also counts as the dim before it.
    """
    dims: set[int] = set()
    for spec, sharding in found:
        ndim, is_float = len(spec.shape), spec.dtype.is_floating_point or spec.dtype.is_complex
        split = (
            {dim - ndim for dim, axes in enumerate(sharding.spec) if axes}
            if ndim > 2 or not is_float
            else set()
        )
        dims |= split if is_float else split | {dim - 1 for dim in split}
    return frozenset(dims)


def splits(
    found: Sequence[Placed],
    replicate_last_dims: Callable[[jax.Array, int], jax.Array],
    num_devices: int,
    *,
    replicates_indices: bool,
) -> Splits:
    """How these shardings split dims, as the rules for the partitioner need it.

    Args:
        found: the shardings.
        replicate_last_dims: as in `Context`.
        num_devices: the number of devices of the program.
        replicates_indices: as in `Splits`.
    """
    uneven: set[int] = set()
    axes_used: set[tuple[str, int]] = set()  # with sizes: two meshes may share names
    joins_axes = False
    for spec, sharding in found:
        counts = [0]  # the number of axes that split each dim
        for size, axes in zip(spec.shape, sharding.spec):
            names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
            sizes = {name: sharding.mesh.shape[name] for name in names}
            axes_used |= sizes.items()
            counts.append(sum(x > 1 for x in sizes.values()))
            count = math.prod(sizes.values())
            if size % count:
                uneven.add(count)
        joins_axes |= 1 < max(counts) < sum(counts)
    return Splits(
        replicate_last_dims,
        num_devices,
        tuple(size for _, size in axes_used),
        joins_axes,
        frozenset(uneven),
        replicates_indices=replicates_indices,
    )


@dataclass(frozen=True)
class DataSplit:
    """How the axes of a mesh split the program's data. Axes are numbers.

    Attributes:
        mesh: the mesh.
        batch: the axes that split the batch, the first dim.
        sequence: the axes that split the sequence, the second dim.
    """

    mesh: Mesh
    batch: tuple[int, ...]
    sequence: tuple[int, ...] = ()


def data_splits(graph: Graph) -> list[DataSplit]:
    """How the program's data is split, from leaves, marks and results; the most axes first.

    Tensors that are no weights count as data: integers, and tensors with more than two dims, apart
    from those of the shape of a grouped product's matrices.
    Integers may have a dim before the batch, for microbatches that are computed one after another.
    """
    placed = [(x.leaf.spec, x.leaf.placement.sharding) for x in graph.inputs]
    marks = [(op.entry.spec, op.entry.sharding) for op in graph.all_ops()]
    matrices = _grouped_matrices(graph)
    found: dict[DataSplit, None] = {}
    for spec, sharding in (*placed, *marks):
        if sharding is None or not sharding.dims or spec.shape in matrices:
            continue
        is_integer = not (spec.dtype.is_floating_point or spec.dtype.is_complex)
        ndim, dims = len(spec.shape), (*sharding.dims, ())
        at = 1 if is_integer and ndim > 2 and not dims[0] else 0
        split = DataSplit(sharding.mesh, dims[at], dims[at + 1] if is_integer else ())
        if (is_integer or ndim > 2) and (split.batch or split.sequence):
            found[split] = None
    return sorted(found, key=lambda split: -len(split.batch) - len(split.sequence))


def _grouped_matrices(graph: Graph) -> set[tuple[int, ...]]:
    """The shapes of the matrices of grouped products, each of which may be transposed."""
    found = {
        x.spec.shape
        for op in graph.all_ops()
        if op.entry.name == GROUPED and any(len(y.spec.shape) == 2 for y in op.operands[:2])
        for x in op.operands[:2]
        if len(x.spec.shape) == 3
    }
    return found | {(n, columns, rows) for n, rows, columns in found}


def batch_axes(
    splits: Sequence[DataSplit], common_mesh: CommonMesh, device_ids: tuple[int, ...]
) -> tuple[str, ...]:
    """The names of the axes of the program's mesh that split the batch; empty if not known."""
    for split in splits:
        sharding = Sharding.of(split.mesh, (split.batch,), 1)
        if sharding.num_shards > 1 and split.mesh.ids == device_ids:
            (names,) = common_mesh(named_sharding(sharding, device_ids)).spec
            return (names,) if isinstance(names, str) else tuple(names or ())
    return ()
