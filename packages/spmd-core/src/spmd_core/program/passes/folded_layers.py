"""Makes loops of runs of operations that are repeated, such as a model's layers.

A model's layers are recorded one after the other: a program of 24 layers has 24 times the
operations of one, and takes as much longer to compile. This pass finds such runs, in forward and in
backward (`repeated_runs`), and computes each by one operation, a loop whose body has the operations
of one layer (`repeated_loops`). It does so if what differs between the layers are rows of stacks;
`layer_stacks` has a program's parameters lie so. Whatever is not exactly alike stays as it is.

The numbers are the same: each layer has its own scalar inputs and seeds.
"""

from collections.abc import Callable
from typing import NamedTuple

from spmd_core.program.chosen_runs import chosen, why_none
from spmd_core.program.ir import Graph, Ref, Rewriter
from spmd_core.program.repeated_loops import Loops
from spmd_core.program.target import Target

# The bytes of values that are stacked for a loop at each run of a program.
_MOST_COPIED = 2**16


def folded_layers(graph: Graph, target: Target) -> Graph:
    """The graph with loops in place of runs; unchanged if there are none.

    A program for growing sizes stays as it is: its operations were evaluated one by one.
    """
    recorded = graph.recorded
    if not recorded.fold_layers or recorded.growth is not None:
        return graph
    return with_loops(graph, are_small).graph


def why_unfolded(graph: Graph) -> str:
    """Why `folded_layers` makes no loop of this recorded graph; empty if it was not asked to."""
    recorded = graph.recorded
    if not recorded.fold_layers:
        return ""
    if recorded.growth is not None:
        return "a program for growing sizes stays as it is."
    return why_none(chosen(graph, are_small))


class Folded(NamedTuple):
    """A graph with loops.

    Attributes:
        graph: the graph.
        stacked: the values that are stacked for loops.
        rows: of the recorded graph, values that loops compute and others read, one in each
            iteration, in the order of the rows of the loop's results.
    """

    graph: Graph
    stacked: list[tuple[Ref, ...]]
    rows: list[tuple[Ref, ...]]


def with_loops(graph: Graph, may_be_stacked: Callable[[tuple[Ref, ...]], bool]) -> Folded:
    """The graph with loops in place of runs, also of those that are repeated themselves.

    Args:
        graph: the graph.
        may_be_stacked: whether these values, one for each iteration of a loop, may be stacked.
    """
    stacked: list[tuple[Ref, ...]] = []
    rows: list[tuple[Ref, ...]] | None = None
    while True:
        runs = chosen(graph, may_be_stacked)
        if not runs.all:
            return Folded(graph, stacked, rows or [])
        rewriter = Rewriter(graph)
        loops = Loops(rewriter, runs)
        last = {runs.op(run, run.high - 1, run.period - 1): run for run in runs.all}
        for op in graph.ops:
            if loops.is_kept(op):
                rewriter.keep(op)
            if op in last:
                loops.add(last[op])
        graph = rewriter.graph()
        stacked += loops.stacked_values
        rows = loops.rows if rows is None else rows  # of other walks, they are not recorded values


def are_small(values: tuple[Ref, ...]) -> bool:
    """Whether values may be stacked at each run of a program."""
    return sum(x.spec.num_bytes for x in values) <= _MOST_COPIED
