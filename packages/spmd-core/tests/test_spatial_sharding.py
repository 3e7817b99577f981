"""Windows and transforms over a dim that is split over the devices, unevenly too: results and gradients equal eager torch's."""

import pytest
import torch
from torch.nn import functional as F

import spmd_core as spmd

X, KERNEL = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)

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
    "transposed, cut at the edges": lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=2, padding=3, output_padding=1),
    "max pool": lambda x, w: F.max_pool2d(x, (3, 2), (2, 1), (1, 1), (1, 2)),
    "average pool beyond the kernel": lambda x, w: F.avg_pool2d(x, 2, 3, 1),
    "transposed, groups": lambda x, w: F.conv_transpose2d(x, w[:, :2], stride=3, padding=1, dilation=2, groups=2),
    "average pool": lambda x, w: F.avg_pool2d(x, 3, 2, 1),
    "adaptive pool": lambda x, w: F.adaptive_avg_pool2d(x, 4),
    "transform": lambda x, w: torch.view_as_real(torch.fft.fft2(x)),
    "transform of one dim": lambda x, w: torch.fft.irfft(torch.fft.rfft(x, dim=2), n=7, dim=2),
    "fold of an unfold": lambda x, w: F.fold(F.unfold(x, 3, padding=1, stride=2), 6, 3, padding=1, stride=2),
}


@pytest.mark.parametrize("dim", [0, 2, 3])
@pytest.mark.parametrize("name", WINDOWS)
def test_results_and_gradients(name, dim, mesh_1d):
    function = WINDOWS[name]
    results = []
    for device in ("cpu", "xla"):
        x, w = (t.detach().clone().to(device).requires_grad_() for t in (X, KERNEL))
        if device == "xla":
            spmd.mark_sharding(x, mesh_1d, tuple("x" if d == dim else None for d in range(4)))
        out = function(x, w)
        ramp = torch.linspace(-1, 1, out.numel()).view(out.shape).to(device)
        results.append([out, *(g for g in torch.autograd.grad(out, [x, w], ramp, allow_unused=True) if g is not None)])
    for mine, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine.detach().cpu(), right.detach(), rtol=1e-4, atol=1e-4)
