"""The whole system in one short file. Read and run this one first."""

import pytest
import torch
from torch import nn

import spmd_core as spmd

pytestmark = pytest.mark.one_device


def test_a_tensor_lives_on_the_device_and_comes_back():
    x = torch.arange(6, device="xla").view(2, 3)
    assert x.device == torch.device("xla:0") and isinstance(x, spmd.XLAShardedTensor)
    assert torch.equal((x * 2 + 1).cpu(), torch.arange(6).view(2, 3) * 2 + 1)


def test_operations_are_recorded_and_computed_together():
    x = torch.ones(4, device="xla")
    spmd.sync()
    before = spmd.metrics.counter("executions")
    a = x + 1
    b = a * 3
    c = b.sum()
    assert spmd.metrics.counter("executions") == before  # nothing ran yet
    assert c.item() == 24.0
    assert spmd.metrics.counter("executions") == before + 1  # one program computed a, b and c
    assert b.tolist() == [6.0] * 4 and spmd.metrics.counter("executions") == before + 1


def test_a_write_through_a_view_reaches_its_base():
    x = torch.zeros(2, 3, device="xla")
    x.t()[1] = 5
    x.view(-1)[0].add_(1)
    assert x.tolist() == [[1, 5, 0], [0, 5, 0]]


def test_a_mark_shards_a_tensor_in_place(mesh_1d, num_devices):
    w = torch.arange(2.0 * num_devices, device="xla")
    assert spmd.mark_sharding(w, mesh_1d, ("x",)) is w
    shards = w.local_shards
    assert [s.data.tolist() for s in shards] == [[2.0 * i, 2.0 * i + 1] for i in range(num_devices)]
    assert w.tolist() == list(range(2 * num_devices))  # the tensor is the global tensor


def test_a_training_step_on_all_devices_equals_eager_torch(mesh_1d, num_devices):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    model.load_state_dict(reference.state_dict())
    model.to("xla")
    for p in model.parameters():
        spmd.mark_sharding(p, mesh_1d, ("x",))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    compiles = []
    for _ in range(4):
        x, y = torch.randn(16, 16), torch.randint(0, 8, (16,))
        losses = []
        for m, optimizer, device in zip((reference, model), optimizers, ("cpu", "xla")):
            loss = nn.functional.cross_entropy(m(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        spmd.sync()
        compiles.append(spmd.metrics.counter("compiles"))
        torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-5, atol=1e-6)
    assert compiles[-1] == compiles[0]  # nothing compiles after the first step
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)
        assert mine.local_shards[0].data.shape[0] == theirs.shape[0] // num_devices
