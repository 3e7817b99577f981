"""What is saved on the host gives the same gradients; programs for accelerators copy it there."""

import copy
import pickle

import jax
import jax.numpy as jnp
import jaxlib
import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.modules import offloading
from spmd_core.ops import registry
from spmd_core.runtime import devices


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Sigmoid())


def gradients(net, x):
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.cpu().clone() for p in net.parameters()]


@pytest.fixture
def mesh(num_devices):
    return spmd.Mesh(range(num_devices), (num_devices,), ("data",))


@pytest.fixture
def moved(monkeypatch):
    """The shapes of the tensors that go to the host, as they do."""
    found, to_host = [], offloading._to_host

    def record(args, kwargs):
        found.append(tuple(args[0].shape))
        return to_host(args, kwargs)

    monkeypatch.setattr(offloading, "_to_host", record)
    return found


@pytest.mark.parametrize("size", [8, 5])
def test_gradients_are_the_same(mesh, size):
    x, right = torch.randn(size, 6), model()
    ours = copy.deepcopy(right).to("xla")
    inputs = spmd.mark_sharding(x.to("xla"), mesh, ("data",))
    kept = gradients(ours, inputs)
    with spmd.save_on_host():
        on_host = gradients(ours, inputs)
    assert all(map(torch.equal, kept, on_host))
    for got, grad in zip(on_host, gradients(right, x)):
        torch.testing.assert_close(got, grad)


def lowered(overload, platform, x):
    lowering = registry.find_lowering(registry.resolve(f"spmd.{overload}.default"))
    outs = (registry.Out(x.shape, torch.float32),)
    return lowering.function(registry.Context(outs, platform), x)


@pytest.mark.parametrize(("platform", "copies"), [("cpu", 0), ("gpu", 1), ("tpu", 1)])
def test_programs_for_accelerators_copy_to_the_host_and_back(platform, copies):
    def there_and_back(x):
        on_host = lowered("to_host_memory", platform, x * 2)
        return lowered("from_host_memory", platform, on_host) + 1

    traced = jax.jit(there_and_back).trace(jnp.ones(4))
    text = traced.lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),)).as_text()
    assert text.count('"pinned_host"') == copies
    assert ('"device"' in text) == bool(copies)


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.xfail(
    jaxlib.__version__ == "0.10.0",
    raises=spmd.errors.ProgramError,
    strict=True,
    reason="its CPU compiler lacks them, and its partitioner refuses them",
)
def test_a_program_of_an_accelerator(monkeypatch, mesh, synced):
    """XLA's CPU compiler accepts copies to the host, so their place in programs is tested here."""
    x, right = torch.randn(8, 6), model()
    ours = copy.deepcopy(right).to("xla")
    inputs = spmd.mark_sharding(x.to("xla"), mesh, ("data",))
    loss = right(x).square().sum()
    loss.backward()
    monkeypatch.setattr(devices, "platform", lambda: "gpu")
    with spmd.save_on_host():
        got = ours(inputs).square().sum()
    if synced:
        spmd.sync()  # what is saved is a result of this program
    got.backward()
    for p, q in zip(ours.parameters(), right.parameters()):
        torch.testing.assert_close(p.grad.cpu(), q.grad)


def test_parameters_and_tensors_of_the_cpu_stay(moved):
    weight = nn.Parameter(torch.randn(3, 4, device="xla"))
    x, y = torch.randn(2, 3, device="xla"), torch.randn(3, requires_grad=True)
    with spmd.save_on_host():
        product, square = x @ weight, y * y
    assert moved == [(2, 3)]
    (product.sum() + square.sum().to("xla")).backward()
    torch.testing.assert_close(weight.grad.cpu(), x.cpu().sum(0)[:, None].expand(3, 4))
    torch.testing.assert_close(y.grad, 2 * y.detach())


def test_a_checkpointed_block_keeps_its_input_on_the_host(moved, mesh):
    x, right = torch.randn(8, 6), model()
    ours = copy.deepcopy(right).to("xla")
    for block in ours:
        spmd.checkpoint_module(block, on_host=True)
    got = gradients(
        pickle.loads(pickle.dumps(ours)), spmd.mark_sharding(x.to("xla"), mesh, ("data",))
    )
    assert moved == [(8, 6), (8, 12), (8, 12), (8, 6)]
    for grad, correct in zip(got, gradients(right, x)):
        torch.testing.assert_close(grad, correct)
