"""Layouts of images are followed to the convolutions that read them; elsewhere nothing changes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd


@pytest.fixture
def mesh(num_devices):
    if num_devices < 4:
        pytest.skip("needs two axes")
    return spmd.Mesh(range(4), (2, 2), ("data", "rows"))


SPEC = ("data", None, "rows")
X, W = torch.randn(4, 4, 16, 6), torch.randn(4, 4, 3, 3)


def convolve(x, w):
    return F.conv2d(x, w.to(x.device), stride=2, padding=1)


FOLLOWED = {
    "norm": lambda x: F.relu(nn.BatchNorm2d(4).to(x.device)(x)) + 1,
    "channels joined": lambda x: torch.cat([x[:, :1], x[:, 1:].sigmoid()], 1),
    "another convolution": lambda x: F.conv2d(x, W.to(x.device), padding=1),
    "pooling": lambda x: F.max_pool2d(x, 3, 1, 1) + F.avg_pool2d(x, 3, 1, 1),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_layout_is_followed_through_operations(name, mesh):
    torch.manual_seed(0)
    right = convolve(FOLLOWED[name](X), W)
    x = spmd.mark_sharding(X.to("xla"), mesh, SPEC)
    got = convolve(FOLLOWED[name](x), W)
    moved = spmd.debugging.collectives(got)
    assert {c.kind for c in moved} <= {"collective-permute", "all-reduce"}
    torch.testing.assert_close(got.cpu(), right, rtol=1e-4, atol=1e-4)


def test_a_mark_between_changes_the_layout(mesh):
    x = spmd.mark_sharding(X.to("xla"), mesh, SPEC)
    halves = spmd.mark_sharding(x * 1, mesh, ("data", None, None, "rows"))
    got = convolve(halves, W)
    torch.testing.assert_close(got.cpu(), convolve(X, W), rtol=1e-4, atol=1e-4)


def test_a_wrong_guess_costs_no_value(mesh):
    """A transposed tensor of the same shape: the rows are split, not the columns."""
    square = torch.randn(4, 4, 6, 6)
    x = spmd.mark_sharding(square.to("xla"), mesh, SPEC)
    got = convolve(torch.relu(x.mT), W)
    torch.testing.assert_close(got.cpu(), convolve(square.mT.relu(), W), rtol=1e-4, atol=1e-4)


def test_a_split_batch_alone_needs_no_halos(mesh):
    x = spmd.mark_sharding(X.to("xla"), mesh, (("data", "rows"),))
    got = convolve(x, W)
    assert not spmd.debugging.collectives(got)
    assert "ppermute" not in spmd.debugging.hlo(convolve(x, W))


def test_split_channels_are_gathered(mesh):
    x = spmd.mark_sharding(X.to("xla"), mesh, (None, "data", "rows"))
    got = convolve(x, W)
    torch.testing.assert_close(got.cpu(), convolve(X, W), rtol=1e-4, atol=1e-4)
