"""Optimization barriers: one operation over all tensors, values and gradients unchanged."""

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.modules import barrier
from spmd_core.program import compile_cache


def names():
    return [node.entry.name for node in compile_cache.newest().graph.nodes]


def test_one_barrier_behind_all_tensors(mesh_1d, num_devices):
    spmd.sync()
    a, b = torch.arange(2.0 * num_devices), torch.arange(6).reshape(2, 3)
    x, y = spmd.mark_sharding(a.to("xla"), mesh_1d, ("x",)), b.to("xla").t()
    z = x * 2
    barrier.optimization_barrier_([x, y, z])
    spmd.sync()
    assert names().count("spmd::optimization_barrier") == 1
    assert "optimization_barrier" in compile_cache.newest().lowered.stage.as_text()
    assert torch.equal(x.cpu(), a) and torch.equal(y.cpu(), b.t()) and torch.equal(z.cpu(), a * 2)
    assert x.partition_spec == ("x",) and y.stride() == (1, 3)


def test_one_tensor_a_view_and_none():
    base = torch.arange(6.0).to("xla")
    barrier.optimization_barrier_(base[2:4])
    barrier.optimization_barrier_([])
    assert base.tolist() == [0, 1, 2, 3, 4, 5]


def test_autograd_does_not_see_it():
    x = torch.ones(3, device="xla", requires_grad=True)
    y = x * 2
    barrier.optimization_barrier_([x, y])
    (y * y).sum().backward()
    assert x.grad.tolist() == [8.0] * 3


def test_other_tensors_are_refused():
    for wrong, got in ((torch.ones(2), "a tensor on cpu"), ("x", "str")):
        with pytest.raises(
            spmd.errors.DeviceMismatchError,
            match=f"needs a tensor on device 'xla'; got {got}. Move it first",
        ):
            barrier.optimization_barrier_([wrong])


def test_a_barrier_in_every_backward_pass():
    reference, model = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    )
    model.load_state_dict(reference.state_dict())
    model.to("xla")
    for layer in (model[0], model[2]):
        assert barrier.apply_backward_optimization_barrier(layer) is layer
    x = torch.randn(5, 3)
    reference(x).square().sum().backward()
    on_device = x.to("xla").requires_grad_()
    model(on_device).square().sum().backward()
    spmd.sync()
    assert names().count("spmd::optimization_barrier") == 2
    for p, q in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=2e-5, atol=1e-5)
