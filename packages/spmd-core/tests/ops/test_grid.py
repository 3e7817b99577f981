"""Grid sampling against eager torch on the CPU: values and both gradients."""

import math

import pytest
import torch
from tiers import crossed

from oracle import check


def grid_of(dtype, *sizes):
    """Coordinates inside and outside, some exactly on an element, on the border or halfway."""
    grid = (
        torch.rand(
            2, *sizes, len(sizes), generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        * 2.6
        - 1.3
    )
    grid.view(-1)[:6] = torch.tensor([-1.0, 1.0, 0.0, 0.5, -0.5, 0.25])
    return grid.to(dtype)


def check_both(name, x, grid, *options):
    check(f"aten.{name}.default", x, grid, *options)
    grad = torch.randn(*x.shape[:2], *grid.shape[1:-1], dtype=x.dtype)
    check(f"aten.{name}_backward.default", grad, x, grid, *options, [True, True])


@pytest.mark.parametrize(
    ("interpolation", "padding", "align_corners"),
    crossed([0, 1, 2], [0, 1, 2], [False, True]),
)
def test_two_dims(interpolation, padding, align_corners):
    check_both(
        "grid_sampler_2d",
        torch.randn(2, 3, 5, 7, dtype=torch.float64),
        grid_of(torch.float64, 4, 3),
        interpolation,
        padding,
        align_corners,
    )


@pytest.mark.parametrize(
    ("interpolation", "padding", "align_corners"), crossed([0, 1], [0, 1, 2], [False, True])
)
def test_three_dims(interpolation, padding, align_corners):
    x = torch.randn(2, 2, 3, 4, 5, dtype=torch.float64)
    check_both(
        "grid_sampler_3d", x, grid_of(torch.float64, 2, 3, 3), interpolation, padding, align_corners
    )


def test_float32_and_one_element():
    check_both(
        "grid_sampler_2d", torch.randn(2, 3, 5, 7), grid_of(torch.float32, 4, 3), 0, 0, False
    )
    check_both(
        "grid_sampler_2d",
        torch.randn(2, 3, 1, 1, dtype=torch.float64),
        grid_of(torch.float64, 4, 3),
        0,
        2,
        True,
    )


def test_only_the_gradients_that_are_asked_for():
    x, grid = torch.randn(2, 3, 5, 7).to("xla"), grid_of(torch.float32, 4, 3).to("xla")
    first, second = torch.ops.aten.grid_sampler_2d_backward(
        torch.ones(2, 3, 4, 3).to("xla"), x, grid, 0, 0, False, [False, True]
    )
    assert first is None
    assert second.shape == grid.shape


@pytest.mark.parametrize("padding", [0, 1, 2], ids=["zeros", "border", "reflection"])
@pytest.mark.parametrize("interpolation", [0, 1, 2], ids=["bilinear", "nearest", "bicubic"])
def test_coordinates_that_are_not_finite_or_far_away(interpolation, padding):
    x = torch.arange(1.0, 7.0).reshape(1, 1, 2, 3)
    far = [
        [math.nan, 0.0],
        [0.0, math.nan],
        [math.inf, 0.0],
        [-math.inf, 0.0],
        [-3.0, 2.0],
        [30.0, 0.1],
    ]
    grid = torch.tensor(far).reshape(1, 1, 6, 2)
    check("aten.grid_sampler_2d.default", x, grid, interpolation, padding, False)
    if interpolation < 2:
        grid = torch.cat([grid, torch.zeros(1, 1, 6, 1)], -1)[:, None]
        check("aten.grid_sampler_3d.default", x[:, :, None], grid, interpolation, padding, False)
