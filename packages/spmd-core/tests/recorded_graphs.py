"""Graphs of pending tensors, on which passes are tested: nothing is compiled."""

import torch

from spmd_core.graph.recorders import lock
from spmd_core.graph.stacks import stack_entry, unstack_entry
from spmd_core.graph.values import Spec
from spmd_core.program.ir import Graph
from spmd_core.program.planning import plan
from spmd_core.program.target import Replicated, Target
from spmd_core.recording.calls import record_own
from spmd_core.tensor.sharded_tensor import spec_of


def graph_of(*tensors: torch.Tensor) -> Graph:
    """What was recorded for pending tensors."""
    with lock:
        return Graph.of(plan([tensor._handle for tensor in tensors]).graph())


def stack_of(*rows: torch.Tensor) -> torch.Tensor:
    """The rows as one tensor, stacked by the operation for stacks."""
    return record_own(stack_entry(spec_of(rows[0]), len(rows)), rows)


def rows_of(stack: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rows of a tensor, taken by the operation for stacks."""
    row = Spec.contiguous(tuple(stack.shape[1:]), stack.dtype)
    return record_own(unstack_entry(row, len(stack)), (stack,))


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
