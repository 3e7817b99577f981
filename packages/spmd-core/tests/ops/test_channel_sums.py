"""Batch norm over split images: right for all sizes, and an all-reduce joins the devices' sums."""

import math

import pytest
import torch
from tiers import exhaustive
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd

AXES = ("data", "height", "width")


def split(tensor, shape):
    mesh = spmd.Mesh(range(math.prod(shape)), shape, AXES)
    spec = ("data", None, "height", "width")[: tensor.ndim]
    return spmd.mark_sharding(tensor, mesh, spec)


def mesh_or_skip(shape, num_devices):
    if math.prod(shape) > num_devices:
        pytest.skip(f"needs {math.prod(shape)} devices")
    return shape


def step(device, image, mesh, *, training=True):
    """The results, gradients and running statistics of a norm between other operations."""
    torch.manual_seed(1)
    num = image.shape[1]
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[image.ndim](num)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    norm = norm.to(device).train(training)
    x = image.to(device).requires_grad_()
    if device == "xla":
        split(x, mesh)
    out = F.relu(norm(x * 1)) * 2
    ramp = torch.linspace(-1, 1, out.numel()).view(out.shape).to(device, out.dtype)
    grads = torch.autograd.grad(out, [x, norm.weight, norm.bias], ramp)
    return [out, *grads, norm.running_mean, norm.running_var]


SHAPES = {
    "even": (4, 3, 8, 6),
    "uneven": (3, 5, 7, 9),
    "fewer rows than devices": (2, 3, 1, 5),
    "one dim": (4, 3, 9),
    "no positions": (6, 3),
}


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 1), (4, 1, 1), exhaustive((1, 2, 4))])
@pytest.mark.parametrize("name", SHAPES)
def test_results_gradients_and_statistics(name, mesh, num_devices):
    mesh, image = mesh_or_skip(mesh, num_devices), torch.randn(SHAPES[name]) * 2 + 1
    for mine, right in zip(step("xla", image, mesh), step("cpu", image, mesh), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), right.detach(), rtol=1e-4, atol=1e-4)


def test_a_large_mean_loses_no_digits(num_devices):
    """With the mean of the squares less the square of the mean, the variance would be noise."""
    mesh = mesh_or_skip((2, 2, 2), num_devices)
    image = torch.randn(4, 3, 7, 8) + 3000
    x = split(image.to("xla"), mesh)
    got = F.batch_norm(x, None, None, training=True)
    right = F.batch_norm(image.double(), None, None, training=True)
    torch.testing.assert_close(got.cpu().double(), right, rtol=0, atol=5e-4)


def test_sixteen_bit_floats(num_devices):
    mesh, image = mesh_or_skip((2, 2, 2), num_devices), torch.randn(4, 3, 5, 6).bfloat16()
    for mine, right in zip(step("xla", image, mesh), step("cpu", image, mesh), strict=True):
        torch.testing.assert_close(
            mine.detach().cpu().float(), right.detach().float(), rtol=0.03, atol=0.1
        )


def test_a_norm_that_uses_its_statistics_moves_nothing(num_devices):
    mesh, image = mesh_or_skip((2, 2, 2), num_devices), torch.randn(4, 3, 8, 6)
    mine, right = (step(device, image, mesh, training=False) for device in ("xla", "cpu"))
    assert not spmd.debugging.collectives(mine[0])
    for found, expected in zip(mine, right, strict=True):
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 1), (4, 1, 1)])
def test_two_reductions_forward_and_one_back(mesh, num_devices):
    image = torch.randn(4, 3, 8, 6)
    out, grad, *others = step("xla", image, mesh_or_skip(mesh, num_devices))
    assert [c.kind for c in spmd.debugging.collectives(out)] == ["all-reduce"] * 2
    found = spmd.debugging.collectives(out, grad, *others)
    assert [c.kind for c in found] == ["all-reduce"] * 3
