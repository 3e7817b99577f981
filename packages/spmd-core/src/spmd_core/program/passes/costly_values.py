"""Keeps sines and cosines that larger values read, which XLA's CPU backend would compute again.

XLA counts functions of real numbers as cheap, and fuses them into each reader, whatever its size:
the cosines of rotary positions, (1, tokens, dim), would be computed for each sequence and head of
queries and keys, in each layer, forward and backward. A barrier makes a value of its own of them.
"""

from spmd_core.program.ir import Graph, Op, Ref, Rewriter
from spmd_core.program.target import Target

# Those that XLA's emitter calls a library function for, element by element.
_COSTLY = frozenset(f"aten::{name}" for name in ("sin", "cos", "tan"))


def costly_values(graph: Graph, target: Target) -> Graph:
    """The graph with barriers behind these values."""
    found = [op for op in graph.ops if op.entry.name in _COSTLY and op.manual is None]
    if target.platform != "cpu" or not found:
        return graph
    users = graph.users()
    kept = {op for op in found if _is_read_by_larger(Ref(op), users)}
    if not kept:
        return graph
    rewriter = Rewriter(graph)
    for op in graph.ops:
        now = rewriter.keep(op)
        if op in kept:
            rewriter.replace(Ref(op), rewriter.wait([Ref(now)], op.source)[0])
    return rewriter.graph()


def _is_read_by_larger(value: Ref, users: dict[Ref, list[Op]]) -> bool:
    """Whether a larger value is computed from this one, directly or over values of its size."""
    size, seen, pending = value.spec.num_elements, {value}, [value]
    while pending:
        for op in users.get(pending.pop(), ()):
            if op.entry.traits.is_product:  # it reads values that are there
                continue
            for result in op.results:
                if result.spec.num_elements > size:
                    return True
                if result.spec.num_elements == size and result not in seen:
                    seen.add(result)
                    pending.append(result)
    return False
