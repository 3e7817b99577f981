"""Layouts of images are followed to the convolutions that read them; elsewhere nothing changes."""

import pytest
import torch
from recorded_graphs import graph_of, rewritten
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd
from spmd_core.program.passes.image_layouts import image_layouts
from spmd_core.program.target import Replicated


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


def test_split_labels_do_not_change_convolutions_over_whole_rows(mesh):
    """Labels might be indices that split rows, but the layout of the images is known."""
    torch.manual_seed(0)
    pixels, labels = torch.randn(4, 4, 16, 16), torch.randint(4, (4,))
    weight = W.clone().requires_grad_()
    F.cross_entropy(convolve(pixels, weight).mean((2, 3)), labels).backward()
    images = spmd.mark_sharding(pixels.to("xla"), mesh, ("data",))
    targets = spmd.mark_sharding(labels.to("xla"), mesh, ("data",))
    w = W.to("xla").requires_grad_()
    loss = F.cross_entropy(convolve(images, w).mean((2, 3)), targets)
    (gradient,) = torch.autograd.grad(loss, [w])
    assert "stride=2x2" in spmd.debugging.hlo(loss)
    torch.testing.assert_close(gradient.cpu(), weight.grad, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_split_weight_scatters_beside_split_labels(mesh):
    w = spmd.mark_sharding(W.to("xla"), mesh, ("data",)).requires_grad_()
    images = spmd.mark_sharding(X.to("xla"), mesh, ("data",))
    targets = spmd.mark_sharding(torch.arange(4).to("xla"), mesh, ("data",))
    loss = F.cross_entropy(convolve(images, w).mean((2, 3)), targets)
    (gradient,) = torch.autograd.grad(loss, [w])
    assert "reduce-scatter" in {c.kind for c in spmd.debugging.collectives(gradient)}


def test_windows_know_how_their_images_are_split(mesh_2d):
    x = spmd.mark_sharding(torch.randn(8, 3, 16, 16).to("xla"), mesh_2d, (None, None, "a", "b"))
    y = F.conv2d(x, torch.randn(4, 3, 3, 3).to("xla"), padding=1).relu()
    graph = graph_of(F.max_pool2d(y, 2))
    hints = [op.hint.axes for op in rewritten(image_layouts, graph).ops if op.hint]
    is_split = len(mesh_2d.ids) > 1
    assert hints == [((), (), ("a",), ("b",))] * 2 * is_split
    assert rewritten(image_layouts, graph, replicated_part=Replicated.EVERYTHING) is graph
