"""Convolutions against eager torch on the CPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from oracle import check, lower
from spmd_core import dtypes
from spmd_core.ops import conv, registry  # noqa: F401  (registers the lowerings)


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# input, weight, stride, padding, dilation, transposed, output_padding, groups
CASES: dict[str, tuple[Any, ...]] = {
    "1d": ((2, 4, 9), (6, 4, 3), [2], [1], [1], False, [0], 1),
    "2d": ((2, 4, 8, 7), (6, 4, 3, 3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "2d strided, padded, dilated": (
        (2, 4, 9, 8),
        (6, 4, 3, 2),
        [2, 3],
        [2, 1],
        [2, 1],
        False,
        [0, 0],
        1,
    ),
    "2d one number for all": ((2, 4, 9, 8), (6, 4, 3, 3), [2], [1], [1], False, [0], 1),
    "2d grouped": ((2, 4, 6, 6), (6, 2, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
    "2d, kernel larger than image": (
        *((2, 4, 2, 2), (6, 4, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
    "2d, kernel larger than result, dilated": (
        *((2, 4, 4, 9), (6, 4, 3, 5), [2, 1], [1, 3], [1, 2], False, [0, 0], 1),
    ),
    "2d, fewer positions than channels": (
        *((2, 3, 4, 5), (24, 3, 3, 2), [2, 1], [1, 1], [1, 2], False, [0, 0], 1),
    ),
    "2d 1x1, fewer positions than channels": (
        *((2, 3, 4, 4), (9, 3, 1, 1), [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    ),
    "3d, kernel larger than image": (
        *((2, 3, 2, 5, 4), (4, 3, 3, 2, 3), [1, 2, 1], [1, 0, 1], [1, 1, 1], False, [0, 0, 0], 1),
    ),
    "1d, kernel larger than image": ((3, 4, 3), (6, 4, 5), [1], [2], [1], False, [0], 1),
    "2d depthwise": ((2, 4, 6, 6), (8, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    "1d depthwise": ((2, 3, 9), (3, 1, 4), [1], [3], [1], False, [0], 3),
    "2d depthwise, strided, dilated": (
        (2, 4, 9, 8),
        (12, 1, 3, 2),
        [2, 1],
        [2, 1],
        [2, 3],
        False,
        [0, 0],
        4,
    ),
    "2d 1x1": ((2, 4, 6, 6), (3, 4, 1, 1), [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    "3d grouped, strided, dilated": (
        (2, 4, 7, 6, 5),
        (6, 2, 2, 3, 2),
        [2, 1, 2],
        [1, 2, 0],
        [3, 1, 2],
        False,
        [0, 0, 0],
        2,
    ),
    "3d": ((1, 2, 5, 6, 4), (3, 2, 2, 3, 2), [1, 2, 1], [0, 1, 1], [1, 1, 2], False, [0, 0, 0], 1),
    "1d transposed": ((2, 4, 5), (4, 3, 3), [2], [1], [1], True, [1], 1),
    "2d transposed": ((2, 4, 5, 4), (4, 3, 3, 2), [2, 1], [1, 0], [1, 1], True, [1, 0], 1),
    "2d transposed, dilated, grouped": (
        (2, 4, 5, 4),
        (4, 3, 3, 2),
        [2, 3],
        [1, 3],
        [2, 1],
        True,
        [1, 2],
        2,
    ),
    "2d transposed, much padding": (
        (1, 2, 6, 6),
        (2, 2, 2, 2),
        [1, 1],
        [3, 2],
        [1, 1],
        True,
        [0, 0],
        1,
    ),
    "3d transposed": (
        (1, 2, 3, 4, 3),
        (2, 3, 2, 3, 2),
        [1, 2, 1],
        [0, 1, 0],
        [1, 1, 1],
        True,
        [0, 1, 0],
        1,
    ),
}


def tensors(
    case: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    x_shape, weight_shape, *geometry = CASES[case]
    transposed, groups = geometry[3], geometry[5]
    num_out = weight_shape[1] * groups if transposed else weight_shape[0]
    return (
        values(dtype, *x_shape),
        values(dtype, *weight_shape, seed=1),
        values(dtype, num_out, seed=2),
        tuple(geometry),
    )


@pytest.mark.parametrize("case", CASES)
def test_convolution(case: str) -> None:
    x, weight, bias, geometry = tensors(case, torch.float32)
    check("aten.convolution.default", x, weight, bias, *geometry, rtol=1e-4, atol=1e-4)
    check("aten.convolution.default", x, weight, None, *geometry, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["2d", "1d transposed"])
def test_convolution_of_sixteen_bits(case: str) -> None:
    x, weight, bias, geometry = tensors(case, torch.bfloat16)
    check("aten.convolution.default", x, weight, bias, *geometry, rtol=2e-2, atol=6e-2)
    grad = torch.ops.aten.convolution(x, weight, bias, *geometry)
    check(
        "aten.convolution_backward.default",
        grad,
        x,
        weight,
        [bias.shape[0]],
        *geometry,
        [True, True, True],
        rtol=2e-2,
        atol=0.3,
    )


def test_convolution_of_an_empty_batch() -> None:
    x, weight, bias, geometry = tensors("2d", torch.float32)
    check("aten.convolution.default", x[:0], weight, bias, *geometry)


@pytest.mark.parametrize("case", CASES)
def test_convolution_backward(case: str) -> None:
    x, weight, bias, geometry = tensors(case, torch.float32)
    grad = torch.ops.aten.convolution(x, weight, bias, *geometry)
    check(
        "aten.convolution_backward.default",
        grad,
        x,
        weight,
        [bias.shape[0]],
        *geometry,
        [True, True, True],
        rtol=1e-4,
        atol=1e-3,
    )


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False], [False, True, True]])
def test_convolution_backward_gives_none_where_no_gradient_is_asked(mask: list[bool]) -> None:
    x, weight, bias, geometry = tensors("2d", torch.float32)
    grad = torch.ops.aten.convolution(x, weight, bias, *geometry)
    expected = torch.ops.aten.convolution_backward(
        grad, x, weight, [bias.shape[0]], *geometry, mask
    )
    outs = tuple(registry.Out(tuple(t.shape), t.dtype) for t in expected if t is not None)
    got = lower(
        "aten.convolution_backward.default",
        (grad, x, weight, [bias.shape[0]], *geometry, mask),
        {},
        outs,
    )
    assert (
        [t is None for t in got] == [t is None for t in expected] == [not asked for asked in mask]
    )
    for mine, right in zip(got, expected):
        if right is not None:
            torch.testing.assert_close(torch.tensor(mine.tolist()), right, rtol=1e-4, atol=1e-3)


def test_overrideable_names_compute_the_same() -> None:
    # torch has no CPU kernel for these names. It calls them on a backend that has no convolution
    # operator of its own.
    x, weight, bias, geometry = tensors("2d grouped", torch.float32)
    right = torch.ops.aten.convolution(x, weight, bias, *geometry)
    (got,) = lower(
        "aten.convolution_overrideable.default",
        (x, weight, bias, *geometry),
        {},
        (registry.Out(tuple(right.shape), right.dtype),),
    )
    torch.testing.assert_close(torch.tensor(got.tolist()), right, rtol=1e-4, atol=1e-4)
    expected = torch.ops.aten.convolution_backward(
        right, x, weight, [6], *geometry, [True, True, True]
    )
    outs = tuple(registry.Out(tuple(t.shape), t.dtype) for t in expected)
    got = lower(
        "aten.convolution_backward_overrideable.default",
        (right, x, weight, *geometry, [True, True, True]),
        {},
        outs,
    )
    for mine, exact in zip(got, expected):
        assert dtypes.to_torch(mine.dtype) == exact.dtype
        torch.testing.assert_close(torch.tensor(mine.tolist()), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [(4, 1), (1, 4), (1, 1)])
@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_a_padded_dim_of_one_element_under_a_stride(size, kernel):
    """XLA's own form of the gradient ends the process for a kernel of 2."""
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        x = torch.randn(2, 3, *size).to(device).requires_grad_()
        w = torch.randn(4, 3, kernel, kernel).to(device).requires_grad_()
        y = torch.conv2d(x, w, stride=2, padding=1)
        grads = torch.autograd.grad((y * y).sum(), (x, w))
        results.append([t.detach().cpu() for t in (y, *grads)])
    for right, mine in zip(*results):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def test_gradients_of_one_row_under_a_stride_and_a_dilation():
    """XLA's simplifier ended the process: the result has one row, and the kernel has gaps."""
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        x, w = (
            torch.randn(shape).to(device).requires_grad_()
            for shape in ((3, 2, 5, 18), (4, 2, 4, 2))
        )
        out = F.conv2d(x, w, stride=(3, 2), padding=(2, 1), dilation=(2, 1))
        results.append([t.cpu() for t in torch.autograd.grad(out.square().sum(), [x, w])])
    for mine, right in zip(*results):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-3)
