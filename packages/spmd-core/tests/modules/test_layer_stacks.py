"""Tests spmd_core.modules.layer_stacks: one tensor of several, with gradients of any order."""

import pytest
import torch

import spmd_core as spmd
from spmd_core.errors import ControlFlowError, DeviceMismatchError, WrapError
from spmd_core.modules.layer_stacks import stacked


def test_values_and_gradients_of_gradients():
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3) for _ in range(3)]
    results = []
    for device, stack in (("cpu", torch.stack), ("xla", stacked)):
        a, b, c = (t.to(device).requires_grad_() for t in tensors)
        result = stack([a, b.t().contiguous().t(), c, a])  # strides differ, and one comes twice
        first = torch.autograd.grad((result**3).sum(), (a, b, c), create_graph=True)
        second = torch.autograd.grad(first[0].sum(), (a, b, c), materialize_grads=True)
        results.append([t.detach().cpu() for t in (result, stack([a]), *first, *second)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_what_is_recorded():
    """Also of tensors without dims, whose data is on the host."""
    a, b = (torch.tensor(float(i)).to("xla").requires_grad_() for i in range(2))
    (stacked([a, b]).sin().sum()).backward()
    text = spmd.debugging.operations(a.grad, b.grad)
    assert "spmd::stack(" in text and "spmd::unstack(" in text and "aten::stack" not in text
    assert a.grad.item() == 1 and b.item() == 1


@pytest.mark.one_device
def test_marks(mesh_2d):
    tensors = [torch.randn(3, 4, device="xla").requires_grad_() for _ in range(3)]
    for t in tensors:
        spmd.mark_sharding(t, mesh_2d, (("a", "b"), None))
    result = stacked(tensors)
    assert result.partition_spec == (None, ("a", "b"), None)
    (grad,) = torch.autograd.grad((result**2).sum(), result, retain_graph=True)
    assert grad.sharding == result.sharding
    (result**2).sum().backward()
    assert all(t.grad.sharding == t.sharding for t in tensors)
    assert torch.equal(tensors[1].grad.cpu(), 2 * tensors[1].detach().cpu())
    spmd.mark_sharding(tensors[1], mesh_2d, ("a", None))
    with pytest.raises(WrapError, match=r"got weight with the mark \('a', None\) in layer 1 and"):
        stacked(tensors, "weight")


def test_other_tensors_are_refused():
    with pytest.raises(DeviceMismatchError, match=r"weight consists of .* on cpu\. Move it first"):
        stacked([torch.ones(2), torch.ones(2)], "weight")
    with pytest.raises(ControlFlowError, match=r"not transformed by torch\.func"):
        torch.func.grad(lambda x: stacked([x, x]).sum())(torch.ones(2, device="xla"))
