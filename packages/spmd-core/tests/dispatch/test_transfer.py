"""Copies between the host and the device, and results that inherit a sharding."""

import pytest
import torch

import spmd_core as spmd


def test_a_copy_from_the_host_does_not_share_its_memory():
    source = torch.ones(4)
    x = torch.zeros(4, device="xla")
    x.copy_(source)
    y = source.to("xla")
    source.fill_(9)
    assert x.tolist() == y.tolist() == [1.0] * 4


def test_a_copy_to_the_host_does_not_share_its_memory():
    x = torch.ones(4).to("xla")
    x.cpu().fill_(9)
    assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "make",
    [
        torch.zeros_like,
        torch.empty_like,
        torch.clone,
        lambda x: torch.full_like(x, 3),
        lambda x: x.to(torch.float64),
        lambda x: x.bfloat16(),
    ],
)
def test_results_like_a_marked_tensor_are_sharded_like_it(make, mesh_1d):
    x = spmd.mark_sharding(torch.ones(16, 2).to("xla"), mesh_1d, ("x",))
    assert make(x).sharding is x.sharding
    assert make(torch.ones(16, 2).to("xla")).sharding is None
