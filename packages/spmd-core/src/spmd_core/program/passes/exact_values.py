"""Stores the values of a program that are compared exactly, which have to be computed once.

XLA computes a value anew in each loop that reads it, and rounds it differently there: a multiply
and an add may be one operation in one loop and two in another. So of a computed tensor no element
might equal its maximum, and a gradient that looks for it would be 0 / 0; eager torch stores every
tensor. The values found here are stored too.
"""

import math

from spmd_core.ops.kernels.blocks import apart
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.ir import Graph, Op, Ref, Rewriter, behind_barriers, inserted
from spmd_core.program.target import Target

# Results are elements of an operand, or their positions. Gradients and users look for them by `==`.
_CHOICES = frozenset(
    f"aten::{name}"
    for name in (
        *("amax", "amin", "aminmax", "max", "min", "argmax", "argmin", "cummax", "cummin"),
        *("sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode"),
        *("scatter_reduce", "index_reduce", "segment_reduce"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d"),
        *("adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d"),
        *("maximum", "minimum", "fmax", "fmin", "quantile", "nanquantile"),
    )
)
_NORMS = {"aten::norm": "p", "aten::linalg_vector_norm": "ord"}  # with their order's argument
_COMPARISONS = frozenset(
    f"aten::{name}"
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "equal", "isin", "unique_dim", "_unique2"),
        *("unique_consecutive", "searchsorted", "bucketize", "_cdist_forward", "_pdist_forward"),
    )
)


def exact_values(graph: Graph, target: Target) -> Graph:
    """The graph in which such values are stored.

    They are floating-point or complex results of operations that choose among them or compare two
    tensors, also by way of views and copies.
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
        value = behind_barriers(pending.pop())
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
    name = _operation(op.entry.name)
    if name in _NORMS:
        order = (op.entry.arguments or {}).get(_NORMS[name])
        return isinstance(order, float) and math.isinf(order)
    return name in _CHOICES or (name in _COMPARISONS and len(op.operands) > 1)


def _operation(name: str) -> str:
    """The operation without its overload."""
    return name.partition(".")[0]
