"""Recomputation keeps values, whatever a policy keeps in memory."""

import copy

import pytest
import torch
from tiers import crossed
from torch import nn

import spmd_core as spmd
from examples.training.choices import REMAT_POLICIES
from examples.training.remat import recompute


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.mix(self.norm(x)).chunk(3, -1)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads)
        result: torch.Tensor = x + self.out(attended.transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize(("policy", "sharded"), crossed(["none", *REMAT_POLICIES], [False, True]))
def test_gradients_do_not_depend_on_the_policy(policy: str, sharded: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(8, 3, 8)
    ours = copy.deepcopy(model).to("xla")
    recompute(ours, policy)
    if sharded:
        num_devices = spmd.global_runtime_device_count()
        mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
        for block in ours:
            spmd.fully_shard(block, mesh)
    model(x).square().sum().backward()
    ours(x.to("xla")).square().sum().backward()
    for got, right in zip(ours.parameters(), model.parameters()):
        assert got.grad is not None and right.grad is not None
        torch.testing.assert_close(got.grad.cpu(), right.grad, rtol=1e-4, atol=1e-4)
