"""Tests torch_xla.experimental.assume_pure."""

import copy

import pytest
import torch
from torch import nn

from torch_xla.experimental.assume_pure import PureModule, assume_pure, assume_pure_torch


def test_a_function_and_its_gradients():
    @assume_pure
    def scaled(x, factor, *, shift=0):
        """Says what it does."""
        return {"y": (x * factor + shift).sin(), "n": factor}

    assert scaled.__name__ == "scaled" and scaled.__doc__ == "Says what it does."
    x = torch.linspace(0, 1, 4)
    for factor in (2, 3):
        given = x.to("xla").requires_grad_()
        found = scaled(given, factor, shift=1)
        found["y"].sum().backward()
        assert found["n"] == factor
        torch.testing.assert_close(found["y"].detach().cpu(), (x * factor + 1).sin())
        torch.testing.assert_close(given.grad.cpu(), (x * factor + 1).cos() * factor)


def test_random_numbers_by_a_seed():
    noise = assume_pure(torch.rand_like, add_rng_seed_argument=True)
    x = torch.zeros(100, device="xla")
    torch.manual_seed(0)
    without = torch.rand_like(x).tolist()
    torch.manual_seed(0)
    first, again, other = noise(x, rng_seed=1), noise(x, rng_seed=1), noise(x, rng_seed=2)
    assert torch.rand_like(x).tolist() == without  # the stream outside went on as if nothing was
    assert torch.equal(first.cpu(), again.cpu()) and not torch.equal(first.cpu(), other.cpu())
    with pytest.raises(AssertionError, match=r"Pass rng_seed=0"):
        noise(x)
    with pytest.raises(TypeError, match=r"got float\. Pass int\(rng_seed\)"):
        noise(x, rng_seed=1.0)
    plain = assume_pure(lambda x, rng_seed: x + rng_seed)
    assert plain(x[:2], rng_seed=3).tolist() == [3, 3]  # an argument as any other

    def fails(x):
        torch.rand_like(x)
        raise KeyError

    torch.manual_seed(0)
    with pytest.raises(KeyError):
        assume_pure(fails, add_rng_seed_argument=True)(x, rng_seed=5)
    assert torch.rand_like(x).tolist() == without


def test_a_module():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    pure = PureModule(copy.deepcopy(plain)).to("xla")
    copied = copy.deepcopy(pure)
    x = torch.randn(5, 4)
    plain(x).square().sum().backward()
    pure(x.to("xla")).square().sum().backward()
    for a, b in zip(pure.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)
    for a, b in zip(pure.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a.cpu(), b)
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert not torch.equal(copied(x.to("xla")).cpu(), pure(x.to("xla")).detach().cpu())


def test_functions_without_gradients():
    with pytest.raises(AssertionError, match=r"inside of torch.no_grad\(\), or use assume_pure"):
        assume_pure_torch(torch.sin)
    with torch.no_grad():
        sine = assume_pure_torch(torch.sin, use_cache=True)
    x = torch.ones(3, device="xla", requires_grad=True)
    result = sine(x)
    assert not result.requires_grad
    torch.testing.assert_close(result.cpu(), torch.ones(3).sin())
