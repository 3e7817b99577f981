"""Finds how mesh axes may split attentions, whose kernels the partitioner cannot split.

The sequences are split where the query is marked so. The batch is split as the program's data is.
The other axes split the heads, whatever they split before: else devices along them would compute
the same. As for images, a layout that was guessed wrong costs a resharding, and no value.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import jax

from spmd_core.ops.registry import AttentionLayout
from spmd_core.program import split_dims
from spmd_core.program.program_graph import Graph
from spmd_core.runtime.jax_sharding import CommonMesh, named_sharding

# Attentions, with the position of the query among the tensors that they take; the key's is next.
_QUERY = {"spmd::attention": 0, "spmd::attention.lse": 0, "spmd::attention_backward": 1}


def find(
    graph: Graph, common_mesh: CommonMesh, is_local: Callable[[int], bool]
) -> Mapping[int, AttentionLayout]:
    """The layout of each attention, by the node's position.

    Args:
        graph: the recorded operations.
        common_mesh: of the program.
        is_local: whether the value of a number is local to a manual region.
    """
    found = [(i, node) for i, node in enumerate(graph.nodes) if node.entry.name in _QUERY]
    if not found or graph.growth is not None or len(graph.device_ids) == 1:
        return {}
    if not common_mesh.exists:
        return {}
    mesh = common_mesh.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    of_batch = split_dims.batch_axes(graph, common_mesh)
    made_by = [(node, result) for node in graph.nodes for result in range(len(node.entry.outs))]

    def rows_of(number: int, shape: tuple[int, ...]) -> tuple[str, ...]:
        if number < 0:
            placed = graph.leaves[-number - 1].placement.device_sharding
        else:
            sharding = made_by[number][0].entry.sharding
            if sharding is None or sharding.mesh.ids != graph.device_ids:
                return ()
            placed = named_sharding(sharding, graph.device_ids)
        spec = [*common_mesh(placed).spec, *(None,) * len(shape)]
        axes = spec[len(shape) - 2] or ()
        return (axes,) if isinstance(axes, str) else axes

    def shape_of(number: int) -> tuple[int, ...]:
        if number < 0:
            return graph.leaves[-number - 1].spec.shape
        node, result = made_by[number]
        return node.entry.outs[result].shape

    layouts = {}
    for position, node in found:
        at = _QUERY[node.entry.name]
        number, of_key = node.inputs[at : at + 2]
        query, key = shape_of(number), shape_of(of_key)
        if is_local(number) or 0 in (*query, *key):
            continue
        split = rows_of(number, query)
        rows = tuple(a for a in mesh.axis_names if a in split)
        has_batch = len(query) > 3 and query[0] > 1
        batch = tuple(a for a in of_batch if has_batch and a not in rows)
        rest = [a for a in mesh.axis_names if a not in (*batch, *rows)]
        heads = (query[-3], key[-3]) if len(query) > 2 else (1, 1)
        layouts[position] = AttentionLayout(mesh, batch, _splitting_heads(rest, mesh, *heads), rows)
    return layouts


def _splitting_heads(
    axes: Iterable[str], mesh: jax.sharding.Mesh, heads: int, kv_heads: int
) -> tuple[str, ...]:
    """Those axes that split the heads into equal parts, where heads of keys may be repeated."""
    chosen, count = [], 1
    for axis in axes:
        larger = count * mesh.shape[axis]
        if mesh.shape[axis] > 1 and heads % math.lcm(kv_heads, larger) == 0:
            chosen.append(axis)
            count = larger
    return tuple(chosen)
