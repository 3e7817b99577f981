"""Samplers: moments, ranges, shapes, dtypes, and equal values for equal keys.

Eager torch draws other values, so the values themselves have no reference.
"""

import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiers import exhaustive

from oracle import check, lower
from spmd_core import dtypes
from spmd_core.ops import random as family
from spmd_core.ops import registry

N = 20_000
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# A sampler takes most of a second to compile, so a test of the cast alone uses one wide and one
# narrow dtype.
WIDE_AND_NARROW = [torch.float32, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
MANTISSA = {torch.float32: 24, torch.float64: 53, torch.bfloat16: 8, torch.float16: 11}


SOURCE = pathlib.Path(__file__).read_text(encoding="utf-8")


def sample(
    name: str,
    *args: Any,
    size: tuple[int, ...] = (N,),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **kwargs: Any,
) -> np.ndarray:
    """The op's result for one key, as float64, or int64 for integers.

    Asserts the result's shape and dtype. jax runs the lowering op by op, not as one program, so
    that parts which samplers share are compiled only once.
    """
    context = registry.Context((registry.Out(size, dtype),), "cpu", jax.random.key(seed))
    with jax.enable_x64(True):
        arrays = [
            jnp.asarray(dtypes.numpy_view(x.contiguous())) if isinstance(x, torch.Tensor) else x
            for x in args
        ]
        got = registry.find_lowering(registry.resolve(name)).function(context, *arrays, **kwargs)
    assert got.shape == size
    assert got.dtype == dtypes.to_jax(dtype)
    if dtype.is_complex:
        return np.asarray(got)
    return np.asarray(got).astype(np.float64 if dtype.is_floating_point else np.int64)


def like(dtype: torch.dtype = torch.float32, size: tuple[int, ...] = (N,)) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype)


def near(got: np.ndarray, mean: float, std: float) -> None:
    """Asserts mean and standard deviation; the key is fixed, so this passes always or never."""
    assert abs(got.mean() - mean) < 6 * std / math.sqrt(got.size) + 4e-3 * abs(mean)
    assert abs(got.std() - std) < 0.05 * std


@pytest.mark.parametrize(
    "name",
    sorted(
        str(x.overload)
        for x in registry.registered()
        if x.random and x.function.__module__ == family.__name__
    ),
)
def test_every_sampler_is_tested_here(name: str) -> None:
    assert f'"{name}"' in SOURCE


# Uniform.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform(dtype: torch.dtype) -> None:
    got = sample(
        "aten.uniform.default", like(dtype, (400, 500)), -1.0, 3.0, size=(400, 500), dtype=dtype
    )
    near(got, 1, 4 / math.sqrt(12))
    assert got.min() >= -1
    assert got.max() < 3


def test_uniform_between_equal_bounds() -> None:
    assert (sample("aten.uniform.default", like(), 2.0, 2.0) == 2).all()


def test_uniform_never_reaches_an_upper_bound_that_rounds_up() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        got = sample("aten.uniform.default", like(dtype), 1.0, 1.001, dtype=dtype)
        assert (got == 1).all() if dtype is torch.bfloat16 else got.max() < 1.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_rand_and_randn(dtype: torch.dtype) -> None:
    for name, args in (("aten.rand.default", ([N],)), ("aten.randn.default", ([N],))):
        got = sample(name, *args, dtype=dtype)
        for part in (got.real, got.imag) if dtype.is_complex else (got,):
            if name == "aten.rand.default":
                near(part, 0.5, 1 / math.sqrt(12))
            else:
                near(part, 0, math.sqrt(0.5) if dtype.is_complex else 1)


def test_other_spellings_of_rand_and_randn() -> None:
    for name, args, extra in (
        ("aten.rand.generator", ([9],), {"generator": None}),
        ("aten.rand_like.default", (like(size=(9,)),), {}),
        ("aten.rand_like.generator", (like(size=(9,)),), {"generator": None}),
    ):
        assert (
            sample(name, *args, size=(9,), **extra) == sample("aten.rand.default", [9], size=(9,))
        ).all()
    for name, args, extra in (
        ("aten.randn.generator", ([9],), {"generator": None}),
        ("aten.randn_like.default", (like(size=(9,)),), {}),
        ("aten.randn_like.generator", (like(size=(9,)),), {"generator": None}),
    ):
        assert (
            sample(name, *args, size=(9,), **extra) == sample("aten.randn.default", [9], size=(9,))
        ).all()


# Normal and other continuous distributions.


@pytest.mark.parametrize("dtype", WIDE_AND_NARROW, ids=str)
def test_normal(dtype: torch.dtype) -> None:
    near(sample("aten.normal_functional.default", like(dtype), 2.0, 3.0, dtype=dtype), 2, 3)
    near(sample("aten.normal.float_float", 2.0, 3.0, [N], dtype=dtype), 2, 3)
    mean, std = torch.tensor([[-4.0], [4.0]]).to(dtype), torch.full((10_000,), 0.5, dtype=dtype)
    for row, center in zip(
        sample("aten.normal.Tensor_Tensor", mean, std, size=(2, 10_000), dtype=dtype), (-4, 4)
    ):
        near(row, center, 0.5)
    if dtype is not torch.float32:
        return
    near(
        sample("aten.normal.Tensor_float", mean.expand(2, 10_000), size=(2, 10_000), dtype=dtype)[
            1
        ],
        4,
        1,
    )
    near(sample("aten.normal.float_Tensor", 1.0, std, size=(10_000,), dtype=dtype), 1, 0.5)


def test_a_complex_normal_divides_its_variance() -> None:
    got = sample(
        "aten.normal_functional.default", like(torch.complex64), 0.0, 2.0, dtype=torch.complex64
    )
    near(got.real, 0, math.sqrt(2))
    near(got.imag, 0, math.sqrt(2))


@pytest.mark.parametrize("dtype", WIDE_AND_NARROW, ids=str)
def test_log_normal_and_cauchy(dtype: torch.dtype) -> None:
    got = sample("aten.log_normal.default", like(dtype), 1.0, 0.5, dtype=dtype)
    near(np.log(got), 1, 0.5)
    got = sample("aten.cauchy.default", like(dtype), 1.0, 2.0, dtype=dtype)
    quartiles = np.quantile(got, [0.25, 0.5, 0.75])
    assert np.abs(quartiles - [-1, 1, 3]).max() < 0.2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exponential(dtype: torch.dtype) -> None:
    got = sample(
        "aten.exponential.default", like(dtype, (1000, 1000)), 2.0, size=(1000, 1000), dtype=dtype
    )
    near(got, 0.5, 0.5)
    assert got.min() > 0
    assert np.isfinite(got).all()
    assert sample("aten.exponential.default", like(dtype), 1e7, dtype=dtype).min() > 0


def test_gamma() -> None:
    shape = torch.full((N,), 3.0)
    near(sample("aten._standard_gamma.default", shape), 3, math.sqrt(3))
    alpha = torch.tensor([0.5, 1.0, 3.0, 10.0], dtype=torch.float64)
    check(
        "aten._standard_gamma_grad.default",
        alpha,
        torch.tensor([0.3, 1.5, 2.0, 11.0], dtype=torch.float64),
        rtol=1e-3,
        atol=1e-4,
    )


def test_dirichlet() -> None:
    alpha = torch.tensor([0.5, 1.0, 3.0, 10.0]).expand(N, 4)
    got = sample("aten._sample_dirichlet.default", alpha, size=(N, 4))
    np.testing.assert_allclose(got.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(got.mean(0), alpha[0] / alpha[0].sum(), atol=0.01)
    # Gamma samples this small are all 0 in float32; one of the four gets nearly all the weight.
    tiny = sample("aten._sample_dirichlet.default", torch.full((100, 4), 1e-4), size=(100, 4))
    np.testing.assert_allclose(tiny.max(-1), 1, atol=0.3)


def test_dirichlet_gradient() -> None:
    values = torch.tensor([0.01, 0.5, 2.0, 20.0, 1000.0], dtype=torch.float64)
    alpha, beta = (t.contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.distributions.Beta(alpha, beta).sample().clamp(1e-9, 1 - 1e-9)
    # Eager torch's polynomials are accurate to about three digits.
    check("aten._dirichlet_grad.default", x, alpha, alpha + beta, rtol=5e-3, atol=0)
    # Beta(a, 1) has F = t^a, so the derivative is known: -x log(x) / (a (1 - x)).
    one, t = (
        torch.ones(5, dtype=torch.float64),
        torch.tensor([1e-6, 0.1, 0.5, 0.9, 0.999], dtype=torch.float64),
    )
    (got,) = lower(
        "aten._dirichlet_grad.default",
        (t, 3 * one, 4 * one),
        {},
        (registry.Out((5,), torch.float64),),
    )
    np.testing.assert_allclose(got, (-t * t.log() / (3 * (1 - t))).numpy(), rtol=1e-6)


# Discrete distributions.


@pytest.mark.parametrize("dtype", [*WIDE_AND_NARROW, torch.int64, torch.bool], ids=str)
def test_bernoulli(dtype: torch.dtype) -> None:
    for p in (0.0, 0.3, 1.0):
        got = sample("aten.bernoulli.p", like(dtype), p, dtype=dtype)
        assert set(np.unique(got)) <= {0, 1}
        near(got, p, math.sqrt(p * (1 - p))) if 0 < p < 1 else None
        assert (got == p).all() or 0 < p < 1
    rows = torch.tensor([[0.0], [0.25], [1.0]]).expand(3, N)
    got = sample("aten.bernoulli.Tensor", like(dtype, (3, N)), rows, size=(3, N), dtype=dtype)
    assert (got[0] == 0).all()
    near(got[1], 0.25, math.sqrt(0.25 * 0.75))
    assert (got[2] == 1).all()
    if dtype.is_floating_point:
        near(
            sample("aten.bernoulli.default", torch.full((N,), 0.25, dtype=dtype), dtype=dtype),
            0.25,
            math.sqrt(0.25 * 0.75),
        )


def test_a_rare_event_is_as_rare_as_asked() -> None:
    assert sample("aten.bernoulli.p", like(size=(3000, 1000)), 1e-9, size=(3000, 1000)).sum() == 0


@pytest.mark.parametrize("dtype", WIDE_AND_NARROW, ids=str)
def test_dropout(dtype: torch.dtype) -> None:
    x = torch.full((N,), 3.0, dtype=dtype)
    outs = (registry.Out((N,), dtype), registry.Out((N,), torch.bool))
    for train in (True, None):
        result, mask = (
            np.asarray(y).astype(np.float64)
            for y in lower(
                "aten.native_dropout.default", (x, 0.25, train), {}, outs, jax.random.key(0)
            )
        )
        near(mask, 0.75, math.sqrt(0.25 * 0.75))
        right = torch.where(torch.from_numpy(mask).bool(), x / 0.75, torch.zeros_like(x))
        np.testing.assert_allclose(
            result, right.double().numpy(), rtol=8e-3 if dtype is torch.bfloat16 else 1e-3
        )
    for p, train, kept in ((0.25, False, 3.0), (0.0, True, 3.0), (1.0, True, 0.0)):
        result, mask = lower(
            "aten.native_dropout.default", (x, p, train), {}, outs, jax.random.key(0)
        )
        assert (np.asarray(result) == kept).all()
        assert np.asarray(mask).all() == (kept > 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradient_of_dropout(dtype: torch.dtype) -> None:
    mask = torch.tensor([True, False, True])
    check(
        "aten.native_dropout_backward.default",
        torch.tensor([1.0, 2.0, float("nan")], dtype=dtype),
        mask,
        1 / 0.9,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
def test_geometric(dtype: torch.dtype) -> None:
    got = sample("aten.geometric.default", like(dtype), 0.2, dtype=dtype)
    near(got, 5, math.sqrt(0.8) / 0.2)
    assert got.min() == 1
    assert (sample("aten.geometric.default", like(dtype), 1.0, dtype=dtype) == 1).all()


def test_poisson_and_binomial() -> None:
    rates = [0.0, 0.5, 40.0]
    got = sample("aten.poisson.default", torch.tensor(rates)[:, None].expand(3, N), size=(3, N))
    assert (got[0] == 0).all()
    for row, rate in zip(got[1:], rates[1:]):
        near(row, rate, math.sqrt(rate))
    near(
        sample("aten.binomial.default", torch.full((N,), 20.0), torch.full((N,), 0.3)),
        6,
        math.sqrt(20 * 0.3 * 0.7),
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, exhaustive(torch.float64), torch.bfloat16], ids=str
)
def test_multinomial_with_replacement(dtype: torch.dtype) -> None:
    weights = torch.tensor([[0.0, 1, 0, 3, 0], [2, 0, 2, 4, 0]]).to(dtype)
    got = sample(
        "aten.multinomial.default", weights, 10_000, True, size=(2, 10_000), dtype=torch.int64
    )
    for row, weight in zip(got, weights.double().numpy()):
        counts = np.bincount(row, minlength=5)
        assert (counts[weight == 0] == 0).all()
        np.testing.assert_allclose(counts / 10_000, weight / weight.sum(), atol=0.03)
    assert (
        sample("aten.multinomial.default", weights[0], 50, True, size=(50,), dtype=torch.int64) % 2
        == 1
    ).all()
    assert (
        sample(
            "aten.multinomial.default",
            weights.repeat(500, 1),
            1,
            True,
            size=(1000, 1),
            dtype=torch.int64,
        )
        < 4
    ).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_multinomial_without_replacement(dtype: torch.dtype) -> None:
    weights = torch.tensor([1.0, 0, 2, 5, 0]).to(dtype).repeat(3000, 1)
    got = sample("aten.multinomial.default", weights, 3, size=(3000, 3), dtype=torch.int64)
    assert (np.sort(got) == [0, 2, 3]).all()
    np.testing.assert_allclose(
        np.bincount(got[:, 0], minlength=5) / 3000, np.array([1, 0, 2, 5, 0]) / 8, atol=0.04
    )


# Integers.


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_random_integers_without_bounds(dtype: torch.dtype) -> None:
    got = sample("aten.random.default", like(dtype), dtype=dtype)
    highest = (
        1
        if dtype is torch.bool
        else 2 ** MANTISSA[dtype]
        if dtype.is_floating_point
        else torch.iinfo(dtype).max
    )
    assert got.min() >= 0
    assert got.max() <= highest
    near(got / highest, 0.5, 0.5 if dtype is torch.bool else math.sqrt(1 / 12))
    assert (got == np.floor(got)).all()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_random_integers_in_bounds(dtype: torch.dtype) -> None:
    assert set(np.unique(sample("aten.random.from", like(dtype), 3, 7, dtype=dtype))) == {
        3,
        4,
        5,
        6,
    }
    got = sample("aten.random.from", like(dtype), 3, None, dtype=dtype)
    assert got.min() >= 3
    assert got.max() > 100


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_randint(dtype: torch.dtype) -> None:
    x, any_generator = like(dtype), {"generator": None, "dtype": dtype}
    for got in (
        sample("aten.random.to", x, 3, dtype=dtype),
        sample("aten.randint.default", 3, [N], dtype=dtype),
        sample("aten.randint.generator", 3, [N], **any_generator),
        sample("aten.randint_like.default", x, 3, dtype=dtype),
        sample("aten.randint_like.generator", x, 3, **any_generator),
        sample("aten.randint_like.Tensor", x, torch.tensor(3), dtype=dtype),
        sample("aten.randint_like.Tensor_generator", x, torch.tensor(3), **any_generator),
        sample("aten.randint.low", -2, 1, [N], dtype=dtype) + 2,
        sample("aten.randint.low_generator", -2, 1, [N], **any_generator) + 2,
        sample("aten.randint_like.low_dtype", x, -2, 1, dtype=dtype) + 2,
        sample("aten.randint_like.low_generator_dtype", x, -2, 1, **any_generator) + 2,
    ):
        assert (np.unique(got) == [0, 1, 2]).all()
        near(got, 1, math.sqrt(2 / 3))


def test_random_integers_over_all_of_int64() -> None:
    whole = sample("aten.random.from", like(torch.int64), -(2**63), None, dtype=torch.int64)
    near(whole / 2.0**63, 0, 2 / math.sqrt(12))
    high = sample("aten.random.from", like(torch.int64), 2**62, None, dtype=torch.int64)
    near(high / 2.0**63, 0.75, 0.5 / math.sqrt(12))
    near(
        sample("aten.randint.low", -(2**62), 2**62, [N], dtype=torch.int64) / 2.0**62,
        0,
        2 / math.sqrt(12),
    )
    lopsided = sample("aten.random.from", like(torch.int64), -5, None, dtype=torch.int64)
    assert lopsided.min() >= -5
    near(lopsided / 2.0**63, 0.5, 1 / math.sqrt(12))


def test_floats_never_round_up_to_the_bound() -> None:
    assert sample("aten.random.to", like(torch.bfloat16), 1000, dtype=torch.bfloat16).max() < 1000
    assert sample("aten.randint.default", 2**24 + 1, [N], dtype=torch.float32).max() < 2**24 + 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_randperm(dtype: torch.dtype) -> None:
    for n in (0, 1, 100):
        got = sample("aten.randperm.default", n, size=(n,), dtype=dtype)
        assert (np.sort(got) == np.arange(n)).all()
    assert (got != np.arange(100)).any()
    assert (
        np.sort(sample("aten.randperm.generator", 9, generator=None, size=(9,), dtype=dtype))
        == np.arange(9)
    ).all()


# For all of them.


def test_the_key_decides_the_values() -> None:
    for name, args in (
        ("aten.uniform.default", (like(size=(50,)),)),
        ("aten.bernoulli.p", (like(size=(50,)), 0.5)),
    ):
        once, again, other = (sample(name, *args, size=(50,), seed=seed) for seed in (3, 3, 4))
        assert (once == again).all()
        assert (once != other).any()
        (program,) = lower(name, args, {}, (registry.Out((50,), torch.float32),), jax.random.key(3))
        assert (np.asarray(program) == once).all()


def test_no_elements() -> None:
    for name in (
        "aten.uniform.default",
        "aten.exponential.default",
        "aten.random.default",
        "aten.bernoulli.p",
    ):
        assert sample(name, like(size=(0, 3)), size=(0, 3)).size == 0
    assert sample("aten.randn.default", [], size=()).shape == ()


# The sampler under test: "aten.rrelu_with_noise_functional.default".
def test_rrelu_draws_slopes_for_what_is_not_positive():
    x = torch.randn(1000).to("xla").requires_grad_()
    out = torch.nn.functional.rrelu(x, 0.2, 0.4, training=True)
    out.sum().backward()
    values, results = x.detach().cpu(), out.detach().cpu()
    negative = values <= 0
    slopes = (results / values)[negative]
    assert torch.equal(results[~negative], values[~negative])
    assert 0.2 <= slopes.min() < 0.22
    assert 0.38 < slopes.max() <= 0.4
    torch.testing.assert_close(
        x.grad.cpu(), torch.where(negative, results / values, torch.ones_like(values))
    )


def test_rrelu_without_training_draws_nothing():
    state = torch.get_rng_state()
    x = torch.randn(10, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        torch.nn.functional.rrelu(x.to("xla")).cpu(), torch.nn.functional.rrelu(x)
    )
    y = x.to("xla")
    torch.nn.functional.rrelu_(y)
    torch.testing.assert_close(y.cpu(), torch.nn.functional.rrelu(x))
    assert torch.equal(state, torch.get_rng_state())


def test_binomial_without_a_generator():
    count, prob = torch.full((3, 4), 5.0, device="xla"), torch.full((3, 4), 0.5, device="xla")
    drawn = torch.binomial(count, prob)
    assert drawn.shape == (3, 4) and drawn.min() >= 0 and drawn.max() <= 5
    sampled = torch.distributions.Binomial(5, probs=prob).sample((7,))
    assert sampled.shape == (7, 3, 4)
