"""Random samplers: one seed gives the same global tensor on any mesh.

`ctx.key` and the shape determine every value. Only jax.random functions are used, because their
values do not depend on how the result is partitioned; their bits are drawn where they are read
(`ops/kernels/threefry.py`). 16-bit floats are sampled in float32 and cast. torch's `generator`
argument is ignored: the caller has derived the key from it. Probabilities and weights are not
checked, because their values are on the device.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd_core.ops.kernels import index_rules, loops
from spmd_core.ops.kernels.booleans import cast
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.threefry import fused
from spmd_core.ops.kernels.traits import Traits
from spmd_core.ops.registry import Context, Number, as_array, lowering


def _key(ctx: Context) -> jax.Array:
    return fused(_key_for_loops(ctx))


def _key_for_loops(ctx: Context) -> jax.Array:
    """jax's own key, for its samplers that draw until a value is accepted."""
    assert ctx.key is not None, "a lowering registered with random=True is called with a key"
    return ctx.key


def _sampling_dtype(dtype: np.dtype) -> np.dtype:
    """The float dtype in which values for a result of `dtype` are drawn."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.finfo(dtype).dtype
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def _largest_below(dtype: np.dtype, bound: float) -> float:
    """The largest number of the float dtype that is less than `bound`."""
    nearest = np.asarray(bound).astype(dtype)
    return float(
        nearest if float(nearest) < bound else np.nextafter(nearest, np.asarray(-np.inf, dtype))
    )


# Uniform floats.


def _uniform_between(ctx: Context, low: float, high: float) -> jax.Array:
    """Uniform on [low, high).

    Rounding in the scaling or in the cast may give `high`; such values become the number below it.
    """
    dtype = ctx.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = (
            jax.random.uniform(_key(ctx), (*ctx.shape, 2), _sampling_dtype(dtype)) * (high - low)
            + low
        )
        return lax.complex(parts[..., 0], parts[..., 1])
    unit = jax.random.uniform(_key(ctx), ctx.shape, _sampling_dtype(dtype))
    scaled = (unit * (high - low) + low).astype(dtype)
    return (
        scaled
        if high <= low
        else jnp.minimum(scaled, np.asarray(_largest_below(dtype, high), dtype))
    )


@lowering("aten.uniform.default", random=True)
def _uniform(
    ctx: Context, x: jax.Array, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> jax.Array:
    return _uniform_between(ctx, low, high)


@lowering(
    "aten.rand.default",
    "aten.rand.generator",
    "aten.rand_like.default",
    "aten.rand_like.generator",
    random=True,
)
def _rand(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return _uniform_between(ctx, 0.0, 1.0)


# Normal floats.


def _normal_with(ctx: Context, mean: Any, std: Any) -> jax.Array:
    """Normal. For a complex dtype each part has half of the variance `std`^2."""
    wide = (
        ctx.dtype if jnp.issubdtype(ctx.dtype, jnp.complexfloating) else _sampling_dtype(ctx.dtype)
    )
    return (
        jax.random.normal(_key(ctx), ctx.shape, wide) * jnp.asarray(std, wide)
        + jnp.asarray(mean, wide)
    ).astype(ctx.dtype)


@lowering(
    "aten.randn.default",
    "aten.randn.generator",
    "aten.randn_like.default",
    "aten.randn_like.generator",
    random=True,
)
def _randn(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return _normal_with(ctx, 0.0, 1.0)


@lowering("aten.normal_functional.default", random=True)
def _normal_functional(
    ctx: Context, x: jax.Array, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> jax.Array:
    return _normal_with(ctx, mean, std)


@lowering(
    "aten.normal.Tensor_Tensor",
    "aten.normal.Tensor_float",
    "aten.normal.float_Tensor",
    "aten.normal.float_float",
    random=True,
)
def _normal(ctx: Context, mean: Any, std: Any = 1.0, *_: Any, **__: Any) -> jax.Array:
    return _normal_with(ctx, mean, std)


@lowering("aten.log_normal.default", random=True)
def _log_normal(
    ctx: Context, x: jax.Array, mean: float = 1.0, std: float = 2.0, *, generator: Any = None
) -> jax.Array:
    wide = _sampling_dtype(ctx.dtype)
    return jnp.exp(jax.random.normal(_key(ctx), ctx.shape, wide) * std + mean).astype(ctx.dtype)


# Other continuous distributions.


@lowering("aten.exponential.default", random=True)
def _exponential(
    ctx: Context, x: jax.Array, lambd: float = 1.0, *, generator: Any = None
) -> jax.Array:
    wide = _sampling_dtype(ctx.dtype)
    # A uniform draw may be 0, whose logarithm below is 0. Half of the smallest step between draws
    # replaces it, as in torch's kernel.
    half_step = np.asarray(np.finfo(wide).eps / 2, wide)
    positive = jnp.maximum(-jnp.log1p(-jax.random.uniform(_key(ctx), ctx.shape, wide)), half_step)
    info = jnp.finfo(ctx.dtype)
    floor = info.smallest_subnormal if ctx.dtype == np.float16 else info.tiny
    return jnp.clip((positive / lambd).astype(ctx.dtype), floor, info.max)


@lowering("aten.cauchy.default", random=True)
def _cauchy(
    ctx: Context, x: jax.Array, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None
) -> jax.Array:
    return (
        jax.random.cauchy(_key(ctx), ctx.shape, _sampling_dtype(ctx.dtype)) * sigma + median
    ).astype(ctx.dtype)


@lowering(
    "aten._standard_gamma.default",
    random=True,
    meta=lambda x, generator=None: torch.empty_like(x),
)
def _standard_gamma(ctx: Context, x: jax.Array, generator: Any = None) -> jax.Array:
    return jax.random.gamma(_key_for_loops(ctx), x.astype(_sampling_dtype(ctx.dtype))).astype(
        ctx.dtype
    )


@lowering("aten._standard_gamma_grad.default", meta=lambda x, output: torch.empty_like(x))
def _standard_gamma_grad(ctx: Context, x: jax.Array, output: jax.Array) -> jax.Array:
    wide = _sampling_dtype(ctx.dtype)
    return lax.random_gamma_grad(x.astype(wide), output.astype(wide)).astype(ctx.dtype)


@lowering(
    "aten._sample_dirichlet.default",
    random=True,
    meta=lambda x, generator=None: torch.empty_like(x, memory_format=torch.contiguous_format),
)
def _sample_dirichlet(ctx: Context, x: jax.Array, generator: Any = None) -> jax.Array:
    concentration = x.astype(_sampling_dtype(ctx.dtype))
    # Normalized in logarithms, so that a row adds up to 1 even if all of its gammas underflow, as
    # those of small concentrations do.
    return jax.nn.softmax(jax.random.loggamma(_key_for_loops(ctx), concentration), axis=-1).astype(
        ctx.dtype
    )


# Nodes and weights of the double exponential rule for an integral over (0, inf) whose integrand
# decays like exp(-y), with y = exp(u - exp(-u)): Takahasi and Mori 1974, "Double exponential
# formulas for numerical integration".
_U = np.arange(-4.0, 4.6, 0.1)
_NODES = np.exp(_U - np.exp(-_U))
_NODE_WEIGHTS = _NODES * (1 + np.exp(-_U)) * 0.1


@lowering(
    "aten._dirichlet_grad.default",
    meta=lambda x, alpha, total: torch.empty_like(x, memory_format=torch.contiguous_format),
)
def _dirichlet_grad(ctx: Context, x: jax.Array, alpha: jax.Array, total: jax.Array) -> jax.Array:
    """The derivative of a sample by its own concentration: -(dF/d alpha) / (1 - x) / F'.

    F is the distribution function of Beta(alpha, total - alpha) (Figurnov, Mohamed, Mnih 2018,
    "Implicit reparameterization gradients", eq. 5). dF/d alpha is the integral of
    (log t - E log T) p(t) over t < x. The integral over all t is 0, so dF/d alpha is also minus the
    integral over t > x; of the two, the one whose integrand has one sign is computed. The variable
    of integration is y = logit t, and the integrand is relative to its value at x.
    """
    wide = np.dtype(np.float64)
    x, a, total = (y.astype(wide) for y in (x, alpha, total))
    b = total - a
    y_end, mean_log = (
        jnp.log(x) - jnp.log1p(-x),
        jax.scipy.special.digamma(a) - jax.scipy.special.digamma(total),
    )
    left = jnp.log(x) < mean_log
    direction = jnp.where(left, -1.0, 1.0)
    scale = jnp.maximum(1 / jnp.where(left, a, b), jnp.sqrt(1 / a + 1 / b))

    def add(total_so_far: jax.Array, node: Any) -> tuple[jax.Array, None]:
        at, weight = node
        y = y_end + direction * scale * at
        log_t = jax.nn.log_sigmoid(y)
        # p(t) dt = t^a (1-t)^b dy, divided by its value at x
        density = jnp.exp(a * (log_t - jnp.log(x)) + b * (jax.nn.log_sigmoid(-y) - jnp.log1p(-x)))
        return total_so_far + weight * density * (log_t - mean_log), None

    summed, _ = loops.scan(
        add, jnp.zeros_like(x), (jnp.asarray(_NODES), jnp.asarray(_NODE_WEIGHTS))
    )
    # The sum is relative to x^a (1-x)^b, and F' is x^(a-1) (1-x)^(b-1). This gives a factor
    # x (1-x), of which the division by (1-x) leaves x.
    return (direction * scale * summed * x).astype(ctx.dtype)


# Discrete distributions.


def _coin(key: Any, p: float, shape: tuple[int, ...]) -> jax.Array:
    """True with probability `p`, to 2**-32.

    A float32 draw has only 23 random bits, and would treat a p below 2**-23 as 2**-23.
    """
    threshold = round(p * 2**32)
    if threshold >= 2**32:
        return jnp.ones(shape, bool)
    return jax.random.bits(key, shape, np.uint32) < np.uint32(threshold)


@lowering("aten.bernoulli.p", random=True)
def _bernoulli_p(ctx: Context, x: jax.Array, p: float = 0.5, *, generator: Any = None) -> jax.Array:
    return cast(_coin(_key(ctx), p, ctx.shape), ctx.dtype)


@lowering("aten.bernoulli.default", "aten.bernoulli.Tensor", random=True)
def _bernoulli(
    ctx: Context, x: jax.Array, p: jax.Array | None = None, *, generator: Any = None
) -> jax.Array:
    probability = x if p is None else p
    wide = _sampling_dtype(probability.dtype)
    drawn = jax.random.uniform(_key(ctx), ctx.shape, wide) < probability.astype(wide)
    return cast(drawn, ctx.dtype)


@lowering("aten.native_dropout.default", random=True)
def _native_dropout(
    ctx: Context, x: jax.Array, p: float, train: bool | None
) -> tuple[jax.Array, jax.Array]:
    if train is False:
        return x, jnp.ones(ctx.shape, bool)
    mask = _coin(_key(ctx), 1.0 - p, ctx.shape)
    scale = 0.0 if p >= 1 else 1.0 / (1.0 - p)
    # A product and not a select: a dropped NaN stays NaN, as in torch.
    wide = opmath(x.dtype)
    return (x.astype(wide) * cast(mask, wide) * jnp.asarray(scale, wide)).astype(ctx.dtype), mask


@lowering("aten.native_dropout_backward.default")
def _native_dropout_backward(
    ctx: Context, grad_output: jax.Array, mask: jax.Array, scale: float
) -> jax.Array:
    wide = opmath(ctx.dtype)
    return (grad_output.astype(wide) * cast(mask, wide) * jnp.asarray(scale, wide)).astype(
        ctx.dtype
    )


@lowering("aten.rrelu_with_noise_functional.default", random=True)
def _rrelu_with_noise(
    ctx: Context,
    x: jax.Array,
    noise: jax.Array,
    lower: Number,
    upper: Number,
    training: bool,
    generator: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """RReLU in training; outside training the router records a leaky_relu, which draws nothing."""
    low, high = (as_array(bound, _sampling_dtype(x.dtype)) for bound in (lower, upper))
    slopes = jax.random.uniform(_key(ctx), x.shape, _sampling_dtype(x.dtype)) * (high - low) + low
    factors = jnp.where(x <= 0, slopes, jnp.ones_like(slopes)).astype(ctx.dtype)
    return x * factors, factors


@lowering("aten.geometric.default", random=True)
def _geometric(ctx: Context, x: jax.Array, p: float, *, generator: Any = None) -> jax.Array:
    wide = _sampling_dtype(ctx.dtype)
    unit = jax.random.uniform(_key(ctx), ctx.shape, wide)
    trials = jnp.ceil(jnp.log1p(-unit) / (math.log1p(-p) if p < 1 else -math.inf))
    return jnp.maximum(trials, 1).astype(ctx.dtype)


@lowering("aten.poisson.default", random=True)
def _poisson(ctx: Context, x: jax.Array, generator: Any = None) -> jax.Array:
    return jax.random.poisson(
        _key_for_loops(ctx), x.astype(_sampling_dtype(ctx.dtype)), ctx.shape, np.int64
    ).astype(ctx.dtype)


def _binomial_meta(count: torch.Tensor, prob: torch.Tensor, generator: Any = None) -> torch.Tensor:
    """torch has no meta kernel; its CPU kernel reads a `prob` that broadcasts to `count`."""
    return torch.empty_like(count, memory_format=torch.contiguous_format)


@lowering("aten.binomial.default", random=True, meta=_binomial_meta)
def _binomial(ctx: Context, count: jax.Array, prob: jax.Array, generator: Any = None) -> jax.Array:
    wide = _sampling_dtype(ctx.dtype)
    return jax.random.binomial(
        _key_for_loops(ctx), count.astype(wide), prob.astype(wide), ctx.shape, wide
    ).astype(ctx.dtype)


@lowering(
    "aten.multinomial.default", random=True, traits=Traits(bounds=index_rules.positions(0, -1))
)
def _multinomial(
    ctx: Context,
    weights: jax.Array,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Any = None,
) -> jax.Array:
    weights = weights.astype(_sampling_dtype(weights.dtype))
    if not replacement or num_samples == 1:
        # Gumbel top-k: the k largest of log-weight plus Gumbel noise are a sample without
        # replacement (Kool et al. 2019, section 3).
        noise = jax.random.gumbel(_key(ctx), weights.shape, weights.dtype)
        return lax.top_k(jnp.log(weights) + noise, num_samples)[1].astype(ctx.dtype)
    # By the inverse of the cumulative sum: Gumbel noise for each pair of sample and category could
    # need far more memory than the weights. A parallel sum may decrease from rounding. The running
    # maximum, over the categories that have a weight, cannot, and never draws one without weight.
    cumulative = lax.cummax(
        jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0), axis=weights.ndim - 1
    )
    at = jax.random.uniform(_key(ctx), ctx.shape, weights.dtype) * cumulative[..., -1:]
    find = jnp.vectorize(
        lambda c, v: jnp.searchsorted(c, v, side="right"), signature="(n),(k)->(k)"
    )
    return find(cumulative, at).astype(ctx.dtype)


# Integers.


def _integers(ctx: Context, low: int, high: int) -> jax.Array:
    """Integers from `low` to `high` - 1 in the result's dtype.

    `high` may be the dtype's largest number plus 1.
    """
    dtype = ctx.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        drawn = _uniform_integers(_key(ctx), ctx.shape, low, high).astype(dtype)
        # Rounding may give `high`, as in `_uniform_between`.
        return (
            jnp.minimum(drawn, np.asarray(_largest_below(dtype, high), dtype))
            if math.isfinite(float(np.asarray(high).astype(dtype)))
            else drawn
        )
    return _uniform_integers(_key(ctx), ctx.shape, low, high).astype(dtype)


def _uniform_integers(key: Any, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
    """Integers in [low, high), in a dtype that holds them.

    That is int32 where both bounds fit, else int64, or uint64 for numbers that int64 cannot hold.
    """
    if low >= -(2**31) and high < 2**31:
        return jax.random.randint(key, shape, low, high, np.int32)
    if low >= -(2**63) and high < 2**63:
        return jax.random.randint(key, shape, low, high, np.int64)
    # All 64 bits are needed. The remainder of a division favors no number by more than one part in
    # 2**64 / (high - low).
    bits = jax.random.bits(key, shape, np.uint64)
    span = high - low
    offset = bits if span >= 2**64 else bits % np.uint64(span)
    shifted = offset + np.uint64(low % 2**64)
    return shifted if low >= 0 and high > 2**63 else lax.bitcast_convert_type(shifted, np.int64)


def _highest(dtype: np.dtype) -> int:
    """The largest number that torch's random_() draws without bounds.

    For a float dtype it is the end of the range in which the dtype holds every integer.
    """
    if dtype == np.bool_:
        return 1
    if jnp.issubdtype(dtype, jnp.floating):
        return 2 ** (jnp.finfo(dtype).nmant + 1)
    return int(np.iinfo(dtype).max)


_INTEGERS = Traits(bounds=index_rules.between("low", "high"))


@lowering("aten.random.default", random=True)
def _random(ctx: Context, x: jax.Array, *, generator: Any = None) -> jax.Array:
    return _integers(ctx, 0, _highest(ctx.dtype) + 1)


@lowering("aten.random.to", random=True, traits=Traits(bounds=index_rules.between("from", "to")))
def _random_to(ctx: Context, x: jax.Array, to: int, *, generator: Any = None) -> jax.Array:
    return _integers(ctx, 0, to)


@lowering("aten.random.from", random=True, traits=Traits(bounds=index_rules.between("from", "to")))
def _random_from(
    ctx: Context, x: jax.Array, low: int, to: int | None, *, generator: Any = None
) -> jax.Array:
    return _integers(ctx, low, _highest(ctx.dtype) + 1 if to is None else to)


@lowering("aten.randint.default", "aten.randint.generator", random=True, traits=_INTEGERS)
def _randint(ctx: Context, high: int, size: list[int], **_: Any) -> jax.Array:
    return _integers(ctx, 0, high)


@lowering("aten.randint.low", "aten.randint.low_generator", random=True, traits=_INTEGERS)
def _randint_low(ctx: Context, low: int, high: int, size: list[int], **_: Any) -> jax.Array:
    return _integers(ctx, low, high)


@lowering("aten.randint_like.default", "aten.randint_like.generator", random=True, traits=_INTEGERS)
def _randint_like(ctx: Context, x: jax.Array, high: int, **_: Any) -> jax.Array:
    return _integers(ctx, 0, high)


@lowering(
    "aten.randint_like.low_dtype",
    "aten.randint_like.low_generator_dtype",
    random=True,
    traits=_INTEGERS,
)
def _randint_like_low(ctx: Context, x: jax.Array, low: int, high: int, **_: Any) -> jax.Array:
    return _integers(ctx, low, high)


@lowering("aten.randint_like.Tensor", "aten.randint_like.Tensor_generator", random=True)
def _randint_like_tensor(ctx: Context, x: jax.Array, high: jax.Array, **_: Any) -> jax.Array:
    return jax.random.randint(_key(ctx), ctx.shape, 0, high.astype(np.int64), np.int64).astype(
        ctx.dtype
    )


@lowering(
    "aten.randperm.default",
    "aten.randperm.generator",
    random=True,
    traits=Traits(bounds=index_rules.between(None, "n")),
)
def _randperm(ctx: Context, n: int, **_: Any) -> jax.Array:
    return jax.random.permutation(_key(ctx), n).astype(ctx.dtype)
