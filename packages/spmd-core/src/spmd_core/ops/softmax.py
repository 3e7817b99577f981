"""Softmax, its logarithm and softmax over a mask, with gradients, in float32 for 16-bit tensors."""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from spmd_core.ops.kernels.class_order import ordered, restored
from spmd_core.ops.kernels.precision import opmath, reduced_dims, widened
from spmd_core.ops.kernels.traits import Traits
from spmd_core.ops.registry import Context, as_array, lowering


def _shifted(ctx: Context, x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """`x` less its maximum, in torch's compute dtype, so that no exponential overflows."""
    x = as_array(x, opmath(ctx.dtype))
    return x - jnp.max(x, axis=dims, keepdims=True, initial=-jnp.inf)


def _softmax_over(ctx: Context, x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    powers = jnp.exp(_shifted(ctx, x, dims))
    return powers / jnp.sum(powers, axis=dims, keepdims=True)


@lowering("aten._softmax.default", traits=Traits(passes_nan_on=True, classes=0))
def _softmax(ctx: Context, x: Any, dim: int, half_to_float: bool) -> jax.Array:
    x, last = ordered(ctx, x, dim)
    powers = _softmax_over(ctx, x, reduced_dims(last, x.ndim))
    return restored(ctx, powers.astype(ctx.dtype), dim)


@lowering("aten._safe_softmax.default")
def _safe_softmax(ctx: Context, x: Any, dim: int, dtype: Any = None) -> jax.Array:
    dims = reduced_dims(dim, x.ndim)
    # Attention to no position at all: zeros, not nan.
    nothing = jnp.all(x == -jnp.inf, axis=dims, keepdims=True)
    result = _softmax_over(ctx, x, dims)
    return jnp.where(nothing, jnp.zeros_like(result), result).astype(ctx.dtype)


@lowering("aten._log_softmax.default", traits=Traits(passes_nan_on=True, classes=0))
def _log_softmax(ctx: Context, x: Any, dim: int, half_to_float: bool) -> jax.Array:
    x, last = ordered(ctx, x, dim)
    dims = reduced_dims(last, x.ndim)
    shifted = _shifted(ctx, x, dims)
    logs = shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=dims, keepdims=True))
    return restored(ctx, logs.astype(ctx.dtype), dim)


@lowering("aten._softmax_backward_data.default", traits=Traits(classes=1))
def _softmax_backward(
    ctx: Context, grad: Any, output: Any, dim: int, input_dtype: Any
) -> jax.Array:
    (grad, last), (output, _) = (ordered(ctx, widened(x), dim) for x in (grad, output))
    total = jnp.sum(grad * output, axis=reduced_dims(last, grad.ndim), keepdims=True)
    return restored(ctx, (output * (grad - total)).astype(ctx.dtype), dim)


@lowering("aten._log_softmax_backward_data.default", traits=Traits(classes=1))
def _log_softmax_backward(
    ctx: Context, grad: Any, output: Any, dim: int, input_dtype: Any
) -> jax.Array:
    (grad, last), (output, _) = (ordered(ctx, widened(x), dim) for x in (grad, output))
    total = jnp.sum(grad, axis=reduced_dims(last, grad.ndim), keepdims=True)
    return restored(ctx, (grad - jnp.exp(output) * total).astype(ctx.dtype), dim)


# torch's numbers for `mask_type`. The mask's shape is (query, key) for 0, (batch, key) for 1, and
# the input's shape for 2 or None.
_SOURCE_MASK, _PADDING_MASK = 0, 1


def _check_masked(
    x: torch.Tensor, mask: torch.Tensor, dim: int | None = None, mask_type: int | None = None
) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        raise RuntimeError(
            f"Mask should be a boolean tensor; got {mask.dtype}. "
            "Convert it with .bool(), where True means left out."
        )
    wanted: tuple[int, ...] = tuple(x.shape)
    if mask_type == _SOURCE_MASK:
        wanted = tuple(x.shape[-2:])
    elif mask_type == _PADDING_MASK:
        wanted = (x.shape[0], x.shape[-1])
    if tuple(mask.shape) != wanted:
        raise RuntimeError(
            f"Mask shape should match the input's: {list(wanted)} for mask type {mask_type}; "
            f"got {list(mask.shape)}. Give it that shape."
        )
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@lowering("aten._masked_softmax.default", meta=_check_masked)
def _masked_softmax(
    ctx: Context, x: Any, mask: Any, dim: int | None = None, mask_type: int | None = None
) -> jax.Array:
    """The softmax over elements whose mask is False; NaN for a row without any, as in torch."""
    if mask_type == _PADDING_MASK:
        mask = mask.reshape(x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1])
    x = jnp.where(mask, jnp.asarray(-jnp.inf, x.dtype), x)
    return _softmax_over(ctx, x, reduced_dims(-1 if dim is None else dim, x.ndim)).astype(ctx.dtype)


@lowering(
    "aten._masked_softmax_backward.default",
    meta=lambda grad, output, mask, dim=None: _check_masked(grad, mask),
)
def _masked_softmax_backward(
    ctx: Context, grad: Any, output: Any, mask: Any, dim: int | None = None
) -> jax.Array:
    zero = jnp.zeros((), opmath(grad.dtype))
    # Masked before the products, because a masked gradient may be NaN.
    grad, output = jnp.where(mask, zero, widened(grad)), jnp.where(mask, zero, widened(output))
    total = jnp.sum(
        grad * output, axis=reduced_dims(-1 if dim is None else dim, grad.ndim), keepdims=True
    )
    return jnp.where(mask, zero, output * (grad - total)).astype(ctx.dtype)
