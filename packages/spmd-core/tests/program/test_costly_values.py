"""Sines and cosines that larger values read are computed once, on CPUs."""

import pytest
import torch
from recorded_graphs import graph_of, rewritten

from spmd_core.ops.barrier import BARRIER
from spmd_core.program.passes.costly_values import costly_values


def num_barriers(*tensors, platform="cpu"):
    graph = rewritten(costly_values, graph_of(*tensors), platform)
    return sum(op.entry.name == BARRIER for op in graph.ops)


def rotated(device, num_heads):
    """As Llama does it: one table of angles for queries of several heads."""
    torch.manual_seed(0)
    query = torch.randn(2, num_heads, 6, 8).to(device).requires_grad_()
    angles = torch.arange(48, dtype=torch.float32).reshape(1, 6, 8).to(device)
    cos, sin = (f(angles) * 1.0 for f in (torch.cos, torch.sin))
    half = torch.cat([-query[..., 4:], query[..., :4]], dim=-1)
    out = query * cos.unsqueeze(1) + half * sin.unsqueeze(1)
    out.square().sum().backward()
    return out.detach(), query.grad


def test_rotary_positions() -> None:
    assert num_barriers(*rotated("xla", 4)) == 2
    assert num_barriers(*rotated("xla", 4), platform="tpu") == 0
    for mine, right in zip(rotated("xla", 4), rotated("cpu", 4)):
        torch.testing.assert_close(mine.cpu(), right, rtol=1e-5, atol=1e-5)


def test_values_that_only_values_of_their_size_read() -> None:
    x = torch.randn(6, 8).to("xla")
    assert num_barriers(x.sin() + 1, x.sin().sum(0)) == 0
    assert num_barriers(x.cos() @ torch.ones(8, 100).to("xla")) == 0  # products read what is there


@pytest.mark.parametrize("function", [torch.sin, torch.cos, torch.tan])
def test_each_function(function) -> None:
    x = torch.linspace(-1, 1, 8)
    y = function(x.to("xla")) * 2 + torch.ones(4, 8).to("xla")
    assert num_barriers(y) == 1
    torch.testing.assert_close(y.cpu(), function(x) * 2 + torch.ones(4, 8))
