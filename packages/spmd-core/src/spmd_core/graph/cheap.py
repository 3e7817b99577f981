"""Operations whose results backward computes again, where loops go over layers.

A loop writes what backward reads into stacks, which takes memory for all layers, and the time of
two copies. Values of these operations are computed again from operands that are kept in any case:
an activation function, of which backward reads both what it gets and what it returns, and products
of elements, as of a gate.
"""

from spmd_core.graph.values import Entry

_CHEAP = frozenset({"aten::gelu", "aten::silu", "aten::mul.Tensor"})


def is_cheap(entry: Entry) -> bool:
    """Whether a result takes less to compute again than to keep."""
    return entry.name in _CHEAP
