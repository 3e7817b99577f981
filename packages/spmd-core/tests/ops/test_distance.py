"""Distances between all pairs of points against eager torch on the CPU."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from oracle import check, lower
from spmd_core.ops import distance
from spmd_core.ops.registry import Out

NORMS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf]


@pytest.mark.parametrize("p", NORMS)
def test_between_two_sets(p):
    a, b = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    check("aten._cdist_forward.default", a, b, p, None)
    check(
        "aten._cdist_backward.default",
        torch.randn(2, 4, 5, dtype=torch.float64),
        a,
        b,
        p,
        torch.cdist(a, b, p),
    )


@pytest.mark.parametrize("p", NORMS)
def test_within_one_set(p):
    x = torch.randn(6, 3, dtype=torch.float64)
    check("aten._pdist_forward.default", x, p)
    # For p < 1 the gradients of torch's CPU kernel do not agree with those of its cdist.
    if p != 0.5:
        check(
            "aten._pdist_backward.default",
            torch.randn(15, dtype=torch.float64),
            x,
            p,
            torch.pdist(x, p),
        )


@pytest.mark.parametrize("num", [0, 1, 2, 3, 150])
def test_the_order_of_pairs(num):
    check("aten._pdist_forward.default", torch.randn(num, 2), 2.0)
    if num < 2:  # torch's CPU kernel of the gradient crashes
        return
    pairs = num * (num - 1) // 2
    check(
        "aten._pdist_backward.default",
        torch.randn(pairs),
        torch.randn(num, 2),
        2.0,
        torch.rand(pairs) + 0.1,
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("num", [4_000, 100_003])
def test_pairs_of_many_points(num):
    """The root in the formula is rounded; the borders between rows of pairs are exact."""
    first = np.array([0, 1, num // 2, num - 3, num - 2])
    begins = first * (2 * num - first - 1) // 2
    pair = np.concatenate([begins, begins[1:] - 1])
    expected_first = np.concatenate([first, first[1:] - 1])
    expected_second = np.concatenate([first + 1, np.full(4, num - 1)])
    with jax.enable_x64(True):
        points = distance.points_of(jnp.asarray(pair), num)
    np.testing.assert_array_equal(points[0], expected_first)
    np.testing.assert_array_equal(points[1], expected_second)


@pytest.mark.parametrize("mode", [None, 0, 1, 2])
def test_many_points_and_each_way_to_compute(mode):
    check(
        "aten._cdist_forward.default", torch.randn(30, 4), torch.randn(26, 4), 2.0, mode, atol=1e-3
    )
    check("aten._cdist_forward.default", torch.randn(3, 4), torch.randn(2, 4), 2.0, mode, atol=1e-3)


def test_equal_points_have_no_gradient():
    x = torch.zeros(2, 3)
    check("aten._cdist_backward.default", torch.ones(2, 2), x, x, 2.0, torch.zeros(2, 2))


def test_empty_sets():
    check("aten._cdist_forward.default", torch.randn(0, 3), torch.randn(2, 3), 2.0, None)
    check("aten._cdist_forward.default", torch.randn(2, 0), torch.randn(3, 0), 2.0, None)


@pytest.mark.parametrize("shapes", [((2, 1, 4, 3), (5, 2, 3)), ((4, 3), (2, 5, 3))])
def test_broadcast_batches_and_their_gradients(shapes):
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        a, b = (torch.randn(shape).to(device).requires_grad_() for shape in shapes)
        out = torch.cdist(a, b, 3.0)
        out.sum().backward()
        results.append([t.detach().cpu() for t in (out, a.grad, b.grad)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0])
def test_a_nan_is_far_from_everything(p):
    check(
        "aten._cdist_forward.default",
        torch.tensor([[math.nan, 0.0], [1.0, 2.0]]),
        torch.zeros(3, 2),
        p,
        None,
    )


# Eager torch's cdist (2.13) keeps the NaN or the number, depending on their order; its pdist keeps
# the NaN.
def test_a_nan_in_the_largest_difference():
    (got,) = lower(
        "aten._cdist_forward.default",
        (torch.tensor([[math.nan, 1.0]]), torch.zeros(1, 2), math.inf, None),
        {},
        (Out((1, 1), torch.float32),),
    )
    assert math.isnan(got.item())


@pytest.mark.parametrize("p", NORMS)
def test_equal_coordinates(p):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-1, 2, shape, generator=generator).double() for shape in ((4, 3), (5, 3)))
    check(
        "aten._cdist_backward.default",
        torch.randn(4, 5, dtype=torch.float64),
        a,
        b,
        p,
        torch.cdist(a, b, p),
    )
