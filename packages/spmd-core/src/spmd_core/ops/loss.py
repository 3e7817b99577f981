"""Losses and their gradients: of each element, or reduced to the sum or the mean."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd_core.ops.kernels import index_rules
from spmd_core.ops.kernels.class_order import ordered, restored
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.traits import Traits
from spmd_core.ops.registry import Context, as_array, lowering

# torch's numbers for the `reduction` argument
_NONE, _MEAN, _SUM = 0, 1, 2


def _reduced(ctx: Context, losses: jax.Array, reduction: int) -> jax.Array:
    if reduction == _SUM:
        losses = jnp.sum(losses)
    elif reduction == _MEAN:
        losses = jnp.sum(losses) / as_array(math.prod(losses.shape), losses.dtype)
    return losses.astype(ctx.dtype)


def _unreduced_gradient(grad: jax.Array, x: jax.Array, y: jax.Array, reduction: int) -> jax.Array:
    """The gradient of each element's loss, given the gradient of the reduced loss."""
    count = math.prod(jnp.broadcast_shapes(x.shape, y.shape))
    return grad / as_array(max(count, 1), grad.dtype) if reduction == _MEAN else grad


# ---- pointwise losses: loss(x - y), with derivative slope(x - y) ---------------------------------


def _pointwise(
    ctx: Context, x: jax.Array, y: jax.Array, reduction: int, loss: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    dtype = opmath(ctx.dtype)
    return _reduced(ctx, loss(as_array(x, dtype) - as_array(y, dtype)), reduction)


def _pointwise_backward(
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    y: jax.Array,
    reduction: int,
    slope: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    grad, x, y = (as_array(operand, opmath(ctx.dtype)) for operand in (grad, x, y))
    return (_unreduced_gradient(grad, x, y, reduction) * slope(x - y)).astype(ctx.dtype)


@lowering("aten.mse_loss.default")
def _mse(ctx: Context, x: Any, y: Any, reduction: int = _MEAN) -> jax.Array:
    return _pointwise(ctx, x, y, reduction, jnp.square)


@lowering("aten.mse_loss_backward.default")
def _mse_backward(ctx: Context, grad: Any, x: Any, y: Any, reduction: int) -> jax.Array:
    return _pointwise_backward(ctx, grad, x, y, reduction, lambda d: 2 * d)


@lowering("aten.smooth_l1_loss.default")
def _smooth_l1(
    ctx: Context, x: Any, y: Any, reduction: int = _MEAN, beta: float = 1.0
) -> jax.Array:
    def loss(d: jax.Array) -> jax.Array:
        size = jnp.abs(d)
        return (
            size
            if beta == 0
            else jnp.where(size < beta, 0.5 * size * size / beta, size - 0.5 * beta)
        )

    return _pointwise(ctx, x, y, reduction, loss)


@lowering("aten.smooth_l1_loss_backward.default")
def _smooth_l1_backward(
    ctx: Context, grad: Any, x: Any, y: Any, reduction: int, beta: float
) -> jax.Array:
    return _pointwise_backward(
        ctx,
        grad,
        x,
        y,
        reduction,
        lambda d: jnp.sign(d) if beta == 0 else jnp.clip(d / beta, -1, 1),
    )


@lowering("aten.huber_loss.default")
def _huber(ctx: Context, x: Any, y: Any, reduction: int = _MEAN, delta: float = 1.0) -> jax.Array:
    def loss(d: jax.Array) -> jax.Array:
        size = jnp.abs(d)
        return jnp.where(size < delta, 0.5 * size * size, delta * (size - 0.5 * delta))

    return _pointwise(ctx, x, y, reduction, loss)


@lowering("aten.huber_loss_backward.default")
def _huber_backward(
    ctx: Context, grad: Any, x: Any, y: Any, reduction: int, delta: float
) -> jax.Array:
    return _pointwise_backward(ctx, grad, x, y, reduction, lambda d: jnp.clip(d, -delta, delta))


@lowering("aten.soft_margin_loss.default")
def _soft_margin(ctx: Context, x: Any, y: Any, reduction: int = _MEAN) -> jax.Array:
    x, y = as_array(x, opmath(ctx.dtype)), as_array(y, opmath(ctx.dtype))
    return _reduced(ctx, jnp.log1p(jnp.exp(-x * y)), reduction)


@lowering("aten.soft_margin_loss_backward.default")
def _soft_margin_backward(ctx: Context, grad: Any, x: Any, y: Any, reduction: int) -> jax.Array:
    grad, x, y = (as_array(operand, opmath(ctx.dtype)) for operand in (grad, x, y))
    return (-_unreduced_gradient(grad, x, y, reduction) * y * jax.nn.sigmoid(-x * y)).astype(
        ctx.dtype
    )


# ---- binary cross entropy ------------------------------------------------------------------------


def _weighted(losses: jax.Array, weight: jax.Array | None) -> jax.Array:
    return losses if weight is None else losses * as_array(weight, losses.dtype)


@lowering("aten.binary_cross_entropy.default")
def _binary_cross_entropy(
    ctx: Context, x: Any, y: Any, weight: Any = None, reduction: int = _MEAN
) -> jax.Array:
    x, y = as_array(x, opmath(ctx.dtype)), as_array(y, opmath(ctx.dtype))
    # As in torch, logarithms are at least -100: a certain but wrong prediction costs 100 and not
    # infinity.
    losses = (y - 1) * jnp.maximum(jnp.log1p(-x), -100) - y * jnp.maximum(jnp.log(x), -100)
    return _reduced(ctx, _weighted(losses, weight), reduction)


@lowering("aten.binary_cross_entropy_backward.default")
def _binary_cross_entropy_backward(
    ctx: Context, grad: Any, x: Any, y: Any, weight: Any = None, reduction: int = _MEAN
) -> jax.Array:
    grad, x, y = (as_array(operand, opmath(ctx.dtype)) for operand in (grad, x, y))
    slope = (x - y) / jnp.maximum((1 - x) * x, 1e-12)
    return (_unreduced_gradient(grad, x, y, reduction) * _weighted(slope, weight)).astype(ctx.dtype)


@lowering("aten.binary_cross_entropy_with_logits.default")
def _binary_cross_entropy_with_logits(
    ctx: Context, x: Any, y: Any, weight: Any = None, pos_weight: Any = None, reduction: int = _MEAN
) -> jax.Array:
    x, y = as_array(x, opmath(ctx.dtype)), as_array(y, opmath(ctx.dtype))
    log_sigmoid = jnp.minimum(x, 0) - jnp.log1p(jnp.exp(-jnp.abs(x)))
    scale = 1 if pos_weight is None else (as_array(pos_weight, x.dtype) - 1) * y + 1
    return _reduced(ctx, _weighted((1 - y) * x - scale * log_sigmoid, weight), reduction)


# ---- negative log likelihood: (batch, class, ...) or (class,) against class indices --------------


def _class_dim(x: jax.Array) -> int:
    return 1 if x.ndim > 1 else 0


def _class_weights(
    weight: jax.Array | None, target: jax.Array, ignore_index: int, dtype: np.dtype
) -> jax.Array:
    """The weight of each target: that of its class, and 0 for an ignored target."""
    used = target != ignore_index
    if weight is None:
        return used.astype(dtype)
    return jnp.where(
        used, as_array(weight, dtype)[jnp.where(used, target, 0)], jnp.zeros((), dtype)
    )


@lowering(
    "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default",
    indices=index_rules.of_classes,
    traits=Traits(classes=0),
)
def _nll_loss(
    ctx: Context, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    dtype = opmath(ctx.dtype)
    x, dim = ordered(ctx, x, _class_dim(x))
    target = target.reshape(x.shape[:dim] + x.shape[dim + 1 :])
    weights = _class_weights(weight, target, ignore_index, dtype)
    used = target != ignore_index
    chosen = jnp.expand_dims(jnp.where(used, target, 0), dim)
    if ctx.platform == "tpu":
        # A gather would materialise all of `x`, in float32 after a softmax. A masked sum is fused
        # with the softmax.
        is_chosen = lax.broadcasted_iota(target.dtype, x.shape, dim) == chosen
        likelihood = jnp.sum(jnp.where(is_chosen, x, jnp.zeros((), x.dtype)), axis=dim)
    else:
        likelihood = lax.squeeze(jnp.take_along_axis(x, chosen, axis=dim), (dim,))
    likelihood = likelihood.astype(dtype)
    # Not a product with a weight of 0: an ignored -inf must not become nan.
    losses = jnp.where(used, -likelihood * weights, jnp.zeros((), dtype))
    if reduction == _NONE and x.ndim > 1:
        return losses.astype(ctx.dtype), jnp.zeros((), ctx.dtype)
    total_weight = jnp.sum(weights)
    total = jnp.sum(losses)
    if reduction == _MEAN:
        total = total / total_weight
    return total.astype(ctx.dtype), total_weight.astype(ctx.dtype)


@lowering(
    "aten.nll_loss_backward.default",
    "aten.nll_loss2d_backward.default",
    traits=Traits(classes=1),
)
def _nll_loss_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total_weight: Any,
) -> jax.Array:
    dtype, of_classes = opmath(ctx.dtype), _class_dim(x)
    x, dim = ordered(ctx, x, of_classes)
    target = target.reshape(x.shape[:dim] + x.shape[dim + 1 :])
    scale = -as_array(grad, dtype) * _class_weights(weight, target, ignore_index, dtype)
    if reduction == _MEAN:
        scale = scale / as_array(total_weight, dtype)
    # A comparison with the class index and not a scatter: with a sharded vocabulary each device
    # writes its own shard, without communication.
    chosen = lax.broadcasted_iota(target.dtype, x.shape, dim) == jnp.expand_dims(target, dim)
    # With a total weight of 0 the scale of ignored targets is nan.
    chosen &= jnp.expand_dims(target != ignore_index, dim)
    scale = jnp.expand_dims(jnp.broadcast_to(scale, target.shape), dim)
    grads = jnp.where(chosen, scale, jnp.zeros((), dtype))
    return restored(ctx, grads.astype(ctx.dtype), of_classes)


# ---- margins between classes: (batch, class) or (class,) -----------------------------------------


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)


def _reduced_rows(ctx: Context, losses: jax.Array, reduction: int) -> jax.Array:
    return _reduced(ctx, losses, reduction).reshape(ctx.shape)


def _multi_margin_losses(
    x: jax.Array, target: jax.Array, p: int, margin: Any, weight: jax.Array | None
) -> jax.Array:
    """For each row the sum of max(0, margin - x[target] + x)^p over the classes but the target.

    The sum is divided by the number of classes.
    """
    target = target.reshape(-1, 1)
    hinge = jnp.maximum(
        as_array(margin, x.dtype) - jnp.take_along_axis(x, target, axis=1, mode="clip") + x, 0
    )
    losses = hinge if p == 1 else hinge * hinge
    if weight is not None:
        losses = losses * jnp.take(weight.astype(x.dtype), target, mode="clip")
    others = jnp.arange(x.shape[1]) != target
    return jnp.sum(jnp.where(others, losses, jnp.zeros_like(losses)), axis=1) / x.shape[1]


@lowering("aten.multi_margin_loss.default", static=("p",), indices=index_rules.of_last_dim())
def _multi_margin(
    ctx: Context,
    x: Any,
    target: Any,
    p: Any = 1,
    margin: Any = 1,
    weight: Any = None,
    reduction: int = _MEAN,
) -> jax.Array:
    return _reduced_rows(
        ctx,
        _multi_margin_losses(_rows(as_array(x, opmath(ctx.dtype))), target, p, margin, weight),
        reduction,
    )


def _meta_like_input(grad: torch.Tensor, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@lowering("aten.multi_margin_loss_backward.default", static=("p",), meta=_meta_like_input)
def _multi_margin_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    target: Any,
    p: Any,
    margin: Any,
    weight: Any = None,
    reduction: int = _MEAN,
) -> jax.Array:
    rows = _rows(as_array(x, opmath(ctx.dtype)))
    row_grad = jnp.broadcast_to(as_array(grad, rows.dtype), rows.shape[:1]) / (
        rows.shape[0] if reduction == _MEAN else 1
    )
    # The slope where a hinge is exactly 0: torch's is 0; jax.grad of a maximum would give 1/2.
    target = target.reshape(-1, 1)
    hinge = (
        as_array(margin, rows.dtype) - jnp.take_along_axis(rows, target, axis=1, mode="clip") + rows
    )
    slope = (
        jnp.where(hinge > 0, jnp.ones_like(hinge) if p == 1 else 2 * hinge, jnp.zeros_like(hinge))
        / rows.shape[1]
    )
    if weight is not None:
        slope = slope * jnp.take(weight.astype(rows.dtype), target, mode="clip")
    is_target = jnp.arange(rows.shape[1]) == target
    others = jnp.where(is_target, jnp.zeros_like(slope), slope)
    slope = jnp.where(is_target, -jnp.sum(others, axis=1, keepdims=True), others)
    return (slope * row_grad[:, None]).reshape(ctx.shape).astype(ctx.dtype)


def _label_lists(target: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The class indices in `target`, which of them count, and which classes they include.

    Each row of `target` is a list of class indices that ends at the first -1.
    """
    rows = _rows(target)
    counts = jnp.cumsum(rows < 0, axis=1) == 0
    labels = jnp.where(counts, rows, 0)
    present = jnp.any(
        (labels[:, :, None] == jnp.arange(rows.shape[1])) & counts[:, :, None], axis=1
    )
    return labels, counts, present


def _multilabel_hinges(
    x: jax.Array, labels: jax.Array, counts: jax.Array, present: jax.Array
) -> jax.Array:
    """(batch, label, class): max(0, 1 - x[label] + x[class]).

    0 for labels that do not count, and for classes that are among the labels.
    """
    hinge = 1 - jnp.take_along_axis(x, labels, axis=1, mode="clip")[:, :, None] + x[:, None, :]
    return jnp.where(
        counts[:, :, None] & ~present[:, None, :], jnp.maximum(hinge, 0), jnp.zeros((), x.dtype)
    )


# torch's own decomposition (2.13) counts the unused ends of the lists as label 0; this lowering can
# go when it does not.
@lowering(
    "aten.multilabel_margin_loss_forward.default",
    indices=index_rules.of_last_dim(least=-1),  # -1 ends a list
)
def _multilabel_margin(
    ctx: Context, x: Any, target: Any, reduction: int
) -> tuple[jax.Array, jax.Array]:
    rows = _rows(as_array(x, opmath(ctx.dtype)))
    labels, counts, present = _label_lists(target)
    losses = jnp.sum(_multilabel_hinges(rows, labels, counts, present), axis=(1, 2)) / rows.shape[1]
    return _reduced_rows(ctx, losses, reduction), present.reshape(target.shape).astype(ctx.dtype)


@lowering("aten.multilabel_margin_loss_backward.default", meta=_meta_like_input)
def _multilabel_margin_backward(
    ctx: Context, grad: Any, x: Any, target: Any, reduction: int, is_target: Any
) -> jax.Array:
    rows = _rows(as_array(x, opmath(ctx.dtype)))
    labels, counts, present = _label_lists(target)
    row_grad = jnp.broadcast_to(as_array(grad, rows.dtype), rows.shape[:1]) / (
        rows.shape[0] if reduction == _MEAN else 1
    )
    active = (_multilabel_hinges(rows, labels, counts, present) > 0).astype(rows.dtype)
    at_labels = jnp.sum(active, axis=2)[:, :, None] * (
        labels[:, :, None] == jnp.arange(rows.shape[1])
    )
    slope = (jnp.sum(active, axis=1) - jnp.sum(at_labels, axis=1)) / rows.shape[1]
    return (slope * row_grad[:, None]).reshape(ctx.shape).astype(ctx.dtype)
