"""Finds what a CPU's program computes in the order of recording, so that operands are soon freed.

XLA's CPU compiler puts a value that only the end of the program reads, such as the gradient of a
weight, at the end too. The operands of all these gradients, which are the activations and their
gradients, then live until the end. So each product waits for the products before it, and for the
sums of such products, whose results are read late. On GPU and TPU the compiler orders for memory
and for overlap with communication.
"""

from dataclasses import dataclass

from spmd_core.program.gradient_plans import MARK, MARK_AT_ONCE
from spmd_core.program.program_graph import Graph

# Operations that read whole arrays anyway, so that a barrier before them hinders no fusion.
_PRODUCTS = frozenset(
    (
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
        *("aten::linear", "aten::linear_backward"),
        *("aten::convolution", "aten::convolution_backward"),
        *("spmd::attention.lse", "spmd::attention_backward"),
        "aten::embedding_dense_backward",
    )
)


# They give the values of one operand in another shape, order or dtype.
_MOVES = frozenset(
    (
        *("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::clone", "aten::_to_copy"),
        *("aten::t", "aten::transpose.int", "aten::permute"),
    )
)


@dataclass(frozen=True)
class Wait:
    """What a product waits for.

    Attributes:
        operands: the positions of the operands that it reads after that.
        values: the numbers of the values that are computed before.
    """

    operands: tuple[int, ...]
    values: tuple[int, ...]


def late_results(graph: Graph) -> dict[int, Wait]:
    """The products that wait, by their positions. Empty for a program without gradients.

    Data and what is marked is read at once: a gather of it may be shared with an earlier product.
    """
    if not any("backward" in node.entry.name for node in graph.nodes):
        return {}
    first_use: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for number in node.inputs:
            first_use.setdefault(number, position)
    made_by = [node for node in graph.nodes for _ in node.entry.outs]

    def may_be_shared(number: int) -> bool:
        while number >= 0 and made_by[number].entry.name in _MOVES:
            number = made_by[number].inputs[0]
        return number < 0 or made_by[number].entry.sharding is not None

    waits: dict[int, Wait] = {}
    made: list[int] = []  # by products, their sums and marks of gradients; not waited for yet
    summable: set[int] = set()  # by products and their sums
    total = 0
    for position, node in enumerate(graph.nodes):
        is_product = node.entry.name in _PRODUCTS
        if is_product:
            late = [n for n in made if first_use.get(n, len(graph.nodes)) > position]
            operands = [i for i, number in enumerate(node.inputs) if not may_be_shared(number)]
            if operands:
                waits[position], made = Wait(tuple(operands), tuple(late)), []
        results = range(total, total + len(node.entry.outs))
        # A weight's gradients of several microbatches, for instance, which are added up.
        is_sum = node.entry.name == "aten::add.Tensor" and summable.issuperset(node.inputs)
        if is_product or is_sum:
            summable.update(results)
        if is_product or is_sum or node.entry.name in (MARK, MARK_AT_ONCE):
            made += results
        total += len(node.entry.outs)
    return waits
