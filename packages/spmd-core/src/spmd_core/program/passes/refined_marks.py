"""Drops a mark that a later one refines, if nothing else reads the marked value.

Parameters are often marked twice before anything reads them: split by a plan of tensor parallelism,
and then by fsdp too. With both constraints, the partitioner would draw them in the first layout,
and cut them afterwards.
"""

from spmd_core.program.ir import Graph, Op, Rewriter
from spmd_core.program.mark_names import MARK_SHARDING
from spmd_core.program.target import Target
from spmd_core.sharding.sharding import Sharding


def refined_marks(graph: Graph, target: Target) -> Graph:
    """The graph without such marks."""
    dropped = _refined(graph)
    if not dropped:
        return graph
    rewriter = Rewriter(graph)
    for op in graph.ops:
        if op in dropped:
            (result,), (operand,) = op.results, op.operands
            rewriter.replace(result, rewriter.now(operand))
        else:
            rewriter.keep(op)
    return rewriter.graph()


def _refined(graph: Graph) -> set[Op]:
    """The marks whose readers all refine them."""
    kept = {value.producer for value in graph.outputs}
    candidates = {op for op in graph.ops if _is_mark(op) and op not in kept}
    read: set[Op] = set()
    for op in graph.ops:
        for operand in op.operands:
            mark = operand.op
            if mark not in candidates or mark is None:
                continue
            read.add(mark)
            if not _is_mark(op) or not _refines(op.entry.sharding, mark.entry.sharding):
                candidates.remove(mark)
    return read & candidates


def _is_mark(op: Op) -> bool:
    return op.entry.name == MARK_SHARDING and op.entry.along is None


def _refines(fine: Sharding | None, coarse: Sharding | None) -> bool:
    """Whether each device's block of the one is a part of its block of the other."""
    assert fine is not None and coarse is not None
    return fine.mesh == coarse.mesh and all(
        axes[: len(first)] == first for axes, first in zip(fine.dims, coarse.dims, strict=True)
    )
