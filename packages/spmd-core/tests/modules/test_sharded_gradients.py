"""Gradients that are reduce-scattered over one axis and summed over the others."""

import copy

import pytest
import torch
from torch import nn

import spmd_core as spmd


def test_gradients_are_summed_over_the_replicated_axis_too(num_devices):
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (2, num_devices // 2), ("replicate", "fsdp"))
    eager = nn.Linear(8, 8)
    x = torch.randn(2 * num_devices, 8)
    eager(x).square().sum().backward()
    unit = copy.deepcopy(eager).to("xla")
    unit.zero_grad()
    spmd.fully_shard(unit, mesh, extra_data_axis="replicate")
    data = spmd.mark_sharding(x.to("xla"), mesh, (("replicate", "fsdp"),))
    unit(data).square().sum().backward()
    assert spmd.metrics.counter("reduce_scattered_gradients") > 0
    for got, expected in zip(unit.parameters(), eager.parameters()):
        torch.testing.assert_close(got.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-4)
