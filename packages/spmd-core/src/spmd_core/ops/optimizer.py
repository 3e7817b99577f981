"""torch's fused optimizer steps and gradient scaling, for lists of tensors in one operation.

The hyperparameters (learning rate, betas, ...) are inputs of the program, so a schedule never
causes a compile. The corrections that depend on them and on the step are computed in float64, as in
torch's CPU kernels, but on TPUs, which have none (`kernels/bias_correction.py`). The update is
computed in the parameter's dtype, or float32 for 16-bit floats.
Formulas: Kingma and Ba, 2015 (Adam); Loshchilov and Hutter, 2019 (AdamW); Reddi et al., 2018
(amsgrad); Duchi et al., 2011 (Adagrad).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.ops.kernels.bias_correction import bias_correction
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.traits import BY_ITEM
from spmd_core.ops.registry import Context, Number, lowering

_ADAM_NUMBERS = ("lr", "beta1", "beta2", "weight_decay", "eps")
_SGD_NUMBERS = ("lr", "weight_decay", "momentum", "dampening")
_ADAGRAD_NUMBERS = ("lr", "lr_decay", "weight_decay", "eps")


def _float64(x: Any) -> jax.Array:
    """A number, or a 0-dim tensor, in float64."""
    return (x.value if isinstance(x, Number) else jnp.asarray(x)).astype(np.float64)


def _unscaled(grad: jax.Array, grad_scale: jax.Array | None) -> jax.Array:
    """The gradient in the dtype of the update, divided by the loss's scale."""
    wide = grad.astype(opmath(grad.dtype))
    return wide if grad_scale is None else wide / grad_scale.astype(wide.dtype)


def _skip_on_infinity(
    found_inf: jax.Array | None, old: Sequence[jax.Array], new: Sequence[jax.Array]
) -> list[jax.Array]:
    """The new values in the old values' dtypes, or the old values if scaling found an infinity."""
    cast = [n.astype(o.dtype) for o, n in zip(old, new)]
    if found_inf is None:
        return cast
    skip = found_inf.reshape(()) == 1
    return [jnp.where(skip, o, n) for o, n in zip(old, cast)]


def _flat(rows: Sequence[Sequence[jax.Array]], num_lists: int) -> tuple[jax.Array, ...]:
    """The lists of the schema, one after another, from one row for each parameter."""
    return tuple(row[i] for i in range(num_lists) for row in rows if i < len(row))


def _adam(
    ctx: Context,
    decoupled: bool,
    params: Any,
    grads: Any,
    exp_avgs: Any,
    exp_avg_sqs: Any,
    max_exp_avg_sqs: Any,
    state_steps: Any,
    *,
    lr: Any,
    beta1: Number,
    beta2: Number,
    weight_decay: Number,
    eps: Number,
    amsgrad: bool,
    maximize: bool,
    grad_scale: jax.Array | None = None,
    found_inf: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    rows = []
    for i, (param, given, mean, square, step) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, state_steps)
    ):
        compute = opmath(param.dtype)
        p, m, v = param.astype(compute), mean.astype(compute), square.astype(compute)
        rate, b1, b2, decay = _float64(lr), _float64(beta1), _float64(beta2), _float64(weight_decay)
        unscaled = _unscaled(given, grad_scale)
        grad = -unscaled if maximize else unscaled
        p, grad = (
            (p * (1 - rate * decay).astype(compute), grad)
            if decoupled
            else (p, grad + p * decay.astype(compute))
        )
        m = m + (1 - b1).astype(compute) * (grad - m)
        v = v * b2.astype(compute) + (1 - b2).astype(compute) * grad * grad
        first, second = (
            bias_correction(b, step, compute=compute, platform=ctx.platform) for b in (b1, b2)
        )
        largest = jnp.maximum(max_exp_avg_sqs[i].astype(compute), v) if amsgrad else v
        root = jnp.sqrt(second).astype(compute)
        denominator = jnp.sqrt(largest) / root + _float64(eps).astype(compute)
        p = p - (rate.astype(first.dtype) / first).astype(compute) * (m / denominator)
        old = [param, given, mean, square, *([max_exp_avg_sqs[i]] if amsgrad else [])]
        rows.append(
            _skip_on_infinity(found_inf, old, [p, unscaled, m, v, *([largest] if amsgrad else [])])
        )
    # Without amsgrad the list of maxima is returned unchanged.
    return (*_flat(rows, 5 if amsgrad else 4), *([] if amsgrad else max_exp_avg_sqs))


@lowering(
    "aten._fused_adam.default", "aten._fused_adam.tensor_lr", numbers=_ADAM_NUMBERS, traits=BY_ITEM
)
def _fused_adam(ctx: Context, *lists: Any, **options: Any) -> tuple[jax.Array, ...]:
    return _adam(ctx, False, *lists, **options)


@lowering(
    "aten._fused_adamw.default",
    "aten._fused_adamw.tensor_lr",
    numbers=_ADAM_NUMBERS,
    traits=BY_ITEM,
)
def _fused_adamw(ctx: Context, *lists: Any, **options: Any) -> tuple[jax.Array, ...]:
    return _adam(ctx, True, *lists, **options)


@lowering(
    "aten._fused_sgd.default", "aten._fused_sgd.tensor_lr", numbers=_SGD_NUMBERS, traits=BY_ITEM
)
def _fused_sgd(
    ctx: Context,
    params: Any,
    grads: Any,
    momentum_buffers: Any,
    *,
    weight_decay: Number,
    momentum: Number,
    lr: Any,
    dampening: Number,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: jax.Array | None = None,
    found_inf: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    rows = []
    for i, (param, given) in enumerate(zip(params, grads)):
        compute = opmath(param.dtype)
        p, unscaled, factor = (
            param.astype(compute),
            _unscaled(given, grad_scale),
            _float64(momentum).astype(compute),
        )
        grad = (-unscaled if maximize else unscaled) + p * _float64(weight_decay).astype(compute)
        old, buffer = [param, given], None
        if momentum_buffers:
            old.append(momentum_buffers[i])
            buffer = (
                grad
                if is_first_step
                else momentum_buffers[i].astype(compute) * factor
                + (1 - _float64(dampening)).astype(compute) * grad
            )
            grad = grad + factor * buffer if nesterov else buffer
        p = p - _float64(lr).astype(compute) * grad
        rows.append(
            _skip_on_infinity(found_inf, old, [p, unscaled, *([] if buffer is None else [buffer])])
        )
    return _flat(rows, 3)


@lowering(
    "aten._fused_adagrad.default",
    "aten._fused_adagrad.tensor_lr",
    numbers=_ADAGRAD_NUMBERS,
    traits=BY_ITEM,
)
def _fused_adagrad(
    ctx: Context,
    params: Any,
    grads: Any,
    state_sums: Any,
    state_steps: Any,
    *,
    lr: Any,
    lr_decay: Number,
    weight_decay: Number,
    eps: Number,
    maximize: bool,
    grad_scale: jax.Array | None = None,
    found_inf: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    rows = []
    for param, given, total, step in zip(params, grads, state_sums, state_steps):
        compute = opmath(param.dtype)
        p, unscaled = param.astype(compute), _unscaled(given, grad_scale)
        grad = (-unscaled if maximize else unscaled) + p * _float64(weight_decay).astype(compute)
        rate = _float64(lr) / (1 + (step.astype(np.float64) - 1) * _float64(lr_decay))
        square = total.astype(compute) + grad * grad
        p = p - rate.astype(compute) * grad / (jnp.sqrt(square) + _float64(eps).astype(compute))
        rows.append(
            [*_skip_on_infinity(found_inf, [param, given, total], [p, unscaled, square]), step]
        )
    return _flat(rows, 4 if len(ctx.outs) == 4 * len(rows) else 3)


@lowering("aten._amp_foreach_non_finite_check_and_unscale.default")
def _check_and_unscale(
    ctx: Context, grads: Any, found_inf: jax.Array, inv_scale: jax.Array
) -> tuple[jax.Array, ...]:
    scaled = [
        (g.astype(opmath(g.dtype)) * inv_scale.reshape(()).astype(opmath(g.dtype))).astype(g.dtype)
        for g in grads
    ]
    infinite = (
        jnp.stack([~jnp.isfinite(g).all() for g in grads]).any() if grads else jnp.asarray(False)
    )
    return (*scaled, jnp.where(infinite, jnp.ones_like(found_inf), found_inf))


@lowering("aten._amp_update_scale.default")
def _update_scale(
    ctx: Context,
    scale: jax.Array,
    growth_tracker: jax.Array,
    found_inf: jax.Array,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> tuple[jax.Array, jax.Array]:
    infinite = found_inf.reshape(()) > 0
    count = growth_tracker + 1
    grown = scale * np.asarray(scale_growth_factor, scale.dtype)
    due = count == growth_interval
    larger = jnp.where(due & jnp.isfinite(grown), grown, scale)
    return (
        jnp.where(infinite, scale * np.asarray(scale_backoff_factor, scale.dtype), larger),
        jnp.where(infinite | due, jnp.zeros_like(growth_tracker), count),
    )
