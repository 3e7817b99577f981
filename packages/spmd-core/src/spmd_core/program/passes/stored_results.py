"""Has CPU programs read their own results from memory, where other operations read them, too.

XLA's CPU backend would compute such a value again inside of each loop that reads it: the new value
of a parameter would compute both of its new moments again, from the gradient and the old ones. A
barrier makes a value of its own of a result, which has to be in memory in any case.
"""

from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.ir import Graph, Op, Ref, Rewriter
from spmd_core.program.target import Target


def stored_results(graph: Graph, target: Target) -> Graph:
    """The graph with barriers behind these values; unchanged if there are none."""
    if target.platform != "cpu":
        return graph
    users = graph.users()
    stored = {value for value in graph.outputs if _is_computed(value) and users.get(value)}
    if not stored:
        return graph
    rewriter = Rewriter(graph)
    for op in graph.ops:
        now = rewriter.keep(op)
        if found := [value for value in op.results if value in stored]:
            waited = rewriter.wait([Ref(now, value.result) for value in found], op.source)
            for value, by in zip(found, waited):
                rewriter.replace(value, by)
    return rewriter.graph()


def _is_computed(value: Ref) -> bool:
    """Whether XLA may compute a value again: one of several elements, and of no product."""
    op: Op | None = value.op
    if op is None or op.manual is not None or value.spec.num_elements == 1:
        return False
    traits = op.entry.traits
    return traits.elements is Elements.NEW and not traits.is_product
