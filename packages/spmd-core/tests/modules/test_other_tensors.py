"""Tests spmd_core.modules.other_tensors."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spmd_core.modules.other_tensors import having


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_modules(make):
    module = nn.Sequential(make(3, 4, num_layers=2))
    other = nn.Sequential(make(3, 4, num_layers=2))
    x = torch.randn(5, 2, 3)
    before = module(x)[0]
    weights = [*module[0]._flat_weights]
    tensors = {name: p.detach().requires_grad_() for name, p in other.named_parameters()}
    with having(module, tensors) as assigned:
        result = module(x)[0]
        assert not assigned()
    assert torch.equal(result, other(x)[0])
    result.sum().backward()
    assert all(t.grad is not None for t in tensors.values())
    assert all(a is b for a, b in zip(module[0]._flat_weights, weights, strict=True))
    assert torch.equal(module(x)[0], before)


def test_buffers_that_forward_assigns():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.linear = nn.Linear(2, 2)
            self.tied = self.linear

        def forward(self, x):
            self.count = self.count + 1
            return self.tied(x) + self.linear(x)

    module, other = Counts(), Counts()
    tensors = dict((*other.named_parameters(), *other.named_buffers()))
    weight = module.linear.weight
    expected = copy.deepcopy(other)(torch.ones(2))
    with having(module, tensors) as assigned:
        assert torch.equal(module(torch.ones(2)), expected)
        assert {name: t.item() for name, t in assigned().items()} == {"count": 1}
    assert module.tied.weight is module.linear.weight is weight
    assert module.count.item() == other.count.item() == 0


def test_an_exception_and_a_checkpoint():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return checkpoint(lambda x: self.linear(x).sin(), x, use_reentrant=False)

    module, other = Again(), Again()
    weight, tensors = module.linear.weight, dict(other.named_parameters())
    x = torch.ones(2, requires_grad=True)
    with having(module, tensors):
        (grad,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(grad, torch.autograd.grad(other(x).sum(), x)[0])
    with pytest.raises(KeyError), having(module, tensors):
        raise KeyError
    assert module.linear.weight is weight
