"""Finds what a CPU's program computes in the order of recording, so that operands are soon freed.

XLA's CPU compiler puts a value that only the end of the program reads, such as the gradient of a
weight, at the end too. The operands of all these gradients, which are the activations and their
gradients, then live until the end. So each product waits for the products before it whose results
are read late. On GPU and TPU the compiler orders for memory and for overlap with communication.
"""

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


def late_results(graph: Graph) -> dict[int, list[int]]:
    """For each product, the numbers of the values that have to be computed before it starts.

    Empty for a program without gradients.
    """
    if not any("backward" in node.entry.name for node in graph.nodes):
        return {}
    first_use: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for number in node.inputs:
            first_use.setdefault(number, position)
    waits: dict[int, list[int]] = {}
    made: list[int] = []  # by products and marks of gradients, and not waited for yet
    total = 0
    for position, node in enumerate(graph.nodes):
        is_product = node.entry.name in _PRODUCTS
        if is_product:
            waits[position] = [n for n in made if first_use.get(n, len(graph.nodes)) > position]
            made = []
        if is_product or node.entry.summed_over is not None:
            made += range(total, total + len(node.entry.outs))
        total += len(node.entry.outs)
    return waits
