"""Programs that XLA's partitioner gets wrong without the rules, against eager torch."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax
from meshes import axis, two_axes
from tiers import crossed, exhaustive

import spmd_core as spmd
from spmd_core.program.safe_forms import in_safe_forms
from spmd_core.program.splits import Splits

Make = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(("size", "start", "step"), [(2, 1, 3), (5, 4, 5), (5, 4, 3), (8, 7, 3)])
def test_a_slice_with_a_step_that_keeps_one_element(size, start, step, mesh_1d):
    eager = torch.arange(1.0, size + 1)
    x = spmd.mark_sharding(eager.to("xla"), mesh_1d, ("x",))
    torch.testing.assert_close((x * 10)[start::step].add(1).cpu(), (eager * 10)[start::step].add(1))
    z, w = eager * 10, x * 10
    for t in (z, w):
        t[start::step].mul_(3)
    torch.testing.assert_close(w.cpu(), z)


@pytest.mark.parametrize(
    ("out", "offset"), crossed([("a", "b"), ("b", "a"), (None, "a"), ("b",)], [0, 2, -3])
)
def test_the_diagonal_of_a_split_tensor(out, offset, mesh_2d):
    eager = torch.arange(1.0, 257.0).view(8, 8, 4)
    eager[3, 3, 1], eager[2, 2, 0] = float("nan"), -0.0
    for spec in (("a",), (None, "a"), ("b", "a"), ("a", None, "b")):
        x = spmd.mark_sharding(eager.to("xla"), mesh_2d, spec)
        y = spmd.mark_sharding(x.diagonal(offset) * 1, mesh_2d, out)
        torch.testing.assert_close(y.cpu(), eager.diagonal(offset), equal_nan=True)
        z = spmd.mark_sharding(torch.einsum("iij->ij", x), mesh_2d, out)
        torch.testing.assert_close(z.cpu(), torch.einsum("iij->ij", eager), equal_nan=True)
        assert (1 / x.diagonal().cpu()[0, 2]).item() == float("-inf")  # the zero keeps its sign


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("rows", [4, exhaustive(8)])
@pytest.mark.parametrize("repeated", ["repeat", "repeat_interleave", "expand"])
def test_a_repeated_tensor_is_flipped(repeated, rows, count):
    mesh = axis(count)
    x = torch.arange(8.0 * rows).view(rows, 8)
    functions = {
        "repeat": lambda x: x.repeat(2, 1),
        "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
        "expand": lambda x: x[None].expand(2, -1, -1).reshape(-1, 8),
    }

    def flipped(x, mark):
        y = functions[repeated](mark(x * 1))
        return mark(y.flip(0)), mark(y.flip(0, 1) * 2)

    def mark(x):
        return spmd.mark_sharding(x, mesh, ("a", None))

    for mine, right in zip(flipped(x.to("xla"), mark), flipped(x, lambda x: x)):
        torch.testing.assert_close(mine.cpu(), right)


BORDERS = {
    "running": lambda x: [
        x.cumsum(1), x.cumprod(1), x.cummax(1)[0], x.cummin(1)[0], x.logcumsumexp(1)
    ],
    "pooling": lambda x: [
        f(y[None], 3, 2, 1)
        for y in (x, -x)
        for f in (F.max_pool1d, F.avg_pool1d, lambda *args: F.lp_pool1d(args[0] + 5, 2.0, 3, 2))
    ],
    "padding": lambda x: [
        F.pad(x, edges, value=value)
        for value in (0.0, 9.0, -1.0, math.inf)
        for edges in ((1, 0), (2, 3), (-1, 1))
    ],
    "minima": lambda x: [-F.max_pool1d(-x[None], 3, 1, 1), F.max_pool1d(x[None], 3, 1, 1)],
}  # fmt: skip


@pytest.mark.parametrize(("name", "count", "size"), crossed([*BORDERS], [2, 3, 5, 8], [8, 13]))
def test_windows_of_one_tensor_that_fill_its_borders_with_several_values(name, size, count):
    """In one program, forward and gradient."""
    mesh = axis(count)
    x = torch.rand(3, size) + 0.5

    def computed(x):
        x = x.detach().requires_grad_()
        results = BORDERS[name](x * 1)
        total = sum((y.clamp(max=100) * (i + 1)).sum() for i, y in enumerate(results))
        return *results, *torch.autograd.grad(total, x)

    marked = spmd.mark_sharding(x.to("xla"), mesh, (None, "a"))
    for mine, right in zip(computed(marked), computed(x)):
        torch.testing.assert_close(mine.cpu(), right)


def test_a_reshape_that_also_transposes():
    """Such a reshape of jax's has the order of the dims as a parameter."""

    def function(x: jax.Array) -> list[jax.Array]:
        return [lax.reshape(x, (4, 6), dimensions=(1, 0, 2))]

    x = jnp.arange(24.0).reshape(2, 3, 4)
    splits = Splits(lambda x, num: x, 2)
    (mine,) = in_safe_forms(function, x, splits)
    np.testing.assert_array_equal(mine, function(x)[0])


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(
    "shapes",
    [
        [(8, 1, 1), (2, 4)],
        [(8, 3, 2), (4, 12)],
        [(8, 3, 2), (8, 6), (4, 12)],
        [(8, 3, 2), (4, 2, 6), (4, 12)],
        [(12, 1, 1), (12,), (3, 4)],
        exhaustive([(8, 3, 2, 1), (48,), (6, 8), (2, 24)]),
        exhaustive([(2, 4), (8, 1, 1)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("marked", [False, True])
def test_reshapes_to_fewer_dims_of_which_one_is_shorter(count, shapes, marked):
    """Forward and gradient. XLA's own form of such a reshape, or of all joined, crashes."""
    mesh = axis(count)
    x = torch.randn(shapes[0])

    def reshaped(x, mark):
        x = x.detach().requires_grad_()
        y = mark(x.sin())
        for shape in shapes[1:-1]:
            y = y.reshape(shape) if not marked else mark(y.reshape(shape))
        y = mark(y.reshape(shapes[-1])) ** 2
        return y, *torch.autograd.grad(y.sum(), x)

    def mark(x):
        return spmd.mark_sharding(x, mesh, ("a", *[None] * (x.ndim - 1)))

    for mine, right in zip(reshaped(x.to("xla"), mark), reshaped(x, lambda x: x)):
        torch.testing.assert_close(mine.cpu(), right)


def test_a_program_that_is_made_invalid_is_compiled_with_replicated_indices(
    num_devices,
):
    if num_devices < 8:
        pytest.skip("needs a mesh of 2 by 4 devices")
    mesh = spmd.Mesh(range(8), (2, 4), ("a", "c"))
    rows = torch.arange(32.0).view(8, 4)
    table = spmd.mark_sharding(rows.to("xla"), mesh, ("c", "a"))
    ids = spmd.mark_sharding(torch.arange(7, -1, -1).to("xla"), mesh, ("a",))
    out = spmd.mark_sharding(F.embedding(ids, table), mesh, ("c", "a"))
    with pytest.warns(RuntimeWarning, match=r"(?s)made program .* invalid.*indices.*same axes"):
        result = (out * 1).cpu()
    torch.testing.assert_close(result, rows.flip(0))
    assert spmd.metrics.counter("programs_with_whole_indices") == 1


def test_a_program_that_stays_invalid_is_compiled_replicated():
    mesh = axis(5)
    x = spmd.mark_sharding(torch.arange(6.0).to("xla"), mesh, ("a",))
    halves = [spmd.mark_sharding(half, mesh, (None,)) for half in x.roll(1).roll(-1).split(3)]
    squares = [half * half for half in halves]
    with pytest.warns(RuntimeWarning, match=r"(?s)made program .* invalid.*its tensors replicated"):
        spmd.sync()
    assert [s.tolist() for s in squares] == [[0, 1, 4], [9, 16, 25]]
    assert spmd.metrics.counter("programs_with_whole_everything") == 1


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("of_result", [None, ("y", "x"), (None, "x")])
def test_a_reshape_beside_a_split_dim_of_one_element(of_result, computed):
    """Over two axes; the partitioner crashed where one of them split the dim of one element."""
    mesh = two_axes((2, 4))
    x = torch.arange(36.0).reshape(1, 1, 6, 6)
    ours = x.to("xla") * 1 if computed else x.to("xla")
    spmd.mark_sharding(ours, mesh, (None, "x", None, "y"))
    y = F.pixel_unshuffle(ours, 3)
    if of_result is not None:
        spmd.mark_sharding(y, mesh, of_result)
    torch.testing.assert_close((y * y).cpu(), F.pixel_unshuffle(x, 3).square())
    assert ours.partition_spec == (None, "x", None, "y") and torch.equal(ours.cpu(), x)


@pytest.mark.parametrize(
    ("count", "size", "marks"),
    crossed([2, 4, 8], [4, 5, 8], ["input", "result", "both"], rounds=3),
)
def test_a_padding_that_cuts_elements_off(count, size, marks):
    mesh = axis(count)
    x = torch.arange(1.0, size + 1)
    found, expected = [], []
    for low, high in itertools.product((-3, -1, 0, 2), repeat=2):
        if size + low + high < 1:
            continue
        ours = x.to("xla")
        if marks != "result":
            spmd.mark_sharding(ours, mesh, ("a",))
        y = F.pad(ours, (low, high), value=0.5)
        if marks != "input":
            spmd.mark_sharding(y, mesh, ("a",))
        found.append(y)
        expected.append(F.pad(x, (low, high), value=0.5))
    spmd.sync()
    for mine, right in zip(found, expected):
        torch.testing.assert_close(mine.cpu(), right)


@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("low", [0, 2, 8, exhaustive(14)])
@pytest.mark.parametrize("num", [1, 2, exhaustive(5)])
@pytest.mark.parametrize("more", [0, 1, exhaustive(7)])
def test_a_padding_that_moves_few_elements_over_several_shards(count, low, num, more):
    """Alone, in front of more padding, and as the gradient of a slice."""
    mesh = axis(count)
    x, weight = torch.randn(low + num + more), torch.randn(max(17, low + num + more))
    high = len(weight) - low - num

    def padded(x, weight, mark):
        part = F.pad(x[:num].sin(), (low, high))
        leaf = weight.detach().requires_grad_()
        (leaf[low : low + num] ** 3).sum().backward()
        return mark(part) * 1, mark(leaf.grad) * 1

    mine = padded(x.to("xla"), weight.to("xla"), lambda y: spmd.mark_sharding(y, mesh, ("a",)))
    for got, right in zip(mine, padded(x, weight, lambda y: y)):
        torch.testing.assert_close(got.cpu(), right)


def test_a_padding_between_elements_of_an_empty_tensor():
    mesh = axis(2)
    x = spmd.mark_sharding(torch.randn(0, 3, 8).to("xla").requires_grad_(), mesh, (None, None, "a"))
    (grad,) = torch.autograd.grad(F.avg_pool1d(x, 2, 3).sum() + x[:, :, ::3].sum(), x)
    assert grad.shape == (0, 3, 8) and grad.cpu().numel() == 0


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("start", "step"), [(0, 2), (1, 2), (4, 3), (0, 5)])
@pytest.mark.parametrize(("size", "count"), crossed([6, 8, 12, 13], [8, 2, 4, 6]))
def test_a_padding_between_elements(count, size, start, step, reduced):
    """The gradient of a slice with a step, replicated, for a split tensor."""
    mesh = axis(count)
    grad = torch.arange(1.0, len(range(start, size, step)) + 1).repeat(3, 1)

    def padded(grad):
        return torch.ops.aten.slice_backward(grad, [3, size], 1, start, size, step)

    y = spmd.mark_sharding(padded(grad.to("xla")), mesh, (None, "a"))
    right = padded(grad)
    torch.testing.assert_close(
        (y.sum(1) if reduced else y + 1).cpu(), right.sum(1) if reduced else right + 1
    )


@pytest.mark.parametrize("marks", [(None, None, "x", "y"), ("x", None, ("y",))])
@pytest.mark.parametrize("stride", [2, exhaustive(3)])
def test_the_gradient_of_average_pooling_of_a_split_image(stride, marks):
    mesh = two_axes()
    x = torch.randn(4, 2, 9, 8)
    ours = spmd.mark_sharding(x.to("xla"), mesh, marks).requires_grad_()
    right = x.requires_grad_()
    (found,) = torch.autograd.grad(F.avg_pool2d(ours, 3, stride).square().sum(), ours)
    (expected,) = torch.autograd.grad(F.avg_pool2d(right, 3, stride).square().sum(), right)
    torch.testing.assert_close(found.cpu(), expected)


WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max_pool1d": lambda x: F.max_pool1d(x, 3, stride=2, dilation=2),
    "max_pool1d padded": lambda x: F.max_pool1d(x, 3, stride=2, padding=1),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 3, stride=2, padding=1),
    "lp_pool1d": lambda x: F.lp_pool1d(x, 2.0, 3, stride=2),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 3),
    "conv1d": lambda x: F.conv1d(x, torch.ones_like(x[:, :3])[None], stride=2, dilation=2),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x, torch.ones_like(x[:, None, :3]), stride=2),
}


@pytest.mark.parametrize("size", [8, exhaustive(7), exhaustive(12)])
@pytest.mark.parametrize("count", [2, exhaustive(4)])
@pytest.mark.parametrize("marks_result", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_over_a_tensor_without_a_batch(name, marks_result, count, size):
    mesh = axis(count)
    x = torch.randn(2, size, dtype=torch.float64)

    def computed(x: torch.Tensor, *, marks: bool) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        if marks:
            spmd.mark_sharding(x, mesh, (None, "a"))
        y = WINDOWS[name](x)
        if marks and marks_result:
            spmd.mark_sharding(y, mesh, (None, "a"))
        return [y.detach(), *torch.autograd.grad((y * y).sum(), x)]

    for mine, expected in zip(computed(x.to("xla"), marks=True), computed(x, marks=False)):
        torch.testing.assert_close(mine.cpu(), expected)


EXTREMES: dict[str, Callable[[torch.Tensor], Any]] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0),
    "amax of a view": lambda x: x.t().amax(-1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of rows": lambda x: x.max(0).values,
    "aminmax": lambda x: torch.stack(x.aminmax()),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "least norm": lambda x: torch.linalg.vector_norm(x, float("-inf")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, exhaustive(torch.float64)])
@pytest.mark.parametrize("rows", [8, exhaustive(7)])
@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_over_a_split_dim_keeps_nan(name, rows, dtype):
    x = torch.arange(2.0 * rows, dtype=dtype).view(rows, 2) - rows
    for position, value in [(0, -torch.inf), (2, torch.nan), (3, -0.0), (5, torch.inf)]:
        for column in (0, 1):
            y = x.clone()
            y[position, column] = value
            split = spmd.mark_sharding(y.to("xla"), axis(4), ("a", None))
            torch.testing.assert_close(
                EXTREMES[name](split).cpu(), EXTREMES[name](y), equal_nan=True
            )


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_collective_keeps_nan(op):
    mesh = axis(spmd.global_runtime_device_count())
    rows = mesh.size()
    x = torch.arange(3.0 * rows).view(rows, 3) - rows
    x[rows // 2, 1] = torch.nan
    x[0, 2] = -torch.inf
    split = spmd.mark_sharding(x.to("xla"), mesh, ("a", None))
    reduce = spmd.shard_map(
        lambda block: spmd.manual.all_reduce(block, "a", op), mesh, [("a",)], ()
    )
    right = getattr(x, f"a{op}")(0, keepdim=True)
    torch.testing.assert_close(reduce(split).cpu(), right, equal_nan=True)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_a_sum_of_exponentials_over_a_split_dim_is_nan_by_itself(name):
    x = torch.arange(16.0).view(8, 2) - 8
    x[2, 1] = torch.nan
    split = spmd.mark_sharding(x.to("xla"), axis(4), ("a", None))
    got = getattr(torch, name)(split, 0)
    assert "bitcast_convert" not in spmd.debugging.stablehlo(got)  # no detour by integers
    torch.testing.assert_close(got.cpu(), getattr(torch, name)(x, 0), equal_nan=True)
