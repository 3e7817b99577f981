"""Attention as one operation, forward and backward, by the fastest kernel of the platform.

- where mesh axes split the sequences: a ring (`kernels.ring`);
- where `kernels.platform_attention` has one for the arguments: the platform's own kernel;
- else blocks in plain jax (`kernels.flash`), a single block where the sequences are short.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd_core.ops.kernels import flash, platform_attention, ring
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.threefry import fused
from spmd_core.ops.kernels.traits import Traits
from spmd_core.ops.registry import AttentionLayout, Context, Number, flop_formula, lowering

# The seed is a Scalar, so that it is an input of the program; the other options are static. A call
# that is recorded without torch's dispatcher may pass a tensor: another seed on each device.
_OPTIONS = "Scalar? seed, float dropout_p, bool is_causal, float? scale, bool enable_gqa"
_library = torch.library.Library("spmd", "FRAGMENT")
_library.define(
    f"attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, {_OPTIONS}) -> Tensor"
)
_library.define(
    f"attention.lse(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, {_OPTIONS}) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    f"Tensor out, Tensor lse, {_OPTIONS}, bool[4] output_mask) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "attention_kept(Tensor query, Tensor key, Scalar seed, float dropout_p, bool is_causal) "
    "-> Tensor"
)


# ---- FLOPs, as torch counts its fused kernels: all scores, even with a causal mask ------------


@flop_formula("spmd.attention")
def _flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Scores, and their product with the values."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


@flop_formula("spmd.attention_backward")
def _flops_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, **__: Any) -> int:
    """The scores again, their gradient, and the gradients of query, key and value."""
    of_query, of_key, of_value, of_mask = rest[-1]
    of_scores = of_query or of_key or of_mask
    products_of_query = any(rest[-1]) + of_query + of_key
    products_of_value = of_scores + of_value
    features = products_of_query * query[-1] + products_of_value * value[-1]
    return int(2 * math.prod(query[:-1]) * key[-2] * features)


# ---- meta kernels: the checks of the arguments, and the results' shapes, strides and dtypes ------


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    """Raises RuntimeError for the arguments that torch's attention refuses.

    The leading dims are equal already, except for the heads with `enable_gqa`.
    """
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got "
            f"{query.dtype}, {key.dtype} and {value.dtype}. Convert them with .to()."
        )
    if not query.dtype.is_floating_point:
        raise RuntimeError(
            f"expected scalar type Float for attention, but got {query.dtype}. "
            "Convert query, key and value with .to()."
        )
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be at least 2 dimensional, but got "
            f"{shapes}. Add dims with unsqueeze(0)."
        )
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            "Expected size of the last dim to agree for query and key, and of the one before for "
            f"key and value; got {shapes}."
        )
    if enable_gqa and (query.dim() < 3 or key.shape[-3] == 0 or query.shape[-3] % key.shape[-3]):
        raise RuntimeError(
            "Number of heads in key and value must divide the number of heads in query; got "
            f"{shapes}. Heads are the third dim from last."
        )
    if mask is None:
        return
    if is_documents(mask.dtype):
        assert mask.shape == (query.shape[0], query.shape[-2]) and query.dim() == 4
        return
    if is_causal:
        raise RuntimeError(
            "Explicit attn_mask should not be set when is_causal=True. Leave out is_causal and put "
            "it into the mask."
        )
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"{mask.dtype} and {query.dtype}."
        )
    scores = (*query.shape[:-1], key.shape[-2])
    if mask.dim() > len(scores) or any(
        n not in (1, size) for n, size in zip(reversed(mask.shape), reversed(scores))
    ):
        raise RuntimeError(
            "The size of attn_mask must match the scores' or be 1 in every dim; got "
            f"{tuple(mask.shape)} for scores {scores}."
        )


def is_documents(dtype: torch.dtype) -> bool:
    """Whether a mask of this dtype consists of document ids (batch, rows), for queries and keys.

    Only `modules.document_attention` gives one: torch refuses such masks.
    """
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _meta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    seed: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    _check(query, key, value, attn_mask, is_causal, enable_gqa)
    # torch's fused kernel keeps the query's strides; torch composes the other cases, and their
    # result is contiguous.
    if query.dim() == 4 and dropout_p == 0 and value.shape[-1] == query.shape[-1]:
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _meta_lse(query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float32 if query.dtype in (torch.float16, torch.bfloat16) else query.dtype
    return _meta(query, *rest), query.new_empty(query.shape[:-1], dtype=wide)


def _meta_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    # Without a mask, `output_mask` asks for no gradient of it: any shape will do.
    return tuple(
        torch.empty_like(x) for x in (query, key, value, query if attn_mask is None else attn_mask)
    )


def _meta_kept(
    query: torch.Tensor, key: torch.Tensor, seed: Any, dropout_p: float, is_causal: bool
) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], key.shape[-2]), dtype=torch.bool)


_library.impl("attention", _meta, "Meta")
_library.impl("attention.lse", _meta_lse, "Meta")
_library.impl("attention_backward", _meta_backward, "Meta")
_library.impl("attention_kept", _meta_kept, "Meta")


# ---- conversion of torch's arguments to those of the kernels -------------------------------------


def _attention_options(
    query: Any, key: Any, dropout_p: float, is_causal: bool, scale: float | None
) -> flash.AttentionOptions:
    scale = 1.0 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    return flash.AttentionOptions(query.shape[-2], key.shape[-2], scale, is_causal, dropout_p)


def _grouped(query: jax.Array, num_heads: int) -> jax.Array:
    """(..., heads, rows, dim) as (..., kv heads, group, rows, dim).

    A tensor without a head dim gets one.
    """
    if query.ndim == 2:
        return query[None, None]
    return query.reshape(
        *query.shape[:-3], num_heads, query.shape[-3] // max(num_heads, 1), *query.shape[-2:]
    )


def _ungrouped(query: jax.Array, *rest: flash.Mask) -> Any:
    """The arrays without the group dim if it is 1: it would affect the layout of the products."""
    if query.shape[-3] != 1:
        return [query, *rest]
    return jax.tree.map(lambda x: lax.squeeze(x, (x.ndim - 3,)), [query, *rest])


def _with_head_dim(key: jax.Array) -> jax.Array:
    return key[None] if key.ndim == 2 else key


def _repeats(ctx: Context, kv_heads: int) -> int:
    """How often to repeat each kv head: more than once if axes split a group of query heads."""
    layout = ctx.layout(AttentionLayout)
    if layout is None or not (layout.rows or ctx.platform == "tpu"):
        return 1  # left to the partitioner
    return math.lcm(kv_heads, layout.count(layout.heads)) // kv_heads


def _repeated(ctx: Context, key: jax.Array) -> jax.Array:
    repeats = _repeats(ctx, key.shape[-3])
    return key if repeats == 1 else jnp.repeat(key, repeats, axis=-3)


def _summed(grad: jax.Array | None, kv_heads: int) -> jax.Array | None:
    """The gradient of keys or values from that of the repeated ones."""
    if grad is None:
        return None
    repeats = grad.shape[-3] // kv_heads
    return grad.reshape(*grad.shape[:-3], kv_heads, repeats, *grad.shape[-2:]).sum(-3)


def _ring_layout(
    ctx: Context, options: flash.AttentionOptions, seed: Any
) -> AttentionLayout | None:
    """The layout of a ring; None if the sequences are not split.

    Dropout, and a causal mask with different lengths, are left to the partitioner; so is a mask
    that needs a gradient, by the caller.
    """
    layout = ctx.layout(AttentionLayout)
    is_replicated = layout is None or layout.count(layout.rows) == 1
    if is_replicated or seed is not None or min(options.num_queries, options.num_keys) == 1:
        return None
    return None if options.is_causal and options.num_queries != options.num_keys else layout


def _grouped_mask(mask: Any, num_heads: int, ndim: int) -> flash.Mask:
    """The mask with all `ndim` dims of the grouped scores."""
    if mask is None:
        return None
    if jnp.issubdtype(mask.dtype, np.integer):
        rows = mask.reshape(mask.shape[0], *(1,) * (ndim - 3), mask.shape[1], 1)
        return flash.Documents(rows, rows.swapaxes(-1, -2))
    mask = mask.reshape((1,) * (ndim - 1 - mask.ndim) + mask.shape)
    heads = (1, 1) if mask.shape[-3] == 1 else (num_heads, mask.shape[-3] // num_heads)
    return mask.reshape(*mask.shape[:-3], *heads, *mask.shape[-2:])


def _cast_operands(ctx: Context, *arrays: jax.Array) -> Any:
    """The operands in the dtype of the matrix products.

    On accelerators, 16-bit operands stay 16-bit for the matrix units; the probabilities are then
    rounded, as in every flash kernel. A CPU multiplies in float32, so nothing is rounded there.
    """
    return [x.astype(opmath(x.dtype)) for x in arrays] if ctx.platform == "cpu" else arrays


def _random_key(seed: Number | jax.Array | None) -> jax.Array | None:
    value = seed.value if isinstance(seed, Number) else seed
    return None if value is None else fused(jax.random.key(value, impl="threefry2x32"))


def _forward(
    ctx: Context,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    seed: Number | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[jax.Array, jax.Array]:
    """The attended values and the log of the sum of the scores' exponentials, in torch's shapes."""
    shape, wide = ctx.shape, opmath(query.dtype)
    options = _attention_options(query, key, dropout_p, is_causal, scale)
    if math.prod(shape[:-1]) * key.shape[-2] == 0:  # no scores at all
        return jnp.zeros(shape, ctx.dtype), jnp.full(shape[:-1], -np.inf, wide)
    key, value = (_repeated(ctx, _with_head_dim(x)) for x in (key, value))
    heads = key.shape[-3]
    query = _grouped(query, heads)
    mask = _grouped_mask(mask, heads, query.ndim)
    layout = _ring_layout(ctx, options, seed)
    if layout is None and platform_attention.takes(ctx, options, query, key, value, mask, seed):
        out, lse = platform_attention.forward(ctx, options, query, key, value, mask)
    else:
        query, mask = _ungrouped(query, mask)
        query, key, value = _cast_operands(ctx, query, key, value)
        if layout is not None:
            out, lse = ring.forward(options, layout, query, key, value, mask)
        else:
            out, lse = flash.forward(options, query, key, value, mask, _random_key(seed))
    return out.reshape(shape).astype(ctx.dtype), lse.reshape(shape[:-1]).astype(wide)


# The only number of an attention is the seed of its dropout.
_traits = functools.partial(Traits, passes_nan_on=True, has_seeds=True)


@lowering("spmd.attention.default", meta=_meta, traits=_traits(query=0))
def _attention(
    ctx: Context,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    seed: Any,
    dropout_p: float,
    is_causal: bool,
    scale: Any,
    enable_gqa: bool,
) -> jax.Array:
    return _forward(ctx, query, key, value, attn_mask, seed, dropout_p, is_causal, scale)[0]


@lowering("spmd.attention.lse", meta=_meta_lse, traits=_traits(query=0, is_product=True))
def _attention_lse(
    ctx: Context,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    seed: Any,
    dropout_p: float,
    is_causal: bool,
    scale: Any,
    enable_gqa: bool,
) -> tuple[jax.Array, jax.Array]:
    return _forward(ctx, query, key, value, attn_mask, seed, dropout_p, is_causal, scale)


@lowering(
    "spmd.attention_backward.default", meta=_meta_backward, traits=_traits(query=1, is_product=True)
)
def _attention_backward(
    ctx: Context,
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    out: Any,
    lse: Any,
    seed: Any,
    dropout_p: float,
    is_causal: bool,
    scale: Any,
    enable_gqa: bool,
    output_mask: Sequence[bool],
) -> list[jax.Array]:
    given = (query, key, value, attn_mask)
    wanted = flash.Wanted(*output_mask)
    if grad.size * key.shape[-2] == 0:
        return [jnp.zeros(x.shape, x.dtype) for x, yes in zip(given, output_mask) if yes]
    options = _attention_options(query, key, dropout_p, is_causal, scale)
    num_heads = _with_head_dim(key).shape[-3]
    key, value = (_repeated(ctx, _with_head_dim(x)) for x in (key, value))
    heads = key.shape[-3]
    query, grad, out, lse = (_grouped(x, heads) for x in (query, grad, out, lse[..., None]))
    mask = _grouped_mask(attn_mask, heads, query.ndim)
    layout = None if wanted.mask else _ring_layout(ctx, options, seed)
    grads: Sequence[jax.Array | None]
    if layout is None and platform_attention.takes(ctx, options, query, key, value, mask, seed):
        grads = platform_attention.backward(ctx, options, grad, query, key, value, mask)
    else:
        query, grad, out, lse, mask = _ungrouped(query, grad, out, lse, mask)
        grad, query, key, value = _cast_operands(ctx, grad, query, key, value)
        arrays = (grad, query, key, value, mask, out, lse[..., 0])
        if layout is not None:
            grads = ring.backward(options, layout, *arrays)
        else:
            grads = flash.backward(options, *arrays, _random_key(seed), wanted)
    if heads > num_heads:
        grads = [grads[0], *(_summed(g, num_heads) for g in grads[1:3]), *grads[3:]]
    return [
        g.reshape(x.shape).astype(x.dtype)
        for g, x, yes in zip([*grads, None][:4], given, output_mask)
        if yes and g is not None
    ]


@lowering("spmd.attention_kept.default", meta=_meta_kept, traits=_traits())
def _attention_kept(
    ctx: Context, query: Any, key: Any, seed: Number, dropout_p: float, is_causal: bool
) -> jax.Array:
    heads = _with_head_dim(key).shape[-3]
    shape = _grouped(query, heads).shape[:-1]
    random_key = _random_key(seed)
    assert random_key is not None
    return flash.dropout_mask(
        _attention_options(query, key, dropout_p, is_causal, 1.0),
        random_key,
        (*shape, key.shape[-2]),
    ).reshape(ctx.shape)
