"""`CheckpointManager`: the losses after a restore on other meshes, to the last bit."""

import math

import pytest
import torch
from checkpoint_runs import same
from torch import nn

import spmd_core as spmd
from spmd_core.checkpoint import (
    CheckpointManager,
)


class Exact(nn.Module):
    """Two layers beside each other, of few bits: no order of the sums changes a bit of a loss."""

    def __init__(self, device):
        super().__init__()
        self.a, self.b = (nn.Linear(16, n, bias=n > 8, device=device) for n in (8, 16))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randint(-4, 5, p.shape) / 4)

    def train_on(self, optimizer, steps):
        losses = []
        for _ in range(steps):
            x, u, v = (
                torch.randint(-1, 2, (8, n)).float().to(self.a.weight.device) for n in WIDTHS
            )
            loss = ((self.a(x) * u).sum() + (self.b(x) * v).sum()) / 8
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


WIDTHS = (16, 8, 16)


def exact(shape, seed):
    """Such a model over a mesh of so many rows and columns, or on the CPU; and its optimizer."""
    torch.manual_seed(seed)
    model = Exact("cpu" if shape is None else "xla")
    if shape is not None:
        mesh = spmd.Mesh(range(math.prod(shape)), shape, ("a", "b"))
        for layer in (model.a, model.b):
            spmd.mark_sharding(layer.weight, mesh, ("a", "b"))
    return model, torch.optim.SGD(model.parameters(), lr=1 / 16, momentum=0.5)


def test_the_losses_after_a_restore_are_the_same_to_the_last_bit(tmp_path, num_devices):
    """Saved on 2 x 4 devices; restored on 1 x 8, 4 x 2, 1 x 1, and in eager torch."""
    if num_devices < 8:
        pytest.skip("2 x 4 devices are eight")
    model, optimizer = exact((2, 4), seed=0)
    model.train_on(optimizer, 3)
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, {"model": model, "optimizer": optimizer})
        saved = {name: p.cpu() for name, p in model.state_dict().items()}
        moments = [optimizer.state[p]["momentum_buffer"].cpu() for p in model.parameters()]
        random = torch.get_rng_state()
        losses = model.train_on(optimizer, 5)
        assert len({*losses}) == 5 and any(loss % 1 for loss in losses)
        for seed, shape in enumerate([(1, 8), (4, 2), (1, 1), None], start=1):
            other, its = exact(shape, seed)
            manager.restore({"model": other, "optimizer": its})
            same({name: p.cpu() for name, p in other.state_dict().items()}, saved)
            for p, right in zip(other.parameters(), moments):
                assert torch.equal(its.state[p]["momentum_buffer"].cpu(), right)
            assert torch.equal(torch.get_rng_state(), random)
            assert other.train_on(its, 5) == losses, shape
