"""The names of marks, which operations and modules record and which passes look for."""

from spmd_core.graph.values import Entry

# Of a whole layout, along some axes of a mesh, and of a sum over the devices along them.
MARK_SHARDING, MARK_ALONG, MARK_SUM = "spmd::mark_sharding", "spmd::mark_along", "spmd::mark_sum"

# Those of gradients; those of the second name are reduced at once, also where they are added up.
MARK, MARK_AT_ONCE = "spmd::mark_gradient", "spmd::mark_gradient.at_once"


def is_plain_addition(entry: Entry) -> bool:
    """Whether an operation adds two tensors, without a factor."""
    if entry.name != "aten::add.Tensor":
        return False
    return not entry.number_kinds and (entry.arguments or {}).get("alpha", 1) == 1
