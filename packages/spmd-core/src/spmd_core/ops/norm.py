"""Batch, layer, group and weight norm, with their gradients, in float32 for 16-bit tensors."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core import dtypes
from spmd_core.ops.kernels.channel_sums import SplitImages
from spmd_core.ops.kernels.precision import widened
from spmd_core.ops.kernels.traits import Parts, Traits
from spmd_core.ops.registry import Context, ImageLayout, as_array, lowering


def _as_results(ctx: Context, *results: jax.Array) -> tuple[jax.Array, ...]:
    """The results in torch's dtypes.

    Statistics of a bfloat16 tensor are float32 or bfloat16, depending on the op and the weight.
    """
    return tuple(
        x.astype(dtypes.to_jax(out.dtype)) for x, out in zip(results, ctx.outs, strict=True)
    )


def _masked_results(
    ctx: Context, output_mask: Sequence[bool], *results: jax.Array
) -> tuple[jax.Array | None, ...]:
    """The results that `output_mask` selects, in torch's dtypes, and None for the others."""
    wanted = [i for i, asked in enumerate(output_mask) if asked]
    outs = [out for out in ctx.outs if out is not None]
    typed = {
        i: results[i].astype(dtypes.to_jax(out.dtype)) for i, out in zip(wanted, outs, strict=True)
    }
    return tuple(typed.get(i) for i in range(len(output_mask)))


def _mean(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    count = math.prod(x.shape[d] for d in dims)
    return jnp.sum(x, axis=dims, keepdims=True) / as_array(count, x.dtype)


def _statistics(x: jax.Array, dims: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance over `dims`, which stay as dims of size 1.

    In two passes, because the mean of the squares less the square of the mean loses digits.
    """
    mean = _mean(x, dims)
    return mean, _mean(jnp.square(x - mean), dims)


def _affine(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _normalised_gradient(
    grad: jax.Array, normal: jax.Array, rstd: jax.Array, dims: tuple[int, ...]
) -> jax.Array:
    """The gradient of x where `normal` = (x - mean) * rstd, given the gradient of `normal`."""
    return rstd * (grad - _mean(grad, dims) - normal * _mean(grad * normal, dims))


# ---- batch norm: (batch, channel, ...), statistics of each channel -------------------------------

_IMAGES, _GRADIENT_AND_IMAGES = Traits(images=(0,)), Traits(images=(0, 1))


def _channel_shape(x: jax.Array) -> tuple[int, ...]:
    return (1, x.shape[1]) + (1,) * (x.ndim - 2)


def _all_but_channel(x: jax.Array) -> tuple[int, ...]:
    return tuple(d for d in range(x.ndim) if d != 1)


def _per_channel(values: Any, x: jax.Array) -> Any:
    return None if values is None else widened(values).reshape(_channel_shape(x))


def _batch_normalise(
    x: jax.Array, weight: Any, bias: Any, mean: jax.Array, rstd: jax.Array
) -> jax.Array:
    shape = _channel_shape(x)
    return _affine(
        (x - mean.reshape(shape)) * rstd.reshape(shape),
        _per_channel(weight, x),
        _per_channel(bias, x),
    )


def _batch_norm(
    ctx: Context,
    x: jax.Array,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    """The output, the mean and reciprocal deviation used, and the new running mean and variance.

    The last two are None without running statistics.
    """
    x = widened(x)
    if not training:
        mean, rstd = widened(running_mean), lax.rsqrt(widened(running_var) + eps)
        return _batch_normalise(x, weight, bias, mean, rstd), mean, rstd, running_mean, running_var
    dims = _all_but_channel(x)
    split = SplitImages.of(ctx.layout(ImageLayout), x.shape)
    if split is not None:
        mean, variance = split.moments(x)
    else:
        mean, variance = (s.reshape(-1) for s in _statistics(x, dims))
    rstd = lax.rsqrt(variance + eps)
    if running_mean is not None:
        count = math.prod(x.shape[d] for d in dims)
        unbiased = variance * count / as_array(count - 1, variance.dtype)
        running_mean = widened(running_mean) * (1 - momentum) + mean * momentum
        running_var = widened(running_var) * (1 - momentum) + unbiased * momentum
    return _batch_normalise(x, weight, bias, mean, rstd), mean, rstd, running_mean, running_var


def _fit_saved(ctx: Context, saved: jax.Array, index: int) -> jax.Array:
    """`saved`, or an empty array where torch's result is empty.

    Outside training, torch's CPU kernels save nothing (size 0) and its meta kernels one value per
    channel; no backward reads either.
    """
    return jnp.zeros((0,), saved.dtype) if ctx.outs[index].shape == (0,) else saved


@lowering("aten.native_batch_norm.default", traits=_IMAGES)
def _native_batch_norm(
    ctx: Context,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    if training and running_mean is not None:
        raise NotImplementedError(
            "aten.native_batch_norm updates running_mean and running_var in place, which its "
            "schema does not say and a pure lowering cannot do; record "
            "aten._native_batch_norm_legit_functional and write its last two results back."
        )
    out, mean, rstd, _, _ = _batch_norm(
        ctx, x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return _as_results(ctx, out, _fit_saved(ctx, mean, 1), _fit_saved(ctx, rstd, 2))


@lowering("aten._native_batch_norm_legit.no_stats", traits=_IMAGES)
def _batch_norm_no_stats(
    ctx: Context, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[jax.Array, ...]:
    if not training:
        raise ValueError(
            "aten._native_batch_norm_legit.no_stats has no running statistics to use outside "
            "training; got training=False."
        )
    return _as_results(ctx, *_batch_norm(ctx, x, weight, bias, None, None, True, momentum, eps)[:3])


@lowering("aten._native_batch_norm_legit_no_training.default")
def _batch_norm_no_training(
    ctx: Context,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    return _native_batch_norm(ctx, x, weight, bias, running_mean, running_var, False, momentum, eps)


@lowering("aten._native_batch_norm_legit_functional.default", traits=_IMAGES)
def _batch_norm_functional(
    ctx: Context,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    out, mean, rstd, new_mean, new_var = _batch_norm(
        ctx, x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return _as_results(
        ctx, out, _fit_saved(ctx, mean, 1), _fit_saved(ctx, rstd, 2), new_mean, new_var
    )


@lowering("aten._batch_norm_no_update.default")
def _batch_norm_no_update(
    ctx: Context,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    out, mean, rstd, _, _ = _batch_norm(
        ctx, x, weight, bias, running_mean, running_var, False, momentum, eps
    )
    return _as_results(
        ctx,
        out,
        _fit_saved(ctx, mean, 1),
        _fit_saved(ctx, rstd, 2),
        jnp.zeros(ctx.outs[3].shape, np.uint8),
    )


@lowering("aten._batch_norm_with_update_functional.default", traits=_IMAGES)
def _batch_norm_with_update(
    ctx: Context,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    out, mean, rstd, new_mean, new_var = _batch_norm(
        ctx, x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return _as_results(
        ctx, out, mean, rstd, jnp.zeros(ctx.outs[3].shape, np.uint8), new_mean, new_var
    )


@lowering("aten.native_batch_norm_backward.default", traits=_GRADIENT_AND_IMAGES)
def _batch_norm_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    grad, x = widened(grad), widened(x)
    dims = _all_but_channel(x)
    mean = _per_channel(save_mean if train else running_mean, x)
    rstd = _per_channel(save_invstd, x) if train else lax.rsqrt(_per_channel(running_var, x) + eps)
    split = SplitImages.of(ctx.layout(ImageLayout), x.shape)
    if split is not None:
        total, dot = split.sums(
            lambda grad, x, mean, rstd: (grad, grad * ((x - mean) * rstd)),
            [grad, x],
            [mean.reshape(-1), rstd.reshape(-1)],
        )
    else:
        total, dot = (jnp.sum(t, axis=dims) for t in (grad, grad * ((x - mean) * rstd)))
    grad_x = grad
    if train:
        count = as_array(math.prod(x.shape[d] for d in dims), x.dtype)
        mean_grad, mean_dot = (_per_channel(t / count, x) for t in (total, dot))
        grad_x = grad - mean_grad - (x - mean) * rstd * mean_dot
    grad_x = _affine(grad_x, _per_channel(weight, x), None) * rstd
    return _masked_results(ctx, output_mask, grad_x, dot, total)


@lowering("aten.batch_norm_backward.default", traits=_GRADIENT_AND_IMAGES)
def _batch_norm_backward_with_reserve(
    ctx: Context,
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_var: Any,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Any,
) -> tuple[jax.Array | None, ...]:
    return _batch_norm_backward(
        ctx,
        grad,
        x,
        weight,
        running_mean,
        running_var,
        save_mean,
        save_var,
        update,
        eps,
        output_mask,
    )


# ---- layer norm: statistics over the last dims ---------------------------------------------------


@lowering("aten.native_layer_norm.default")
def _layer_norm(
    ctx: Context, x: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[jax.Array, ...]:
    wide = widened(x)
    mean, variance = _statistics(wide, tuple(range(x.ndim - len(normalized_shape), x.ndim)))
    rstd = lax.rsqrt(variance + eps)
    return _as_results(
        ctx, _affine((wide - mean) * rstd, widened(weight), widened(bias)), mean, rstd
    )


@lowering("aten.layer_norm.default")
def _layer_norm_without_statistics(
    ctx: Context,
    x: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> jax.Array:
    """Layer norm without its statistics, which only the backward needs.

    `dispatch.composite.layer_norm` records this overload where nothing is differentiated.
    """
    wide = widened(x)
    mean, variance = _statistics(wide, tuple(range(x.ndim - len(normalized_shape), x.ndim)))
    return _affine(
        (wide - mean) * lax.rsqrt(variance + eps), widened(weight), widened(bias)
    ).astype(ctx.dtype)


@lowering("aten.native_layer_norm_backward.default", traits=Traits(parts=Parts.SUM))
def _layer_norm_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    normalized_shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    first = x.ndim - len(normalized_shape)
    inner, outer = tuple(range(first, x.ndim)), tuple(range(first))
    grad, rstd = widened(grad), widened(rstd)
    normal = (widened(x) - widened(mean)) * rstd
    grad_x = _normalised_gradient(_affine(grad, widened(weight), None), normal, rstd, inner)
    return _masked_results(
        ctx, output_mask, grad_x, jnp.sum(grad * normal, axis=outer), jnp.sum(grad, axis=outer)
    )


# ---- group norm: statistics of each group of channels --------------------------------------------


@lowering("aten.native_group_norm.default")
def _group_norm(
    ctx: Context, x: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[jax.Array, ...]:
    grouped = widened(x).reshape(N, group, C // group, HxW)
    mean, variance = _statistics(grouped, (2, 3))
    rstd = lax.rsqrt(variance + eps)
    normal = ((grouped - mean) * rstd).reshape(N, C, HxW)
    out = _affine(
        normal, *(None if p is None else widened(p).reshape(1, C, 1) for p in (weight, bias))
    )
    return _as_results(ctx, out.reshape(x.shape), mean.reshape(N, group), rstd.reshape(N, group))


@lowering("aten.native_group_norm_backward.default")
def _group_norm_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    grouped = (N, group, C // group, HxW)
    rstd = widened(rstd).reshape(N, group, 1, 1)
    normal = (widened(x).reshape(grouped) - widened(mean).reshape(N, group, 1, 1)) * rstd
    grad = widened(grad).reshape(grouped)
    grad_normal = _affine(
        grad, None if weight is None else widened(weight).reshape(1, group, C // group, 1), None
    )
    grad_x = _normalised_gradient(grad_normal, normal, rstd, (2, 3)).reshape(x.shape)
    return _masked_results(
        ctx,
        output_mask,
        grad_x,
        jnp.sum(grad * normal, axis=(0, 3)).reshape(C),
        jnp.sum(grad, axis=(0, 3)).reshape(C),
    )


# ---- weight norm: a direction `v` with its length `g` along one dim ------------------------------


def _all_but(x: jax.Array, dim: int) -> tuple[int, ...]:
    return tuple(d for d in range(x.ndim) if d != dim % x.ndim)


@lowering("aten._weight_norm_interface.default")
def _weight_norm(ctx: Context, v: Any, g: Any, dim: int = 0) -> tuple[jax.Array, ...]:
    v = widened(v)
    norm = jnp.sqrt(jnp.sum(v * v, axis=_all_but(v, dim), keepdims=True))
    return _as_results(ctx, v * (widened(g) / norm), norm)


@lowering("aten._weight_norm_interface_backward.default")
def _weight_norm_backward(
    ctx: Context, grad: Any, v: Any, g: Any, norm: Any, dim: int
) -> tuple[jax.Array, ...]:
    grad, v, g, norm = widened(grad), widened(v), widened(g), widened(norm)
    along = jnp.sum(grad * v, axis=_all_but(v, dim), keepdims=True) / norm
    return _as_results(ctx, (g / norm) * (grad - v * along / norm), along)
