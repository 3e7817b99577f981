"""Eager mode: one execution per operation, the same values, and no trace of it when it is off."""

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.dispatch import eager
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

pytestmark = pytest.mark.one_device


def executions():
    return spmd.metrics.counter("executions")


@pytest.fixture
def eagerly():
    with eager.eager_mode_context(True):
        yield
    assert not eager.is_eager_mode()


def test_each_operation_is_executed_when_it_is_recorded(eagerly):
    x = torch.arange(4.0).to("xla")
    before = executions()
    y = x + 1
    assert executions() == before + 1 and y._handle.value.data is not None
    z = y * y
    assert executions() == before + 2 and z.tolist() == [1, 4, 9, 16]
    assert executions() == before + 2


def test_single_operations_are_cached(eagerly):
    x = torch.randn(7, 5).to("xla")
    (x.exp() + 0.5).sum()
    before = spmd.metrics.counter("compiles")
    for number in range(3):
        (x.exp() + number / 3).sum()
    assert spmd.metrics.counter("compiles") == before


def test_a_composition_is_cut_once_at_its_end(eagerly):
    xs = [torch.ones(2).to("xla") for _ in range(3)]
    torch._foreach_add_(xs, 1)
    before = executions()
    torch._foreach_mul_(xs, 2.0)  # composed of three in-place products
    assert executions() == before + 1 and [x.tolist() for x in xs] == [[4.0, 4.0]] * 3


def test_views_and_writes(eagerly):
    def program(device):
        x = torch.arange(12.0).to(device).view(3, 4)
        x[1].mul_(2)
        x.t()[0, 2:] = -1
        y = x.reshape(-1)[::3]
        y.add_(x.sum())
        return x, y

    for got, right in zip(program("xla"), program("cpu")):
        assert torch.equal(got.cpu(), right)


def test_training(eagerly, mesh_1d):
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1)).to(
            device
        )
        if device == "xla":
            spmd.mark_sharding(model[0].weight, mesh_1d, ("x",))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(3):
            loss = model(torch.linspace(-1, 1, 8).reshape(2, 4).to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert model[0].weight.partition_spec == ("x", None)


def test_what_does_not_go_through_the_router_runs_with_the_next_operation(eagerly):
    q = torch.randn(1, 2, 8, 4)
    x = q.to("xla")
    out = nn.functional.scaled_dot_product_attention(x, x, x)
    assert out._handle.value.data is None
    total = out.sum()
    assert out._handle.value.data is not None and total._handle.value.data is not None
    torch.testing.assert_close(
        out.cpu(), nn.functional.scaled_dot_product_attention(q, q, q), rtol=2e-5, atol=1e-5
    )


def test_an_error_shows_at_the_operation_and_leaves_the_mode_whole(eagerly, monkeypatch):
    x = torch.ones(3).to("xla")

    def fail(*args):
        raise spmd.errors.ProgramError("the device failed")

    monkeypatch.setattr("spmd_core.program.compile_cache.cached", lambda key: None)
    monkeypatch.setattr("spmd_core.program.compile_cache.making", fail)
    with pytest.raises(spmd.errors.ProgramError, match="the device failed"):
        x + 1
    monkeypatch.undo()
    before = executions()
    assert (x + 2)._handle.value.data is not None and executions() == before + 1


def test_switching():
    router = XLAShardedTensor.__dict__["__torch_dispatch__"]
    x = torch.ones(2).to("xla") + 1
    before = executions()
    eager.eager_mode(True)
    assert eager.is_eager_mode() and executions() == before + 1 and x._handle.value.data is not None
    eager.eager_mode(True)
    with eager.eager_mode_context(False):
        assert not eager.is_eager_mode()
        x + 1
    assert eager.is_eager_mode()
    eager.eager_mode(False)
    eager.eager_mode(False)
    # When eager mode is off, it adds nothing to the path of an operation.
    assert not eager.is_eager_mode() and XLAShardedTensor.__dict__["__torch_dispatch__"] is router
    before = executions()
    x + 1
    assert executions() == before
