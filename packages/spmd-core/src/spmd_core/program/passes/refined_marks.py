"""Drops a sharding constraint that a later one refines, if nothing else reads its result.

Parameters are often marked twice before anything reads them: first by a tensor parallel plan, then
by FSDP. With both constraints, the partitioner would compute initial values in the first layout,
and slice them afterwards.
"""

from spmd_core.program.ir import Graph, Op, Rewriter
from spmd_core.program.mark_names import MARK_SHARDING
from spmd_core.program.target import Target
from spmd_core.sharding.sharding import Sharding


def refined_marks(graph: Graph, target: Target) -> Graph:
    """The graph without these marks."""
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
    """The marks whose readers are all marks that refine them."""
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
    """Whether each device's shard under `fine` is a part of its shard under `coarse`.

    Not so where the finer mark has less to say: its axes come later, or it lets the partitioner
    split a dim that the other one closes.
    """
    assert fine is not None and coarse is not None
    if fine.priority > coarse.priority or not {*fine.open_dims} <= {*coarse.open_dims}:
        return False
    return fine.mesh == coarse.mesh and all(
        axes[: len(first)] == first for axes, first in zip(fine.dims, coarse.dims, strict=True)
    )
