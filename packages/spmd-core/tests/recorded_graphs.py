"""Graphs of pending tensors, on which passes are tested: nothing is compiled."""

import torch

from spmd_core.graph.recorders import lock
from spmd_core.program.ir import Graph
from spmd_core.program.planning import plan
from spmd_core.program.target import Replicated, Target


def graph_of(*tensors: torch.Tensor) -> Graph:
    """What was recorded for pending tensors."""
    with lock:
        return Graph.of(plan([tensor._handle for tensor in tensors]).graph())


def target_of(
    graph: Graph, platform: str = "cpu", *, replicated_part: Replicated = Replicated.NOTHING
) -> Target:
    """What a graph is lowered for."""
    return Target.of(graph, replicated_part=replicated_part, platform=platform)


def rewritten(
    rewrite,
    graph: Graph,
    platform: str = "cpu",
    *,
    replicated_part: Replicated = Replicated.NOTHING,
):
    """A graph behind one pass, checked."""
    made = rewrite(graph, target_of(graph, platform, replicated_part=replicated_part))
    made.check()
    return made


def names(graph: Graph) -> list[str]:
    """The names of a graph's operations, in order, without their namespaces."""
    return [op.entry.name.partition("::")[2] for op in graph.ops]
