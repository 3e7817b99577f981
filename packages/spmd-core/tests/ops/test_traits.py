"""What an operation's block says of it is so; the oracle is eager torch on the CPU."""

import pytest
import torch

from spmd_core.ops import registry
from spmd_core.ops.kernels.traits import Elements

X = torch.randperm(24).reshape(4, 1, 6)  # all its elements differ
SQUARE = X.reshape(1, 4, 6)
POSITIONS = torch.tensor([3, 0, 3])
# The arguments of a call by operation, without its overload.
CALLS = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_copy"), (X, [3, 8])),
    **dict.fromkeys(("_reshape_alias", "as_strided"), (X, [3, 8], [8, 1])),
    **dict.fromkeys(("squeeze", "alias", "detach", "lift", "lift_fresh", "clone"), (X,)),
    **dict.fromkeys(("_to_copy", "unbind.int"), (X,)),
    **dict.fromkeys(("squeeze.dim", "unsqueeze"), (X, 1)),
    "squeeze.dims": (X, [1]),
    "expand": (X, [4, 5, 6]),
    "t": (X[:, 0],),
    "transpose.int": (X, 0, 2),
    "permute": (X, [2, 0, 1]),
    "select.int": (X, 0, 2),
    "slice.Tensor": (X, 0, 1, 3),
    "narrow_copy": (X, 0, 1, 2),
    **dict.fromkeys(("split.Tensor", "unsafe_split.Tensor"), (X, 3)),
    **dict.fromkeys(("split_with_sizes", "unsafe_split_with_sizes"), (X, [1, 3])),
    "diagonal": (X, 0, 0, 2),
    "unfold": (X, 2, 3, 2),
    **dict.fromkeys(("cat", "stack", "_stack"), ([X, X + 24],)),
    "where.self": (X > 5, X, X + 24),
    "repeat": (X, [2, 1, 3]),
    "roll": (X, [1], [2]),
    "flip": (X, [0, 2]),
    "rot90": (X, 1, [0, 2]),
    "channel_shuffle": (SQUARE.reshape(1, 4, 2, 3), 2),
    "pixel_shuffle": (SQUARE.reshape(4, 2, 3), 2),
    "copy": (torch.zeros(2, 4, 1, 6, dtype=X.dtype), X),
    **dict.fromkeys(("index.Tensor", "_unsafe_index.Tensor"), (X, [POSITIONS])),
    "index_select": (X, 2, POSITIONS),
    "gather": (X, 2, POSITIONS.reshape(3, 1, 1)),
    "take": (X, POSITIONS),
    "embedding": (X[:, 0].float(), POSITIONS),
}
PASSING = [x for x in registry.registered() if x.traits.elements is not Elements.NEW]


def operation(overload: torch._ops.OpOverload) -> str:
    """Its name in the table: those of copies of views are their views'."""
    name = overload.name().removeprefix("aten::").removesuffix("_copy")
    name = name.replace("_copy.", ".")
    return name if name in CALLS else overload.name().removeprefix("aten::")


@pytest.mark.one_device
@pytest.mark.parametrize("lowering", PASSING, ids=lambda each: each.overload.name())
def test_results_have_the_elements_that_it_says(lowering):
    arguments = CALLS[operation(lowering.overload)]
    results = lowering.overload(*arguments)
    given = [x for a in arguments for x in (a if isinstance(a, list) else [a])]
    operands = [x for x in given if isinstance(x, torch.Tensor)]
    elements, source = lowering.traits.elements, operands[lowering.traits.source]
    if elements is Elements.OF_ALL:
        source = torch.cat([x.flatten() for x in operands])
    for result in results if isinstance(results, (tuple, list)) else [results]:
        mine, whole = result.flatten(), source.flatten()
        assert {*mine.tolist()} <= {*whole.tolist()}
        if elements <= Elements.REPEATED:
            assert {*mine.tolist()} == {*whole.tolist()}
        if elements <= Elements.PERMUTED:
            assert mine.numel() == whole.numel()
        if elements <= Elements.RESHAPED:
            assert torch.equal(mine, whole)
        if elements is Elements.SAME:
            assert result.shape == source.shape
