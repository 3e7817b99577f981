"""Finds lookups in tables whose rows are split by an axis that splits the indices, too.

As for images and attentions, a layout that was guessed wrong costs a resharding, and no value.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from spmd_core.graph.values import Spec
from spmd_core.ops.registry import TableLayout
from spmd_core.program.program_graph import Graph
from spmd_core.program.split_dims import DataSplit, data_splits
from spmd_core.runtime import torus
from spmd_core.runtime.jax_sharding import jax_axis_names, jax_mesh
from spmd_core.sharding.sharding import Sharding

_LOOKUP = "aten::embedding"
# Other uses that gather a table, in its own dtype: the lookup then reads what is there.
_PRODUCTS = frozenset(("aten::linear", "aten::mm", "aten::t", "aten::transpose.int"))


def find(graph: Graph, is_local: Callable[[int], bool]) -> Mapping[int, TableLayout]:
    """The layout of each lookup that is not left to the partitioner, by the node's position.

    Args:
        graph: the recorded operations.
        is_local: whether the value of a number is local to a manual region.
    """
    found = [(i, node) for i, node in enumerate(graph.nodes) if node.entry.name == _LOOKUP]
    if not found or graph.growth is not None or len(graph.device_ids) == 1:
        return {}
    # The fewest axes first: a mark may split what is computed later by more than the data.
    splits = data_splits(graph)[::-1]
    gathered = {n for node in graph.nodes if node.entry.name in _PRODUCTS for n in node.inputs}
    layouts = {}
    for position, node in found:
        table, indices = node.inputs[:2]
        # A table that was gathered for its use has a mark, and is no leaf.
        if table >= 0 or is_local(indices):
            continue
        leaf = graph.leaves[-table - 1]
        if leaf.placement.sharding is None or leaf.placement.manual is not None:
            continue
        shape = node.entry.spec.shape[:-1]
        layout = _layout(graph, leaf.spec, leaf.placement.sharding, shape, splits)
        if layout is None:
            continue
        layout = replace(layout, gathers=layout.gathers or table in gathered)
        # Shards of a major axis do not lie together, so that no gather joins them.
        if not layout.gathers or layout.rows[-1] == layout.shared:
            layouts[position] = layout
    return layouts


def _layout(
    graph: Graph,
    table: Spec,
    sharding: Sharding,
    shape: tuple[int, ...],
    splits: list[DataSplit],
) -> TableLayout | None:
    """For indices of this shape; None if no axis splits both, or a size is uneven."""
    mesh = sharding.mesh

    def size(axes: tuple[int, ...]) -> int:
        return math.prod(mesh.mesh_shape[axis] for axis in axes)

    # A manual region is over all devices of its program, in the program's order.
    if mesh.ids != graph.device_ids or not table.dtype.is_floating_point or len(table.shape) != 2:
        return None
    rows, columns = (tuple(a for a in axes if size((a,)) > 1) for axes in sharding.dims)
    if columns or not rows or table.shape[0] % size(rows) or not shape or 0 in shape:
        return None
    for split in splits:
        batch = tuple(axis for axis in split.batch if size((axis,)) > 1)
        shared = [axis for axis in rows if axis in batch]
        if split.mesh != mesh or len(shared) != 1 or shape[0] % size(batch):
            continue
        sequence = tuple(axis for axis in split.sequence if size((axis,)) > 1)
        if len(shape) < 2 or shape[1] % size(sequence) or not {*sequence}.isdisjoint(rows):
            sequence = ()
        looked_up = math.prod(shape) * size((shared[0],)) // size((*batch, *sequence))
        names = jax_axis_names(mesh)
        return TableLayout(
            jax_mesh(mesh),
            tuple(names[axis] for axis in rows),
            tuple(tuple(names[a] for a in axes) for axes in (batch, sequence) if axes),
            names[shared[0]],
            looked_up >= table.shape[0] * size((shared[0],)) // size(rows),
            functools.partial(torus.scatter, mesh=mesh, axis=shared[0], dim=0),
        )
    return None
