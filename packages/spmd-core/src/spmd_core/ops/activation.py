"""Activation functions and their gradients: arrays of one shape in and out (`glu` halves a dim)."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.registry import Context, as_array, lowering


def _rounded(ctx: Context, function: Callable[..., jax.Array], *operands: Any) -> jax.Array:
    """`function` of the operands in torch's compute dtype, rounded once to the result dtype."""
    dtype = opmath(ctx.dtype)
    return function(*(as_array(x, dtype) for x in operands)).astype(ctx.dtype)


def _zero_where(condition: jax.Array, otherwise: jax.Array) -> jax.Array:
    return jnp.where(condition, jnp.zeros_like(otherwise), otherwise)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x)) if jnp.iscomplexobj(x) else jax.nn.sigmoid(x)


# ---- smooth --------------------------------------------------------------------------------------


@lowering("aten.gelu.default")
def _gelu(ctx: Context, x: Any, *, approximate: str = "none") -> jax.Array:
    def exact(x: jax.Array) -> jax.Array:
        return x * 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))

    def with_tanh(x: jax.Array) -> jax.Array:
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

    return _rounded(ctx, {"none": exact, "tanh": with_tanh}[approximate], x)


@lowering("aten.gelu_backward.default")
def _gelu_backward(ctx: Context, grad: Any, x: Any, *, approximate: str = "none") -> jax.Array:
    def exact(grad: jax.Array, x: jax.Array) -> jax.Array:
        cdf = 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
        pdf = jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
        return grad * (cdf + x * pdf)

    def with_tanh(grad: jax.Array, x: jax.Array) -> jax.Array:
        scale, cubic = math.sqrt(2 / math.pi), 0.044715
        t = jnp.tanh(scale * (x + cubic * x * x * x))
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * cubic * x * x))

    return _rounded(ctx, {"none": exact, "tanh": with_tanh}[approximate], grad, x)


@lowering("aten.silu.default")
def _silu(ctx: Context, x: Any) -> jax.Array:
    return _rounded(ctx, lambda x: x * _sigmoid(x), x)


@lowering("aten.silu_backward.default")
def _silu_backward(ctx: Context, grad: Any, x: Any) -> jax.Array:
    def backward(grad: jax.Array, x: jax.Array) -> jax.Array:
        s = _sigmoid(x)
        return grad * s * (1 + x * (1 - s))

    return _rounded(ctx, backward, grad, x)


@lowering("aten.mish.default")
def _mish(ctx: Context, x: Any) -> jax.Array:
    return _rounded(ctx, lambda x: x * jnp.tanh(jax.nn.softplus(x)), x)


@lowering("aten.mish_backward.default")
def _mish_backward(ctx: Context, grad: Any, x: Any) -> jax.Array:
    def backward(grad: jax.Array, x: jax.Array) -> jax.Array:
        t = jnp.tanh(jax.nn.softplus(x))
        return grad * (t + x * jax.nn.sigmoid(x) * (1 - t * t))

    return _rounded(ctx, backward, grad, x)


@lowering("aten.tanh_backward.default")
def _tanh_backward(ctx: Context, grad: Any, result: Any) -> jax.Array:
    return _rounded(ctx, lambda g, y: g * jnp.conj(1 - y * y), grad, result)


@lowering("aten.sigmoid_backward.default")
def _sigmoid_backward(ctx: Context, grad: Any, result: Any) -> jax.Array:
    return _rounded(ctx, lambda g, y: g * jnp.conj((1 - y) * y), grad, result)


@lowering("aten.log_sigmoid_forward.default")
def _log_sigmoid_forward(ctx: Context, x: Any) -> tuple[jax.Array, jax.Array]:
    result = _rounded(ctx, lambda x: jnp.minimum(x, 0) - jnp.log1p(jnp.exp(-jnp.abs(x))), x)
    # torch's CPU backward saves an exponential with the buffer. On other devices it is empty; our
    # backward does not use it.
    buffer = (
        _rounded(ctx, lambda x: jnp.exp(-jnp.abs(x)), x)
        if ctx.outs[1].shape == tuple(x.shape)
        else jnp.zeros(ctx.outs[1].shape, ctx.dtype)
    )
    return result, buffer


@lowering("aten.log_sigmoid_backward.default")
def _log_sigmoid_backward(ctx: Context, grad: Any, x: Any, buffer: Any) -> jax.Array:
    return _rounded(ctx, lambda g, x: g * jax.nn.sigmoid(-x), grad, x)


@lowering("aten.softplus.default")
def _softplus(ctx: Context, x: Any, beta: Any = 1, threshold: Any = 20) -> jax.Array:
    return _rounded(
        ctx,
        lambda x, b, t: jnp.where(x * b > t, x, jnp.log1p(jnp.exp(x * b)) / b),
        x,
        beta,
        threshold,
    )


@lowering("aten.softplus_backward.default")
def _softplus_backward(ctx: Context, grad: Any, x: Any, beta: Any, threshold: Any) -> jax.Array:
    return _rounded(
        ctx,
        lambda g, x, b, t: jnp.where(x * b > t, g, g * jax.nn.sigmoid(x * b)),
        grad,
        x,
        beta,
        threshold,
    )


@lowering("aten.logit.default")
def _logit(ctx: Context, x: Any, eps: float | None = None) -> jax.Array:
    def logit(x: jax.Array) -> jax.Array:
        if eps is not None:
            # Not 1 - eps in Python: torch subtracts in the tensor's own precision.
            low = as_array(eps, x.dtype)
            x = jnp.where(x < low, low, jnp.where(x > 1 - low, 1 - low, x))
        return jnp.log(x / (1 - x))

    return _rounded(ctx, logit, x)


@lowering("aten.logit_backward.default")
def _logit_backward(ctx: Context, grad: Any, x: Any, eps: float | None = None) -> jax.Array:
    def backward(g: jax.Array, x: jax.Array) -> jax.Array:
        low = as_array(0.0 if eps is None else eps, x.dtype)
        inside = jnp.where((x == 0) | (x == 1), g * jnp.inf, g / (x * (1 - x)))
        return jnp.where((x < low) | (x > 1 - low), jnp.nan if eps is None else 0.0, inside).astype(
            x.dtype
        )

    return _rounded(ctx, backward, grad, x)


# ---- piecewise linear or exponential -------------------------------------------------------------


@lowering("aten.relu.default")
def _relu(ctx: Context, x: Any) -> jax.Array:
    return jnp.maximum(x, jnp.zeros_like(x))


@lowering("aten.threshold.default")
def _threshold(ctx: Context, x: Any, threshold: Any, value: Any) -> jax.Array:
    return _rounded(ctx, lambda x, t, v: jnp.where(x <= t, v, x), x, threshold, value)


@lowering("aten.threshold_backward.default")
def _threshold_backward(ctx: Context, grad: Any, x: Any, threshold: Any) -> jax.Array:
    return _rounded(ctx, lambda g, x, t: _zero_where(x <= t, g), grad, x, threshold)


@lowering("aten.leaky_relu.default")
def _leaky_relu(ctx: Context, x: Any, negative_slope: Any = 0.01) -> jax.Array:
    return _rounded(ctx, lambda x, slope: jnp.where(x > 0, x, x * slope), x, negative_slope)


@lowering("aten.leaky_relu_backward.default")
def _leaky_relu_backward(
    ctx: Context, grad: Any, x: Any, negative_slope: Any, self_is_result: bool
) -> jax.Array:
    return _rounded(
        ctx, lambda g, x, slope: jnp.where(x > 0, g, g * slope), grad, x, negative_slope
    )


@lowering("aten._prelu_kernel.default")
def _prelu(ctx: Context, x: Any, weight: Any) -> jax.Array:
    return _rounded(ctx, lambda x, w: jnp.where(x > 0, x, w * x), x, weight)


@lowering("aten._prelu_kernel_backward.default")
def _prelu_backward(ctx: Context, grad: Any, x: Any, weight: Any) -> tuple[jax.Array, jax.Array]:
    grad_x = _rounded(ctx, lambda g, x, w: jnp.where(x > 0, g, w * g), grad, x, weight)
    return grad_x, _rounded(ctx, lambda g, x: _zero_where(x > 0, x * g), grad, x)


def _exponential_unit(
    x: jax.Array, alpha: jax.Array, scale: jax.Array, input_scale: jax.Array
) -> jax.Array:
    return jnp.where(x < 0, jnp.expm1(x * input_scale) * (alpha * scale), x * scale)


@lowering("aten.elu.default")
def _elu(ctx: Context, x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> jax.Array:
    return _rounded(ctx, _exponential_unit, x, alpha, scale, input_scale)


@lowering("aten.celu.default")
def _celu(ctx: Context, x: Any, alpha: Any = 1.0) -> jax.Array:
    return _rounded(
        ctx, lambda x, alpha: _exponential_unit(x, alpha, jnp.ones_like(alpha), 1 / alpha), x, alpha
    )


@lowering("aten.elu_backward.default")
def _elu_backward(
    ctx: Context, grad: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Any
) -> jax.Array:
    def backward(
        g: jax.Array, alpha: jax.Array, scale: jax.Array, input_scale: jax.Array, x: jax.Array
    ) -> jax.Array:
        negative = alpha * scale
        below = (
            g * input_scale * (x + negative)
            if is_result
            else g * input_scale * negative * jnp.exp(x * input_scale)
        )
        return jnp.where(x <= 0, below, g * scale)

    return _rounded(ctx, backward, grad, alpha, scale, input_scale, x)


@lowering("aten.hardtanh.default")
def _hardtanh(ctx: Context, x: Any, min_val: Any = -1, max_val: Any = 1) -> jax.Array:
    return _rounded(
        ctx, lambda x, low, high: jnp.minimum(jnp.maximum(x, low), high), x, min_val, max_val
    )


@lowering("aten.hardtanh_backward.default")
def _hardtanh_backward(ctx: Context, grad: Any, x: Any, min_val: Any, max_val: Any) -> jax.Array:
    return _rounded(
        ctx,
        lambda g, x, low, high: _zero_where((x <= low) | (x >= high), g),
        grad,
        x,
        min_val,
        max_val,
    )


@lowering("aten.hardsigmoid.default")
def _hardsigmoid(ctx: Context, x: Any) -> jax.Array:
    return _rounded(ctx, lambda x: jnp.clip(x + 3, 0, 6) / 6, x)


@lowering("aten.hardsigmoid_backward.default")
def _hardsigmoid_backward(ctx: Context, grad: Any, x: Any) -> jax.Array:
    return _rounded(
        ctx, lambda g, x: jnp.where((x > -3) & (x < 3), g / 6, jnp.zeros_like(g)), grad, x
    )


@lowering("aten.hardswish.default")
def _hardswish(ctx: Context, x: Any) -> jax.Array:
    return _rounded(ctx, lambda x: x * jnp.clip(x + 3, 0, 6) / 6, x)


@lowering("aten.hardswish_backward.default")
def _hardswish_backward(ctx: Context, grad: Any, x: Any) -> jax.Array:
    return _rounded(
        ctx,
        lambda g, x: jnp.where(x <= -3, jnp.zeros_like(g), jnp.where(x < 3, g * (x / 3 + 0.5), g)),
        grad,
        x,
    )


@lowering("aten.softshrink.default", static=("lambd",))
def _softshrink(ctx: Context, x: Any, lambd: Any = 0.5) -> jax.Array:
    return _rounded(
        ctx,
        lambda x, edge: jnp.where(x > edge, x - edge, jnp.where(x < -edge, x + edge, x * 0)),
        x,
        lambd,
    )


@lowering("aten.hardshrink.default")
def _hardshrink(ctx: Context, x: Any, lambd: Any = 0.5) -> jax.Array:
    return _rounded(ctx, lambda x, edge: _zero_where((x >= -edge) & (x <= edge), x), x, lambd)


@lowering("aten.softshrink_backward.default", "aten.hardshrink_backward.default")
def _shrink_backward(ctx: Context, grad: Any, x: Any, lambd: Any) -> jax.Array:
    return _rounded(
        ctx, lambda g, x, edge: _zero_where((x >= -edge) & (x <= edge), g), grad, x, lambd
    )


# ---- gated: one dim holds values and their gates -------------------------------------------------


def _halves(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    values, gates = jnp.split(x, 2, axis=dim)
    return values, gates


@lowering("aten.glu.default")
def _glu(ctx: Context, x: Any, dim: int = -1) -> jax.Array:
    return _rounded(ctx, lambda values, gates: values * jax.nn.sigmoid(gates), *_halves(x, dim))


@lowering("aten.glu_backward.default")
def _glu_backward(ctx: Context, grad: Any, x: Any, dim: int) -> jax.Array:
    def backward(g: jax.Array, values: jax.Array, gates: jax.Array) -> jax.Array:
        s = jax.nn.sigmoid(gates)
        return jnp.concatenate([g * s, g * values * s * (1 - s)], axis=dim)

    return _rounded(ctx, backward, grad, *_halves(x, dim))
