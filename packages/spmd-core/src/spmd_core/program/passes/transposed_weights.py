"""Has products read a split weight in the order of memory, and not its transpose, on CPUs.

The gradient of the input of `x @ weight` is `grad @ weight.t()`. If mesh axes split the weight, the
partitioner gathers its transpose, and XLA's CPU backend, which lays out each value by its shape,
then transposes the whole weight on each device, in each step. This pass has the product contract
the weight's other dim, so that the weight is gathered as it lies. On one device, and on platforms
that choose layouts after they have seen all readers, XLA does so itself.

A weight that another product of the same graph reads is left alone: XLA would make one gather of
both, and with FSDP each device would keep all weights from forward to backward. Loops over layers
have forward and backward in graphs of their own.
"""

from collections import Counter

from spmd_core.ops.kernels.traits import Elements
from spmd_core.ops.registry import TransposedRight
from spmd_core.program.ir import Graph, Op, Ref, Rewriter
from spmd_core.program.target import Target


def transposed_weights(graph: Graph, target: Target) -> Graph:
    """The graph in which these products read what was transposed."""
    if target.platform != "cpu" or not target.is_split:
        return graph
    made = {op: value for op in graph.ops if (value := _transposed(op)) is not None}
    products = (op for op in graph.ops if op.entry.traits.is_product)
    read = Counter(weight for op in products for weight in set(map(_weight, op.operands)))
    found = {op: value for op, value in made.items() if read[_weight(value)] == 1}
    if not found:
        return graph
    rewriter = Rewriter(graph)
    for op in graph.ops:
        operands = None
        if op in found:
            operands = [rewriter.now(x) for x in op.operands]
            operands[op.entry.traits.right or 0] = rewriter.now(found[op])
        rewriter.keep(op, operands, hint=TransposedRight() if op in found else None)
    return rewriter.graph()


def _weight(value: Ref) -> Ref:
    """What a value has its elements from, in whichever order and dtype."""
    while value.op is not None:
        source = value.op.source_of_elements(Elements.PERMUTED)
        if source is None:
            break
        value = source
    return value


def _transposed(op: Op) -> Ref | None:
    """The matrix whose transpose is the second one of a product; None for any other operation."""
    right = op.entry.traits.right
    if right is None or op.is_inserted or op.manual is not None:
        return None
    view = op.operands[right].op
    if view is None or view.is_inserted or view.is_cast:
        return None
    source = view.source_of_elements(Elements.PERMUTED)
    if source is None or len(source.spec.shape) != 2:
        return None
    # Others, such as `flip`, do not reverse the strides.
    given, made = source.spec, view.entry.spec
    is_transposed = (given.shape, given.strides) == (made.shape[::-1], made.strides[::-1])
    return source if is_transposed else None
