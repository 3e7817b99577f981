"""Losses of class indices of a floating dtype: as with integers, which eager torch requires."""

import pytest
import torch
import torch.nn.functional as F

import torch_xla  # noqa: F401


@pytest.mark.parametrize(("shape", "targets"), [((4, 5), (4,)), ((5,), ()), ((2, 5, 3), (2, 3))])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_float_targets_are_class_indices(shape, targets, reduction):
    x, target = torch.randn(shape, requires_grad=True), torch.randint(0, 5, targets)
    ours = x.detach().to("xla").requires_grad_()
    options = {"reduction": reduction, "ignore_index": 2}
    expected = F.cross_entropy(x, target, **options)
    loss = F.cross_entropy(ours, target.float().to("xla"), **options)
    expected.sum().backward()
    loss.sum().backward()
    torch.testing.assert_close(loss.cpu(), expected, equal_nan=True)
    torch.testing.assert_close(ours.grad.cpu(), x.grad, equal_nan=True)


def test_probabilities_stay_probabilities():
    x, target = torch.randn(4, 5), torch.softmax(torch.randn(4, 5), -1)
    found = F.cross_entropy(x.to("xla"), target.to("xla"))
    torch.testing.assert_close(found.cpu(), F.cross_entropy(x, target))
    likelihood = x.log_softmax(-1).to("xla")
    picked = F.nll_loss(likelihood, torch.tensor([0.0, 1, 2, 3]).to("xla"))
    torch.testing.assert_close(picked.cpu(), -x.log_softmax(-1).diagonal().mean())
