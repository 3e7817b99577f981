"""Keeps all values whole on each device, in a program that the partitioner makes invalid."""

from typing import Any

import jax

from spmd_core.ops.registry import Context
from spmd_core.program.ir import Graph, InsertedEntry, Op, Ref, Rewriter
from spmd_core.program.target import Target, Whole


def whole_values(graph: Graph, target: Target) -> Graph:
    """The graph without marks, in which each value is constrained to be whole."""
    if target.whole is not Whole.EVERYTHING:
        return graph
    rewriter = Rewriter(graph)

    def keep_whole(value: Ref, op: Op) -> None:
        if value.manual is None:
            entry = InsertedEntry("spmd::keep_whole", _whole, (value.spec,))
            whole = rewriter.add(entry, [rewriter.now(value)], op.source, manuals=(None,))
            rewriter.replace(value, Ref(whole))

    for x in graph.inputs:
        if graph.ops:
            keep_whole(Ref(x), graph.ops[0])
    for op in graph.ops:
        if op.entry.sharding is not None and op.manual is None:
            rewriter.replace(Ref(op), rewriter.now(op.operands[0]))
            continue
        rewriter.keep(op)
        if not op.is_inserted:
            for value in op.results:
                keep_whole(value, op)
    return rewriter.graph()


def _whole(context: Context, inputs: list[jax.Array], scalars: Any) -> list[jax.Array]:
    return [context.keep_whole(inputs[0], inputs[0].ndim)]
