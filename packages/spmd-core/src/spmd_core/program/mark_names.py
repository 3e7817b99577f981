"""The names of marks, which recording gives to operations, and by which passes find them."""

from spmd_core.graph.values import Entry

# A mark of the complete sharding, one along some axes of a mesh, and one of a sum over features
# that some axes split.
MARK_SHARDING, MARK_ALONG, MARK_SUM = "spmd::mark_sharding", "spmd::mark_along", "spmd::mark_sum"

# Marks of gradients. A gradient with the second name is reduced at once, even if others are added.
MARK, MARK_AT_ONCE = "spmd::mark_gradient", "spmd::mark_gradient.at_once"


def is_plain_addition(entry: Entry) -> bool:
    """Whether an operation adds two tensors, without a factor."""
    if entry.name != "aten::add.Tensor":
        return False
    return not entry.number_kinds and (entry.arguments or {}).get("alpha", 1) == 1
