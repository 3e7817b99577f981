"""Tests spmd_core.modules.layer_call: what a layer transforms, and how calls differ."""

import pytest
import torch
from torch import nn

from spmd_core.modules.layer_call import LayerCall


class Layer(nn.Module):
    def forward(self, hidden, mask=None, *, scale=1, pairs=()):
        return hidden


def call(*args, **kwargs):
    return LayerCall.of(Layer(), args, kwargs)


def test_what_is_transformed():
    x, y = torch.ones(2, device="xla"), torch.zeros(2, device="xla")
    first = call(x, y, scale=2)
    assert first.x is x and first.name is None and first.with_x(y) == ((y, y), {"scale": 2})
    named = call(mask=y, hidden=(x, None))
    assert named.x == (x, None) and named.with_x(y) == ((), {"mask": y, "hidden": y})
    for nothing in (call(torch.ones(2)), call(2), call(), call(mask=x), call((x, torch.ones(1)))):
        assert nothing is None


@pytest.mark.parametrize(
    ("other", "where"),
    [
        ({"scale": 1.0}, "scale"),
        ({"scale": 2}, "scale"),
        ({"pairs": ([], {"a": 1})}, "pairs[1]['a']"),
        ({"pairs": ([], {})}, "pairs[1]"),
        ({"mask": torch.ones(2)}, "mask"),
        ({}, None),
    ],
)
def test_differences(other, where):
    x, mask = torch.ones(2, device="xla"), torch.ones(2)
    options = {"mask": mask, "scale": 1, "pairs": ([], {"a": 2})}
    assert call(x, **options).difference(call(x * 2, **{**options, **other})) == where


def test_writes_and_objects_that_may_change():
    x, mask = torch.ones(2, device="xla"), torch.ones(2, device="xla")
    before = call(x, mask)
    assert before.difference(call(x, mask)) is None and before.unknown is None
    mask.add_(1)
    assert before.difference(call(x, mask)) == "mask, which was written to in between"
    assert call(x, scale=[print, torch.float32, nn.Tanh()]).unknown is None
    assert call(x, pairs=[object()]).unknown == "pairs[0], a object"
