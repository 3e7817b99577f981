"""Materialises values that are compared exactly, so that they are computed only once.

XLA recomputes a value in each fusion that reads it, and may round it differently there: a multiply
and an add are fused into one rounding in one loop and not in another. Then no element of a computed
tensor might equal its maximum, and a gradient that looks for the maximum would be 0 / 0. Eager
torch stores every tensor; this pass stores those for which it matters.
"""

import math

from spmd_core.ops.kernels.blocks import apart
from spmd_core.ops.kernels.traits import Compared, Elements
from spmd_core.program.ir import Graph, Op, Ref, Rewriter, before_barriers, inserted
from spmd_core.program.target import Target


def exact_values(graph: Graph, target: Target) -> Graph:
    """The graph in which such values are stored.

    They are floating-point or complex values that an operation compares with each other or with
    another tensor, directly or by way of views and copies.
    """
    stored = _stored(graph)
    if not stored:
        return graph
    rewriter = Rewriter(graph)
    for op in graph.ops:
        rewriter.keep(op)
        for value in op.results:
            if value in stored:
                entry = inserted("spmd::store", lambda inputs: apart(inputs[0]), value.spec)
                now = rewriter.now(value)
                made = rewriter.add(entry, [now], op.source, manuals=(value.manual,))
                rewriter.replace(value, Ref(made))
    return rewriter.graph()


def _stored(graph: Graph) -> set[Ref]:
    found: set[Ref] = set()
    seen: set[Ref] = set()
    pending = [x for op in graph.ops if _is_exact(op) for x in op.operands]
    while pending:
        value = before_barriers(pending.pop())
        if value.op is None or value in seen:
            continue
        seen.add(value)
        dtype = value.spec.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            continue
        source = value.op.source_of_elements(Elements.CHOSEN)
        if value.op.entry.traits.elements is Elements.OF_ALL:
            pending.extend(value.op.operands)
        elif source is not None:
            pending.append(source)
        else:
            found.add(value)
    return found


def _is_exact(op: Op) -> bool:
    compared = op.entry.traits.compared
    if compared is Compared.OPERANDS:
        return len(op.operands) > 1
    if compared is Compared.ORDER:
        given = op.entry.arguments or {}
        order = given.get("ord", given.get("p"))
        return isinstance(order, float) and math.isinf(order)
    return compared is Compared.ELEMENTS
