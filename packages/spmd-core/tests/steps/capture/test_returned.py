"""What captured steps return: new tensors, and no constants."""

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.errors import CaptureError


@pytest.mark.parametrize("cloned", [False, True])
def test_constants_that_are_returned(cloned):
    @spmd.compile(capture=True)
    def step(x):
        scale = torch.tensor([1.0, 2.0, 3.0], device="xla")
        return scale.clone() if cloned else scale, scale * x

    x = torch.ones(3).to("xla")
    if not cloned:
        with pytest.raises(CaptureError, match=r"return its clone\(\)"):
            step(x)
        return
    for _ in range(5):
        scale, product = step(x)
        scale.add_(1)
        assert scale.tolist() == [2.0, 3.0, 4.0] and product.tolist() == [1.0, 2.0, 3.0]
    assert step.replayed == 3


def test_a_parameter_that_a_step_makes():
    step = spmd.compile(lambda x: nn.Parameter(x * 2), capture=True)
    for _ in range(4):
        made = step(torch.ones(3).to("xla"))
        assert isinstance(made, nn.Parameter) and made.requires_grad
    assert step.replayed == 2


def test_what_is_returned_is_new_at_each_call():
    w = torch.full((3,), 5.0).to("xla").requires_grad_()

    @spmd.compile(capture=True)
    def step(x):
        w.grad = None
        (w * x).sum().backward()
        total = torch.zeros(3, device="xla")
        total += x
        return w.detach().clone(), torch.ones(3, device="xla"), total, w.grad, x.clone()

    kept = []
    for i in range(1, 7):
        results = step(torch.full((3,), float(i)).to("xla"))
        assert [r[0].item() for r in results] == [5.0, 1.0, i, i, i]
        kept.append(results[3])
        for r in (*results[:3], results[4]):
            r.add_(100)
    assert [grad[0].item() for grad in kept] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert w.tolist() == [5.0] * 3 and step.replayed == 4
