"""Gathers the columns of a weight as rows of its transpose, on CPUs.

Where a tensor parallel plan splits the rows of a weight, `fully_shard` splits its columns. The CPU
backend of XLA gathers along the major dim of a layout: it would transpose the shard, gather, and
transpose the whole weight back for the operation that reads it. A product can read the transpose
instead, forward and backward, which saves the second. For others, such as a lookup, the shards are
gathered as they are, one after the other, and each is copied to its columns, row by row. GPUs and
TPUs choose layouts after they have seen all readers.
"""

import functools
import math
from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import PartitionSpec

from spmd_core.ops import registry
from spmd_core.ops.kernels.traits import SAME, Elements
from spmd_core.program.ir import Graph, InsertedEntry, Op, Ref, Rewriter
from spmd_core.program.mark_names import MARK_SHARDING
from spmd_core.program.moved_dims import axes_of_mark, axes_of_weight
from spmd_core.program.partial_sums import PartialSumEntry
from spmd_core.program.target import Target
from spmd_core.runtime.jax_sharding import jax_axis_names, jax_mesh
from spmd_core.sharding.mesh import Mesh

# For products, and for others.
GATHER, GATHER_BLOCKS = "spmd::gather_columns", "spmd::gather_blocks"


def column_gathers(graph: Graph, target: Target) -> Graph:
    """The graph with these gathers in place of marks."""
    if target.platform != "cpu" or not target.is_split:
        return graph
    users = graph.users()
    gathers = {
        op: axes for op in graph.ops if (axes := _axes(op, target)) is not None and Ref(op) in users
    }
    if not gathers:
        return graph
    rewriter = Rewriter(graph)
    for op in graph.ops:
        axes = gathers.get(op)
        if axes is None:
            rewriter.keep(op)
            continue
        assert op.entry.sharding is not None
        for_products = _is_read_by_products(Ref(op), users)
        name, block = (GATHER, _transposed) if for_products else (GATHER_BLOCKS, _side_by_side)
        kernel = functools.partial(_gathered, block, op.entry.sharding.mesh, *axes)
        entry = InsertedEntry(name, kernel, (op.entry.spec.logical,), traits=SAME)
        made = rewriter.add(entry, [rewriter.now(op.operands[0])], op.source)
        rewriter.replace(Ref(op), Ref(made))
    return rewriter.graph()


def _axes(op: Op, target: Target) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """The axes of a weight's rows, and those of its columns, of which the last one is gathered.

    None unless the operation is such a gather, and all devices have blocks of one size.
    """
    entry = op.entry
    if entry.name != MARK_SHARDING or entry.along is not None or op.manual is not None:
        return None
    assert entry.sharding is not None
    if entry.sharding.has_hints:  # which a manual region has no place for
        return None
    (source,), mesh, shape = op.operands, entry.sharding.mesh, entry.spec.shape
    if len(shape) != 2 or mesh.ids != target.device_ids:
        return None
    before = [axes_of_weight(source, dim) for dim in (0, 1)]
    after = [axes_of_mark(op, dim) for dim in (0, 1)]
    if before[0] is None or before[1] is None or any(m != mesh for d in before for m, _ in d or ()):
        return None
    if before[0] != after[0] or not before[1] or before[1][:-1] != after[1]:
        return None
    rows, columns = (tuple(axis for _, axis in dim or ()) for dim in before)
    sizes = [math.prod(mesh.mesh_shape[axis] for axis in axes) for axes in (rows, columns)]
    if any(n % size for n, size in zip(shape, sizes)):
        return None
    return rows, columns[:-1], columns[-1]


def _is_read_by_products(value: Ref, users: dict[Ref, list[Op]]) -> bool:
    """Whether only products, or partial sums of them, read a value, or its transpose."""
    for op in users.get(value, ()):
        is_transpose = op.source_of_elements(Elements.PERMUTED) is not None
        if is_transpose and not op.entry.sharding and not op.is_cast:
            if not _is_read_by_products(Ref(op), users):
                return False
            continue
        entry = op.entry.part.op.entry if isinstance(op.entry, PartialSumEntry) else op.entry
        if not entry.traits.is_product or entry.traits.images:
            return False
    return value in users


def _transposed(shard: jax.Array, axis: str) -> jax.Array:
    """Inside the region: the gathered columns, as the transpose of an array of rows."""
    return lax.all_gather(shard.T, axis, axis=0, tiled=True).T


def _side_by_side(shard: jax.Array, axis: str) -> jax.Array:
    """Inside the region: the gathered columns, in an array of this layout."""
    shards = lax.all_gather(shard, axis, axis=0)
    return shards.swapaxes(0, 1).reshape(shard.shape[0], -1)


def _gathered(
    block: Callable[[jax.Array, str], jax.Array],
    mesh: Mesh,
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    gathered: int,
    context: registry.Context,
    inputs: list[jax.Array],
    numbers: object,
) -> list[jax.Array]:
    names = jax_axis_names(mesh)
    of_rows, of_columns = (tuple(names[axis] for axis in axes) for axes in (rows, columns))
    mapped = jax.shard_map(
        lambda shard: block(shard, names[gathered]),
        mesh=jax_mesh(mesh),
        in_specs=PartitionSpec(of_rows or None, (*of_columns, names[gathered])),
        out_specs=PartitionSpec(of_rows or None, of_columns or None),
        axis_names={*of_rows, *of_columns, names[gathered]},
        check_vma=False,
    )
    return [mapped(inputs[0])]
