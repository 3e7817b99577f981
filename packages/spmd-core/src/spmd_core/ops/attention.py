"""Attention kept whole: two functional operations of our own, forward and backward, and which kernel computes them on which platform.

- cpu: blocks in plain jax (`flash`), a single block where the sequences are short;
- gpu: cuDNN's flash attention where `_cudnn_takes` says so, else the blocks;
- tpu: jax's splash attention kernel where the program is on one device and `_splash_takes` says so, else the blocks.

A kernel that XLA cannot look into is split over batch and heads by `_per_shard`. The backward of such a kernel runs its forward again, under
`jax.vjp`: jax offers no way to hand in what the forward kept.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.ops.kernels import flash
from spmd_core.ops.kernels.precision import is_sixteen_bit, opmath
from spmd_core.ops.registry import Context, Number, lowering

# The seed is a Scalar, so that it is an input of the program; the rest is static.
_OPTIONS = "Scalar? seed, float dropout_p, bool is_causal, float? scale, bool enable_gqa"
_library = torch.library.Library("spmd", "FRAGMENT")
_library.define(
    f"attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, {_OPTIONS}) -> Tensor"
)
_library.define(
    f"attention.lse(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, {_OPTIONS}) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor out, Tensor lse, "
    f"{_OPTIONS}, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "attention_kept(Tensor query, Tensor key, Scalar seed, float dropout_p, bool is_causal) -> Tensor"
)


# What torch says of the results: shapes, strides, dtypes, and what it refuses.


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    """Raises RuntimeError, as torch does, for what attention refuses; the leading dims are equal already, save for grouped heads."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            f"Expected query, key, and value to have the same dtype, but got {query.dtype}, {key.dtype} and {value.dtype}. Convert them with .to()."
        )
    if not query.dtype.is_floating_point:
        raise RuntimeError(
            f"expected scalar type Float for attention, but got {query.dtype}. Convert query, key and value with .to()."
        )
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            f"Expected query, key, and value to all be at least 2 dimensional, but got {shapes}. Add dims with unsqueeze(0)."
        )
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"Expected size of the last dim to agree for query and key, and of the one before for key and value; got {shapes}."
        )
    if enable_gqa and (query.dim() < 3 or key.shape[-3] == 0 or query.shape[-3] % key.shape[-3]):
        raise RuntimeError(
            f"Number of heads in key and value must divide the number of heads in query; got {shapes}. Heads are the third dim from last."
        )
    if mask is None:
        return
    if is_causal:
        raise RuntimeError(
            "Explicit attn_mask should not be set when is_causal=True. Leave out is_causal and put it into the mask."
        )
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            f"Expected attn_mask dtype to be bool or float or to match query dtype, but got {mask.dtype} and {query.dtype}."
        )
    scores = (*query.shape[:-1], key.shape[-2])
    if mask.dim() > len(scores) or any(
        n not in (1, size) for n, size in zip(reversed(mask.shape), reversed(scores))
    ):
        raise RuntimeError(
            f"The size of attn_mask must match the scores' or be 1 in every dim; got {tuple(mask.shape)} for scores {scores}."
        )


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
    # torch's fused kernel keeps the query's strides; what it does not take is composed, and contiguous.
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
    # A mask that is not there has no gradient, and `output_mask` says so.
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


# From torch's arguments to what `flash` and the kernels take.


def _plan(
    query: Any, key: Any, dropout_p: float, is_causal: bool, scale: float | None
) -> flash.Plan:
    scale = 1.0 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    return flash.Plan(query.shape[-2], key.shape[-2], scale, is_causal, dropout_p)


def _grouped(query: jax.Array, num_heads: int) -> jax.Array:
    """(..., heads, rows, dim) as (..., kv heads, group, rows, dim); a tensor without a head dim gets one."""
    if query.ndim == 2:
        return query[None, None]
    return query.reshape(
        *query.shape[:-3], num_heads, query.shape[-3] // max(num_heads, 1), *query.shape[-2:]
    )


def _ungrouped(query: jax.Array, *rest: jax.Array | None) -> Any:
    """Without the dim for the group where it is 1, as its products would be laid out by it."""
    return [
        x if x is None or query.shape[-3] != 1 else lax.squeeze(x, (x.ndim - 3,))
        for x in (query, *rest)
    ]


def _headed(key: jax.Array) -> jax.Array:
    return key[None] if key.ndim == 2 else key


def _grouped_mask(mask: jax.Array, num_heads: int, ndim: int) -> jax.Array:
    """The mask with all dims of the grouped scores, of which there are `ndim`."""
    mask = mask.reshape((1,) * (ndim - 1 - mask.ndim) + mask.shape)
    heads = (1, 1) if mask.shape[-3] == 1 else (num_heads, mask.shape[-3] // num_heads)
    return mask.reshape(*mask.shape[:-3], *heads, *mask.shape[-2:])


def _operands(ctx: Context, *arrays: jax.Array) -> Any:
    """What the blocks multiply: 16-bit operands stay so where matrix units take them, and probabilities are then rounded as every flash kernel rounds
    them. A CPU multiplies float32 in any case, so that there nothing is rounded on the way."""
    return [x.astype(opmath(x.dtype)) for x in arrays] if ctx.platform == "cpu" else arrays


def _key_of(seed: Number | None) -> jax.Array | None:
    return None if seed is None else jax.random.key(seed.value, impl="threefry2x32")


# (query, key, value, whether it is to be differentiated) -> (out, lse)
Kernel = Callable[..., tuple[jax.Array, jax.Array | None]]


def _kernel(
    ctx: Context,
    plan: flash.Plan,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Any,
    seed: Any,
) -> Kernel | None:
    """The platform's own kernel where it takes these; query is grouped. None where the blocks compute."""
    if mask is not None or seed is not None or query.ndim != 5 or query.size == 0 or key.size == 0:
        # A mask is left to the blocks as the kernels give a row without any key something other than torch's zeros; cuDNN's seed is static.
        return None
    if ctx.platform == "gpu" and _cudnn_takes(plan, query, value, _cuda_capability()):
        return lambda query, key, value, differentiable: _cudnn(plan, query, key, value)
    # libtpu compiles no call that a partitioner in Python must split ("Custom emitter for CustomSPMDPartitioning not found").
    if ctx.platform == "tpu" and ctx.num_devices == 1 and _splash_takes(plan, query, value):
        return lambda query, key, value, differentiable: _splash(
            plan, query, key, value, differentiable=differentiable
        )
    return None


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
    """The attended values and the log of the sum of exponents, shaped as torch wants them."""
    shape, wide = ctx.shape, opmath(query.dtype)
    plan = _plan(query, key, dropout_p, is_causal, scale)
    if math.prod(shape[:-1]) * key.shape[-2] == 0:  # no scores at all
        return jnp.zeros(shape, ctx.dtype), jnp.full(shape[:-1], -np.inf, wide)
    key, value = _headed(key), _headed(value)
    heads = key.shape[-3]
    query = _grouped(query, heads)
    mask = None if mask is None else _grouped_mask(mask, heads, query.ndim)
    kernel = _kernel(ctx, plan, query, key, value, mask, seed)
    if kernel is not None:
        out, lse = _per_shard(lambda *args: kernel(*args, False), query, key, value)
    else:
        query, mask = _ungrouped(query, mask)
        query, key, value = _operands(ctx, query, key, value)
        out, lse = flash.forward(plan, query, key, value, mask, _key_of(seed))
    return out.reshape(shape).astype(ctx.dtype), lse.reshape(shape[:-1]).astype(wide)


@lowering("spmd.attention.default")
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


@lowering("spmd.attention.lse")
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


@lowering("spmd.attention_backward.default")
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
    plan = _plan(query, key, dropout_p, is_causal, scale)
    key, value = _headed(key), _headed(value)
    heads = key.shape[-3]
    query, grad, out, lse = (_grouped(x, heads) for x in (query, grad, out, lse[..., None]))
    mask = None if attn_mask is None else _grouped_mask(attn_mask, heads, query.ndim)
    kernel = _kernel(ctx, plan, query, key, value, mask, seed)
    grads: Sequence[jax.Array | None]
    if kernel is not None:

        def of_shard(
            query: jax.Array, key: jax.Array, value: jax.Array, grad: jax.Array
        ) -> tuple[jax.Array, ...]:
            _, vjp = jax.vjp(lambda *args: kernel(*args, True)[0], query, key, value)
            return vjp(grad)

        grads = _per_shard(of_shard, query, key, value, grad)
    else:
        query, grad, out, lse, mask = _ungrouped(query, grad, out, lse, mask)
        grad, query, key, value = _operands(ctx, grad, query, key, value)
        grads = flash.backward(
            plan, grad, query, key, value, mask, out, lse[..., 0], _key_of(seed), wanted
        )
    return [
        g.reshape(x.shape).astype(x.dtype)
        for g, x, yes in zip([*grads, None][:4], given, output_mask)
        if yes and g is not None
    ]


@lowering("spmd.attention_kept.default")
def _attention_kept(
    ctx: Context, query: Any, key: Any, seed: Number, dropout_p: float, is_causal: bool
) -> jax.Array:
    heads = _headed(key).shape[-3]
    shape = _grouped(query, heads).shape[:-1]
    made = _key_of(seed)
    assert made is not None
    return flash.kept(
        _plan(query, key, dropout_p, is_causal, 1.0), made, (*shape, key.shape[-2])
    ).reshape(ctx.shape)


# Kernels that XLA cannot look into.


def _per_shard(kernel: Callable[..., Any], *args: jax.Array) -> Any:
    """`kernel(*args)` over batch and kv heads (the first two dims of every argument and result), each device for those that it holds.

    Without this the partitioner would gather the arguments on every device. The other dims are gathered.
    """

    def call(*given: jax.Array) -> Any:
        with jax.enable_x64(
            False
        ):  # the index arithmetic of jax's kernels takes Python's numbers for 32 bits
            return kernel(*given)

    # What is partitioned may hold no constants, such as a kernel's table of blocks: the whole program's come as replicated arguments. Each shard's
    # own, for its number of heads, are made when it is known.
    whole = jax.make_jaxpr(call)(*args)
    tree = jax.tree.structure(jax.eval_shape(call, *args))
    num_constants = len(whole.consts)

    def body(*given: jax.Array) -> Any:
        constants, rest = given[:num_constants], given[num_constants:]
        return jax.tree.unflatten(tree, jaxpr_as_fun(ClosedJaxpr(whole.jaxpr, constants))(*rest))

    def on_shard(*given: jax.Array) -> Any:
        return call(*given[num_constants:])

    def sharding_of(mesh: Any, leading: Any, x: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*leading, *(None,) * (len(x.shape) - 2)))

    def shardings(mesh: Any, given: Any, results: Any) -> tuple[Any, tuple[Any, ...]]:
        first = given[num_constants].sharding
        leading = (*(() if first is None else first.spec), None, None)[:2]
        of_given = (
            *(NamedSharding(mesh, PartitionSpec()) for _ in range(num_constants)),
            *(sharding_of(mesh, leading, x) for x in args),
        )
        return jax.tree.map(lambda x: sharding_of(mesh, leading, x), results), of_given

    def partition(mesh: Any, given: Any, results: Any) -> Any:
        return mesh, on_shard, *shardings(mesh, given, results)

    def infer(mesh: Any, given: Any, results: Any) -> Any:
        return shardings(mesh, given, results)[0]

    def rule(mesh: Any, given: Any, results: Any) -> str:
        def dims(name: str, ndim: int, *leading: str) -> str:
            return " ".join([*leading, *(f"{name}{d}" for d in range(len(leading), ndim))])

        constants = [dims(f"c{i}d", len(x.shape)) for i, x in enumerate(given[:num_constants])]
        split = [
            dims(f"a{i}d", len(x.shape), "b", "h") for i, x in enumerate(given[num_constants:])
        ]
        return f"{', '.join([*constants, *split])} -> {', '.join(dims(f'r{i}d', len(x.shape), 'b', 'h') for i, x in enumerate(results))}"

    wrapped = custom_partitioning(body)
    wrapped.def_partition(
        partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule
    )
    return wrapped(*whole.consts, *args)


def _cuda_capability() -> float | None:
    """The first GPU's compute capability, or None where it is not one of Nvidia's."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    try:
        return float(capability) if capability is not None else None
    except ValueError:  # AMD names its chips (gfx942)
        return None


def _cudnn_takes(
    plan: flash.Plan, query: jax.Array, value: jax.Array, capability: float | None
) -> bool:
    """cuDNN's flash attention: 16 bits, Ampere or later, a head dim that is a multiple of 8 up to 128 (256 from Hopper on), the values' too (jax's
    checks: `dot_product_attention`, `check_is_flash_attention`). A causal mask over two different lengths is aligned in other ways elsewhere."""
    if capability is None or capability < 8 or not is_sixteen_bit(query.dtype):
        return False
    dim, largest = query.shape[-1], 256 if capability >= 9 else 128
    return (
        dim % 8 == 0
        and dim <= largest
        and value.shape[-1] == dim
        and not (plan.is_causal and plan.num_queries != plan.num_keys)
    )


def _cudnn(
    plan: flash.Plan, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cuDNN takes (batch, rows, heads, dim), and its query heads stand in the order of their kv heads."""
    batch, heads, group, rows, dim = query.shape
    rows_first = query.reshape(batch, heads * group, rows, dim).swapaxes(1, 2)
    out, lse = jax.nn.dot_product_attention(
        rows_first,
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        scale=plan.scale,
        is_causal=plan.is_causal,
        implementation="cudnn",
        return_residual=True,
    )
    return out.swapaxes(1, 2).reshape(query.shape), lse.swapaxes(1, 2).reshape(query.shape[:-1])


def _splash_takes(plan: flash.Plan, query: jax.Array, value: jax.Array) -> bool:
    """Splash attention: whole blocks of 128 rows and keys, and bfloat16, as the kernel's products of float32 are shorter than torch's."""
    return (
        query.dtype == jnp.bfloat16
        and plan.num_queries % 128 == 0
        and plan.num_keys % 128 == 0
        and query.shape[-1] % 64 == 0
        and value.shape[-1] % 64 == 0
    )


def _splash(
    plan: flash.Plan,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    differentiable: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """jax's TPU kernel, one batch element at a time. It has no scale. The log of the sum comes only where it is not to be differentiated."""
    # Here and not at the top: the module is experimental, and only programs for TPUs should depend on it.
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
        splash_attention_kernel as splash_kernel,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
        splash_attention_mask as splash_mask,
    )

    batch, heads, group, rows, dim = query.shape
    size = (plan.num_queries, plan.num_keys)
    mask = splash_mask.CausalMask(size) if plan.is_causal else splash_mask.FullMask(size)
    block_q, block_k = (next(b for b in (512, 256, 128) if n % b == 0) for n in size)
    blocks = splash_kernel.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_kv_compute=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=block_k,
        block_kv_dkv_compute=block_k,
        block_q_dq=block_q,
        block_kv_dq=block_k,
    )
    # Its tables of blocks must be values, not part of the trace.
    with jax.ensure_compile_time_eval():
        masks = splash_mask.MultiHeadMask([mask] * (heads * group))
        kernel = splash_kernel.make_splash_mha(
            masks,
            head_shards=1,
            q_seq_shards=1,
            block_sizes=blocks,
            save_residuals=not differentiable,
            interpret=interpret,
        )
    scaled = (
        (query.astype(np.float32) * np.float32(plan.scale))
        .astype(query.dtype)
        .reshape(batch, heads * group, rows, dim)
    )
    found = jax.vmap(kernel)(scaled, key, value)
    out, lse = (
        (found, None) if differentiable else (found[0], found[1][0].reshape(query.shape[:-1]))
    )
    return out.reshape(*query.shape[:-1], value.shape[-1]), lse
