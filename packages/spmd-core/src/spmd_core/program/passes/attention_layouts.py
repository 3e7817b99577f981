"""Chooses how mesh axes split each attention, because the partitioner cannot split its kernel.

The sequence is split if a mark of the query says so. The batch is split like the program's data.
All other axes split the heads, even if they split another dim before: devices along an axis that
splits nothing would repeat the same work. As for images, a layout that was guessed wrong costs a
resharding, and changes no value.
"""

import math
from collections.abc import Iterable

import jax

from spmd_core.ops.registry import AttentionLayout, Hint
from spmd_core.program.ir import Graph, Op, Ref
from spmd_core.program.target import Target


def attention_layouts(graph: Graph, target: Target) -> Graph:
    """The graph with the layout of each attention as its hint."""
    found = [op for op in graph.ops if op.entry.traits.query is not None]
    if not found or not target.is_split or not target.mesh.exists:
        return graph
    mesh = target.jax_mesh

    def rows_of(value: Ref) -> tuple[str, ...]:
        rank = len(value.spec.shape)
        if not isinstance(op := value.producer, Op):
            placed = op.leaf.placement.device_sharding
        else:
            sharding = op.entry.sharding
            if sharding is None or sharding.mesh.ids != graph.device_ids:
                return ()
            placed = target.named(sharding)
        spec = [*target.mesh(placed).spec, *(None,) * rank]
        axes = spec[rank - 2] or ()
        return (axes,) if isinstance(axes, str) else axes

    hints: dict[Op, Hint] = {}
    for op in found:
        at = op.entry.traits.query or 0
        query, key = (x.spec.shape for x in op.operands[at : at + 2])
        if op.operands[at].manual is not None or 0 in (*query, *key):
            continue
        split = rows_of(op.operands[at])
        rows = tuple(a for a in mesh.axis_names if a in split)
        has_batch = len(query) > 3 and query[0] > 1
        batch = tuple(a for a in target.batch_axes if has_batch and a not in rows)
        rest = [a for a in mesh.axis_names if a not in (*batch, *rows)]
        heads = (query[-3], key[-3]) if len(query) > 2 else (1, 1)
        hints[op] = AttentionLayout(mesh, batch, _splitting_heads(rest, mesh, *heads), rows)
    return graph.with_hints(hints)


def _splitting_heads(
    axes: Iterable[str], mesh: jax.sharding.Mesh, heads: int, kv_heads: int
) -> tuple[str, ...]:
    """The axes that split the heads evenly, if the heads of keys and values may be repeated."""
    chosen, count = [], 1
    for axis in axes:
        larger = count * mesh.shape[axis]
        if mesh.shape[axis] > 1 and heads % math.lcm(kv_heads, larger) == 0:
            chosen.append(axis)
            count = larger
    return tuple(chosen)
