"""Replicates all values of a program that the partitioner would make invalid otherwise."""

from typing import Any

import jax

from spmd_core.ops.registry import Context
from spmd_core.program.ir import Graph, InsertedEntry, Op, Ref, Rewriter
from spmd_core.program.target import Replicated, Target


def replicated_values(graph: Graph, target: Target) -> Graph:
    """The graph without marks, in which each value is constrained to be replicated."""
    if target.replicated_part is not Replicated.EVERYTHING:
        return graph
    rewriter = Rewriter(graph)

    def replicate(value: Ref, op: Op) -> None:
        if value.manual is None:
            entry = InsertedEntry("spmd::replicate", _replicated, (value.spec,))
            made = rewriter.add(entry, [rewriter.now(value)], op.source, manuals=(None,))
            rewriter.replace(value, Ref(made))

    for x in graph.inputs:
        if graph.ops:
            replicate(Ref(x), graph.ops[0])
    for op in graph.ops:
        if op.entry.sharding is not None and op.manual is None:
            rewriter.replace(Ref(op), rewriter.now(op.operands[0]))
            continue
        rewriter.keep(op)
        if not op.is_inserted:
            for value in op.results:
                replicate(value, op)
    return rewriter.graph()


def _replicated(context: Context, inputs: list[jax.Array], scalars: Any) -> list[jax.Array]:
    return [context.replicate_last_dims(inputs[0], inputs[0].ndim)]
