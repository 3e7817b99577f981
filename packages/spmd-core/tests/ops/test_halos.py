"""Windows over images whose positions are split: right for all sizes, and only halos move."""

import math

import pytest
import torch
from tiers import crossed
from torch.nn import functional as F

import spmd_core as spmd

AXES = ("data", "height", "width")


def split(tensor, shape):
    mesh = spmd.Mesh(range(math.prod(shape)), shape, AXES)
    return spmd.mark_sharding(tensor, mesh, ("data", None, "height", "width"))


def mesh_or_skip(shape, num_devices):
    if math.prod(shape) > num_devices:
        pytest.skip(f"needs {math.prod(shape)} devices")
    return shape


def check(function, shape, mesh, *, weight=None, wanted=(True, True), dtype=torch.float32):
    """Compares results and gradients of `function(images, weight)` with eager torch's."""
    image = torch.randn(shape).to(dtype)
    kernel = torch.randn(weight or (1,)).to(dtype)
    results = []
    for device in ("cpu", "xla"):
        x, w = image.to(device).requires_grad_(wanted[0]), kernel.to(device).requires_grad_()
        w.requires_grad_(wanted[1] and weight is not None)
        if device == "xla":
            split(x, mesh)
        found = function(x * 1, w)
        out, *others = found if isinstance(found, tuple) else (found,)
        ramp = torch.linspace(-1, 1, out.numel()).view(out.shape).to(device, dtype)
        grads = torch.autograd.grad(out, [t for t in (x, w) if t.requires_grad], ramp)
        results.append([t.detach().cpu() for t in (out, *others, *grads)])
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.2}
    for mine, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, right, **close)


# name -> (windows, their weight's shape, images): sizes that divide, that do not, and blocks of
# fewer rows than a window reads
WINDOWS = {
    "3x3": (lambda x, w: F.conv2d(x, w, padding=1), (4, 2, 3, 3), (2, 2, 8, 12)),
    "3x3 of 7 rows": (lambda x, w: F.conv2d(x, w, padding=1), (4, 2, 3, 3), (3, 2, 7, 7)),
    "3x3, stride 2": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (4, 2, 3, 3), (2, 2, 8, 8)),
    "3x3, stride 2, 14 to 7 rows": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        (4, 2, 3, 3),
        (2, 2, 14, 14),
    ),
    "7x7, stride 2": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=3),
        (4, 3, 7, 7),
        (2, 3, 16, 13),
    ),
    "1x1, stride 2": (lambda x, w: F.conv2d(x, w, stride=2), (4, 2, 1, 1), (2, 2, 7, 9)),
    "a stride beyond the kernel": (
        lambda x, w: F.conv2d(x, w, stride=(4, 3), padding=(1, 0)),
        (4, 2, 2, 1),
        (2, 2, 11, 10),
    ),
    "a kernel over several blocks": (lambda x, w: F.conv2d(x, w), (2, 2, 5, 6), (1, 2, 6, 9)),
    "dilated, in groups": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=2, dilation=2, groups=2),
        (4, 1, 3, 3),
        (2, 2, 9, 10),
    ),
    "max": (
        lambda x, w: F.max_pool2d(x, 3, 2, 1, return_indices=True),
        None,
        (2, 3, 14, 13),
    ),
    "max, ceil mode, equal values": (
        lambda x, w: F.max_pool2d(x.round(), (2, 3), (3, 2), (1, 0), ceil_mode=True),
        None,
        (2, 3, 9, 10),
    ),
    "mean": (lambda x, w: F.avg_pool2d(x, 3, 2, 1), None, (2, 3, 14, 13)),
    "mean, ceil mode": (
        lambda x, w: F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False),
        None,
        (2, 3, 7, 10),
    ),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    crossed([*WINDOWS], [(2, 2, 2), (1, 4, 1), (1, 1, 2), (1, 8, 1), (1, 2, 4)]),
)
def test_results_and_gradients_of_split_images(name, mesh, num_devices):
    function, weight, shape = WINDOWS[name]
    check(function, shape, mesh_or_skip(mesh, num_devices), weight=weight)


def test_the_gradient_of_the_weight_alone(num_devices):
    function, weight, shape = WINDOWS["7x7, stride 2"]
    mesh = mesh_or_skip((2, 2, 2), num_devices)
    check(function, shape, mesh, weight=weight, wanted=(False, True))


def test_sixteen_bit_floats(num_devices):
    function, weight, shape = WINDOWS["3x3, stride 2, 14 to 7 rows"]
    check(
        function, shape, mesh_or_skip((1, 2, 2), num_devices), weight=weight, dtype=torch.bfloat16
    )


def test_two_axes_split_the_rows(num_devices):
    mesh = spmd.Mesh(range(4), (2, 2), ("a", "b")) if num_devices >= 4 else pytest.skip("four axes")
    x, w = torch.randn(2, 3, 16, 6), torch.randn(4, 3, 3, 3)
    ours = spmd.mark_sharding(x.to("xla"), mesh, (None, None, ("b", "a"), None))
    got = F.max_pool2d(F.conv2d(ours, w.to("xla"), stride=2, padding=1), 2, 1)
    right = F.max_pool2d(F.conv2d(x, w, stride=2, padding=1), 2, 1)
    spmd.mark_sharding(got, mesh, (None, None, ("b", "a"), None))
    assert {c.kind for c in spmd.debugging.collectives(got)} == {"collective-permute"}
    torch.testing.assert_close(got.cpu(), right, rtol=1e-4, atol=1e-4)


def test_pooling_without_a_batch(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    x = torch.randn(3, 37, 5)
    ours = spmd.mark_sharding(x.to("xla"), mesh, (None, "x"))
    got, right = (F.max_pool2d(F.avg_pool2d(t, 2, 1), 3, 2, 1) for t in (ours, x))
    torch.testing.assert_close(got.cpu(), right)


# (windows, the weight's shape) -> the rows that cross a border of two blocks of 8 or more: forward,
# and in the gradients of both. Rows of a gradient have half of the columns under a stride of 2.
MOVED = {
    "3x3": (2, 2),
    "3x3, stride 2": (1, 0.5),
    "7x7, stride 2": (5, 1.5),
    "1x1, stride 2": (0, 0),
}


STRIDES_AND_PADDINGS = {
    "3x3": (1, 1),
    "3x3, stride 2": (2, 1),
    "7x7, stride 2": (2, 3),
    "1x1, stride 2": (2, 0),
}


@pytest.mark.parametrize("name", MOVED)
def test_only_halos_move(name, num_devices):
    mesh = mesh_or_skip((1, 4, 1), num_devices)
    function, (outs, ins, *kernel), _ = WINDOWS[name]
    x, w = torch.randn(2, ins, 64, 64), torch.randn(outs, ins, *kernel)
    ours = split(x.to("xla"), mesh)
    forward = spmd.debugging.collectives(function(ours, w.to("xla")))
    assert {c.kind for c in forward} <= {"collective-permute"}
    assert forward.result_bytes == MOVED[name][0] * 2 * ins * 64 * 4
    spmd.sync()

    stride, padding = STRIDES_AND_PADDINGS[name]
    grad = torch.ones_like(function(x, w))
    grads = torch.ops.aten.convolution_backward(
        split(grad.to("xla"), mesh), split(x.to("xla"), mesh), w.to("xla"), None,
        [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [True, True, False],
    )  # fmt: skip
    moved = spmd.debugging.collectives(*grads[:2])
    rows = moved.where(kind="collective-permute")
    assert rows.result_bytes == MOVED[name][1] * 2 * outs * 64 * 4
    (sums,) = moved.where(kind="all-reduce")
    assert sums.result_bytes == w.numel() * 4
    assert len(moved) == len(rows) + 1


def test_a_pooling_moves_one_row_each_way(num_devices):
    mesh = mesh_or_skip((1, 2, 1), num_devices)
    x = split(torch.randn(2, 3, 16, 16).to("xla"), mesh).requires_grad_()
    out = F.max_pool2d(x, 3, 2, 1)
    (grad,) = torch.autograd.grad(out.square().sum(), [x])
    moved = spmd.debugging.collectives(grad)
    assert [c.kind for c in moved] == ["collective-permute"] * 2
    assert moved.result_bytes == 2 * (2 * 3 * 16 * 4)


@pytest.mark.parametrize(("mesh", "num"), [((1, 2, 1), 1), ((1, 2, 2), 2), ((1, 4, 1), 2)])
def test_two_devices_exchange_their_rows_by_one_permute(mesh, num, num_devices):
    x, w = torch.randn(2, 3, 16, 16), torch.randn(4, 3, 3, 3)
    ours = split(x.to("xla"), mesh_or_skip(mesh, num_devices))
    moved = spmd.debugging.collectives(F.conv2d(ours, w.to("xla"), padding=1))
    assert [c.kind for c in moved] == ["collective-permute"] * num


def test_gradients_of_whole_dims_with_padding_beyond_the_kernel(num_devices):
    """A stride of 1, where the rows are split and the columns are not."""
    mesh = mesh_or_skip((1, 2, 1), num_devices)
    for padding in (0, (1, 2), (2, 4)):
        check(
            lambda x, w, padding=padding: F.conv2d(x, w, padding=padding),
            (3, 2, 9, 7),
            mesh,
            weight=(4, 2, 3, 3),
        )
