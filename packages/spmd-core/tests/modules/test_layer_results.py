"""Tests spmd_core.modules.layer_results: what layers return, split, joined and one by one."""

import pytest
import torch
from torch import nn

from spmd_core.modules.layer_results import LayerResults


def test_results():
    x, bias = torch.ones(2, device="xla"), torch.zeros(3, device="xla")
    results = LayerResults([bias])
    for returned in (x * 2, (x * 2,), (x * 2, None, bias, [x])):
        new, stacked = results.split(x, returned, nn.Tanh())
        first = returned[0] if isinstance(returned, tuple) else returned
        assert new is first
        stacks = [None if t is None else torch.stack([t, t * 3]) for t in stacked]
        joined, one = results.joined(x, stacks, 2), results.one(x, stacks, 1)
        if not isinstance(returned, tuple):
            assert joined is one is x
            continue
        assert len(joined) == len(one) == len(returned) and joined[0] is one[0] is x
    assert joined[1] is one[1] is None and one[2] is bias and joined[2].shape == (2, 3)
    assert joined[3][0].shape == (2, 2) and one[3][0].tolist() == [3, 3]


def test_other_structures():
    x = torch.ones(2, device="xla")
    nested, _ = LayerResults([]).split((x, {"a": x}), ((x, {"a": x * 2}), x), nn.Tanh())
    assert nested[1]["a"].tolist() == [2, 2]
    for returned, message in (
        ([x], "has the structure of what it gets"),
        ((x[:1], x), r"has the shapes and dtypes .*got float32\[1\] for float32\[2\]"),
        ((x, "name"), "behind x is stacked.*got str from a Tanh"),
    ):
        with pytest.raises(TypeError, match=message):
            LayerResults([]).split(x, returned, nn.Tanh())
