"""Delays copies from host memory until the operation that was recorded just before them.

XLA would otherwise copy each offloaded value back as soon as it is in host memory.
"""

from spmd_core.ops.host_memory import FROM_HOST
from spmd_core.program.ir import Graph, Ref, Rewriter
from spmd_core.program.target import Target


def late_copies(graph: Graph, target: Target) -> Graph:
    """The graph with a barrier before each such copy; unchanged for CPUs, which copy nothing."""
    if target.platform == "cpu" or not any(op.entry.name == FROM_HOST for op in graph.ops):
        return graph
    rewriter = Rewriter(graph)
    made: list[Ref] = []
    for op in graph.ops:
        operands = None
        if op.entry.name == FROM_HOST:
            (copied,) = (rewriter.now(x) for x in op.operands)
            last = next((x for x in reversed(made) if rewriter.now(x) != copied), None)
            if last is not None:
                # Later operations read the barrier's result: XLA drops results that nothing reads.
                copied, after = rewriter.wait([copied, rewriter.now(last)], op.source)
                rewriter.replace(last, after)
                operands = [copied]
        rewriter.keep(op, operands)
        made += [x for x in op.results if x.manual is None]
    return rewriter.graph()
