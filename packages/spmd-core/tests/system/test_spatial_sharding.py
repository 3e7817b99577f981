"""Windows and transforms over a dim that is split, also unevenly, agree with eager torch."""

import pytest
import torch
from tiers import crossed
from torch.nn import functional as F

import spmd_core as spmd

KERNEL = torch.randn(4, 4, 3, 3)

WINDOWS = {
    "convolution": lambda x, w: F.conv2d(x, w, stride=2, padding=2),
    "stride 3": lambda x, w: F.conv2d(x, w, stride=3, padding=1),
    "stride beyond the kernel": lambda x, w: F.conv2d(x, w[..., :1, :2], stride=(2, 3), padding=1),
    "dilated, stride 2": lambda x, w: F.conv2d(x, w, stride=2, padding=2, dilation=2),
    "groups, stride 2": lambda x, w: F.conv2d(x, w[:, :2], stride=(2, 1), padding=1, groups=2),
    "one dim": lambda x, w: F.conv1d(x.flatten(2), w[:, :, 0], stride=2, padding=1),
    "padding beyond the kernel": lambda x, w: F.conv2d(x, w, padding=4),
    "dilated": lambda x, w: F.conv2d(x, w, padding=2, dilation=2),
    "transposed": lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=2, padding=1),
    "transposed, cut at the edges": lambda x, w: F.conv_transpose2d(
        x, w.transpose(0, 1), stride=2, padding=3, output_padding=1
    ),
    "max pool": lambda x, w: F.max_pool2d(x, (3, 2), (2, 1), (1, 1), (1, 2)),
    "wide max pool": lambda x, w: F.max_pool2d(x, 4, 1, 2),
    "wide average pool": lambda x, w: F.avg_pool2d(x, 4, 1, 2),
    "wide unfold": lambda x, w: F.unfold(x, 4, padding=2),
    "average pool beyond the kernel": lambda x, w: F.avg_pool2d(x, 2, 3, 1),
    "transposed, groups": lambda x, w: F.conv_transpose2d(
        x, w[:, :2], stride=3, padding=1, dilation=2, groups=2
    ),
    "average pool": lambda x, w: F.avg_pool2d(x, 3, 2, 1),
    "adaptive pool": lambda x, w: F.adaptive_avg_pool2d(x, 4),
    "transform": lambda x, w: torch.view_as_real(torch.fft.fft2(x)),
    "transform of one dim": lambda x, w: torch.fft.irfft(torch.fft.rfft(x, dim=2), n=7, dim=2),
    "fold of an unfold": lambda x, w: F.fold(
        F.unfold(x, 3, padding=1, stride=2), x.shape[2:], 3, padding=1, stride=2
    ),
}


# With 6 elements on 8 devices a window reaches beyond the next device; with 38 it does not.
@pytest.mark.parametrize(("name", "split"), crossed([*WINDOWS], [(0, 6), (2, 6), (2, 38), (3, 38)]))
def test_results_and_gradients(name, split, mesh_1d):
    dim, size = split
    function = WINDOWS[name]
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        x, w = (
            t.to(device).requires_grad_() for t in (torch.randn(2, 4, size, size), KERNEL.clone())
        )
        if device == "xla":
            spmd.mark_sharding(x, mesh_1d, tuple("x" if d == dim else None for d in range(4)))
        out = function(x, w)
        ramp = torch.linspace(-1, 1, out.numel()).view(out.shape).to(device)
        results.append(
            [
                out,
                *(
                    g
                    for g in torch.autograd.grad(out, [x, w], ramp, allow_unused=True)
                    if g is not None
                ),
            ]
        )
    for mine, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine.detach().cpu(), right.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kernel", [3, 9])
def test_convolutions_over_fewer_elements_than_devices(dtype, transposed, kernel, mesh_1d):
    """Here the partitioner once counted sums of the weight's gradient twice.

    A kernel of 81 elements takes another code path than one of 9.
    """
    convolve = F.conv_transpose2d if transposed else F.conv2d
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        x, w = (
            torch.randn(shape, dtype=dtype).to(device).requires_grad_()
            for shape in ((1, 3, 4, 4), (3, 3, kernel, kernel))
        )
        if device == "xla":
            spmd.mark_sharding(x, mesh_1d, (None, None, "x", None))
        out = convolve(x, w, stride=2, padding=kernel // 2)
        ramp = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype).to(device)
        results.append([out, *torch.autograd.grad(out, [x, w], ramp)])
    tolerance = (
        {"rtol": 0.02, "atol": 0.1} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    )
    for mine, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine.detach().cpu(), right.detach(), **tolerance)


@pytest.mark.parametrize("size", [5, 24])
def test_without_a_batch(size, mesh_1d):
    """Without a batch dim, dim 1 is the first that a window moves over."""
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        x, w = (
            torch.randn(shape).to(device).requires_grad_()
            for shape in ((4, size, size), (3, 4, 3, 3))
        )
        if device == "xla":
            spmd.mark_sharding(x, mesh_1d, (None, "x", None))
        out = F.avg_pool2d(F.conv2d(x, w), 2, 1)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, w])])
    for mine, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine.detach().cpu(), right.detach(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_channels_beside_spatial_dims(stride, transposed, num_devices):
    """Of two axes, one splits the channels of the weight or of the result, the other positions."""
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(4), (2, 2), ("x", "y"))
    convolve = F.conv_transpose1d if transposed else F.conv1d
    weight = torch.randn((2, 6, 3) if transposed else (6, 2, 3))
    image = torch.randn(4, 2, 16)

    def run(device, *marks):
        x, w = (t.detach().to(device).requires_grad_() for t in (image, weight))
        read, kernel = x.mul(1), w.mul(1)
        out = convolve(read, kernel, stride=stride, padding=1).mul(1)
        for tensor, spec in zip((read, kernel, out), marks):
            spmd.mark_sharding(tensor, mesh, spec)
        ramp = torch.linspace(-1, 1, out.numel()).view(out.shape).to(device)
        (out.sin() * ramp).sum().backward()
        return out.detach(), x.grad, w.grad

    expected = run("cpu")
    layouts = [
        ((None, None, "y"), (), (None, "x", "y")),
        ((None, "x", "y"), (), (None, None, "y")),
        ((None, None, "y"), ("x", None), ()),
        ((None, None, "y"), (None, "y"), ("x", None, "y")),
        ((), ("x", "y"), (None, "x", "y")),
        ((None, None, "x"), (("x", "y"),), (None, ("x", "y"))),
    ]
    found = [run("xla", *marks) for marks in layouts]
    for marks, results in zip(layouts, found):
        for got, right in zip(results, expected):
            torch.testing.assert_close(
                got.cpu(), right, rtol=1e-4, atol=1e-4, msg=lambda text, m=marks: f"{m}: {text}"
            )
