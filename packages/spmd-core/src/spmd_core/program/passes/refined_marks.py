"""Finds marks that further marks refine, and that nothing else reads: they constrain nothing.

Parameters are often marked twice before anything reads them: split by a plan of tensor parallelism,
and then by fsdp too. With both constraints, the partitioner would draw them in the first layout,
and cut them afterwards.
"""

from spmd_core.program.gradient_plans import MARK_SHARDING
from spmd_core.program.program_graph import Graph, Node
from spmd_core.sharding.sharding import Sharding


def find(graph: Graph) -> frozenset[int]:
    """The positions of such marks."""
    kept = {output.value for output in graph.outputs}
    position_of = [i for i, node in enumerate(graph.nodes) for _ in node.entry.outs]
    candidates = {
        number: graph.nodes[i]
        for number, i in enumerate(position_of)
        if _is_mark(graph.nodes[i]) and number not in kept
    }
    read = set()
    for node in graph.nodes:
        for number in node.inputs:
            mark = candidates.get(number)
            if mark is None:
                continue
            read.add(number)
            if not _is_mark(node) or not _refines(node.entry.sharding, mark.entry.sharding):
                del candidates[number]
    return frozenset(position_of[number] for number in read & candidates.keys())


def _is_mark(node: Node) -> bool:
    return node.entry.name == MARK_SHARDING and node.entry.along is None


def _refines(fine: Sharding | None, coarse: Sharding | None) -> bool:
    """Whether each device's block of the one is a part of its block of the other."""
    assert fine is not None and coarse is not None
    return fine.mesh == coarse.mesh and all(
        axes[: len(first)] == first for axes, first in zip(fine.dims, coarse.dims, strict=True)
    )
