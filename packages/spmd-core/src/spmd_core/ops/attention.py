"""Attention as one operation, forward and backward, by the fastest kernel of the platform.

- cpu: blocks in plain jax (`kernels.flash`), a single block where the sequences are short;
- gpu: cuDNN's flash attention where `_cudnn_takes` allows, else the blocks;
- tpu: jax's splash attention kernel where `_splash_takes` allows, else the blocks.

Where mesh axes split the sequences, the blocks go round in a ring (`kernels.ring`).

XLA cannot partition cuDNN's and jax's kernels. On GPUs `_per_shard` splits them over batch and
heads as the partitioner chose; on TPUs, where nothing may be asked of Python at that time,
`_per_block` splits them as `program.attention_layouts` found. Their backward computes the forward
again under `jax.vjp`, because jax has no function that takes the forward's saved results.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core import releases
from spmd_core.ops.kernels import flash, ring
from spmd_core.ops.kernels.precision import is_sixteen_bit, opmath
from spmd_core.ops.registry import AttentionLayout, Context, Number, lowering

_core = releases.jax_module("jax.extend.core", "ClosedJaxpr", "jaxpr_as_fun")
_partitioning = releases.jax_module("jax.experimental.custom_partitioning", "custom_partitioning")

# The seed is a Scalar, so that it is an input of the program; the other options are static. What is
# recorded without torch's dispatcher may have a tensor there: a seed of each device's own.
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


# ---- torch's arguments as those of `flash` and the kernels ---------------------------------------


def _plan(
    query: Any, key: Any, dropout_p: float, is_causal: bool, scale: float | None
) -> flash.Plan:
    scale = 1.0 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    return flash.Plan(query.shape[-2], key.shape[-2], scale, is_causal, dropout_p)


def _grouped(query: jax.Array, num_heads: int) -> jax.Array:
    """(..., heads, rows, dim) as (..., kv heads, group, rows, dim).

    A tensor without a head dim gets one.
    """
    if query.ndim == 2:
        return query[None, None]
    return query.reshape(
        *query.shape[:-3], num_heads, query.shape[-3] // max(num_heads, 1), *query.shape[-2:]
    )


def _ungrouped(query: jax.Array, *rest: jax.Array | None) -> Any:
    """The arrays without the group dim where it is 1: it would decide the products' layout."""
    return [
        x if x is None or query.shape[-3] != 1 else lax.squeeze(x, (x.ndim - 3,))
        for x in (query, *rest)
    ]


def _with_head_dim(key: jax.Array) -> jax.Array:
    return key[None] if key.ndim == 2 else key


def _repeats(ctx: Context, kv_heads: int) -> int:
    """How often each kv head occurs where axes split a group of query heads, else 1."""
    layout = ctx.attention
    if layout is None or not (layout.rows or ctx.platform == "tpu"):
        return 1  # the partitioner finds a way of its own
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


def _ring_layout(ctx: Context, plan: flash.Plan, seed: Any) -> AttentionLayout | None:
    """The layout of a ring, or None where the sequences are whole.

    A mask that needs a gradient, dropout, and a causal mask of two lengths are the partitioner's.
    """
    layout = ctx.attention
    is_whole = layout is None or layout.count(layout.rows) == 1
    if is_whole or seed is not None or min(plan.num_queries, plan.num_keys) == 1:
        return None
    return None if plan.is_causal and plan.num_queries != plan.num_keys else layout


def _grouped_mask(mask: jax.Array, num_heads: int, ndim: int) -> jax.Array:
    """The mask with all `ndim` dims of the grouped scores."""
    mask = mask.reshape((1,) * (ndim - 1 - mask.ndim) + mask.shape)
    heads = (1, 1) if mask.shape[-3] == 1 else (num_heads, mask.shape[-3] // num_heads)
    return mask.reshape(*mask.shape[:-3], *heads, *mask.shape[-2:])


def _cast_operands(ctx: Context, *arrays: jax.Array) -> Any:
    """The operands in the dtype in which the blocks multiply them.

    16-bit operands stay so where matrix units take them; the probabilities are then rounded, as
    every flash kernel rounds them. A CPU multiplies in float32 anyway, so nothing is rounded there.
    """
    return [x.astype(opmath(x.dtype)) for x in arrays] if ctx.platform == "cpu" else arrays


def _random_key(seed: Number | jax.Array | None) -> jax.Array | None:
    value = seed.value if isinstance(seed, Number) else seed
    return None if value is None else jax.random.key(value, impl="threefry2x32")


# (query, key, value, whether the result is to be differentiated) -> (out, lse)
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
    """The platform's own kernel, or None where the blocks compute; `query` is grouped."""
    if mask is not None or seed is not None or query.ndim != 5 or query.size == 0 or key.size == 0:
        # A mask: for a row that attends to no key, the kernels do not return torch's zeros.
        # A seed: cuDNN's is static.
        return None
    if ctx.platform == "gpu" and _cudnn_takes(plan, query, value, _cuda_capability()):
        return lambda query, key, value, differentiable: _cudnn(plan, query, key, value)
    is_split_known = ctx.num_devices == 1 or ctx.attention is not None
    if ctx.platform == "tpu" and is_split_known and _splash_takes(plan, query, value):
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
    """The attended values and the log of the sum of the scores' exponentials, in torch's shapes."""
    shape, wide = ctx.shape, opmath(query.dtype)
    plan = _plan(query, key, dropout_p, is_causal, scale)
    if math.prod(shape[:-1]) * key.shape[-2] == 0:  # no scores at all
        return jnp.zeros(shape, ctx.dtype), jnp.full(shape[:-1], -np.inf, wide)
    key, value = (_repeated(ctx, _with_head_dim(x)) for x in (key, value))
    heads = key.shape[-3]
    query = _grouped(query, heads)
    mask = None if mask is None else _grouped_mask(mask, heads, query.ndim)
    layout = _ring_layout(ctx, plan, seed)
    kernel = None if layout else _kernel(ctx, plan, query, key, value, mask, seed)
    if kernel is not None:
        out, lse = _split(ctx, lambda *args: kernel(*args, False), query, key, value)
    else:
        query, mask = _ungrouped(query, mask)
        query, key, value = _cast_operands(ctx, query, key, value)
        if layout:
            out, lse = ring.forward(plan, layout, query, key, value, mask)
        else:
            out, lse = flash.forward(plan, query, key, value, mask, _random_key(seed))
    return out.reshape(shape).astype(ctx.dtype), lse.reshape(shape[:-1]).astype(wide)


@lowering("spmd.attention.default", meta=_meta)
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


@lowering("spmd.attention.lse", meta=_meta_lse)
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


@lowering("spmd.attention_backward.default", meta=_meta_backward)
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
    num_heads = _with_head_dim(key).shape[-3]
    key, value = (_repeated(ctx, _with_head_dim(x)) for x in (key, value))
    heads = key.shape[-3]
    query, grad, out, lse = (_grouped(x, heads) for x in (query, grad, out, lse[..., None]))
    mask = None if attn_mask is None else _grouped_mask(attn_mask, heads, query.ndim)
    layout = None if wanted.mask else _ring_layout(ctx, plan, seed)
    kernel = None if layout else _kernel(ctx, plan, query, key, value, mask, seed)
    grads: Sequence[jax.Array | None]
    if kernel is not None:

        def shard_gradients(
            query: jax.Array, key: jax.Array, value: jax.Array, grad: jax.Array
        ) -> tuple[jax.Array, ...]:
            _, vjp = jax.vjp(lambda *args: kernel(*args, True)[0], query, key, value)
            return vjp(grad)

        grads = _split(ctx, shard_gradients, query, key, value, grad)
    else:
        query, grad, out, lse, mask = _ungrouped(query, grad, out, lse, mask)
        grad, query, key, value = _cast_operands(ctx, grad, query, key, value)
        arrays = (grad, query, key, value, mask, out, lse[..., 0])
        grads = (
            ring.backward(plan, layout, *arrays)
            if layout
            else flash.backward(plan, *arrays, _random_key(seed), wanted)
        )
    if heads > num_heads:
        grads = [grads[0], *(_summed(g, num_heads) for g in grads[1:3]), *grads[3:]]
    return [
        g.reshape(x.shape).astype(x.dtype)
        for g, x, yes in zip([*grads, None][:4], given, output_mask)
        if yes and g is not None
    ]


@lowering("spmd.attention_kept.default", meta=_meta_kept)
def _attention_kept(
    ctx: Context, query: Any, key: Any, seed: Number, dropout_p: float, is_causal: bool
) -> jax.Array:
    heads = _with_head_dim(key).shape[-3]
    shape = _grouped(query, heads).shape[:-1]
    random_key = _random_key(seed)
    assert random_key is not None
    return flash.dropout_mask(
        _plan(query, key, dropout_p, is_causal, 1.0), random_key, (*shape, key.shape[-2])
    ).reshape(ctx.shape)


# ---- kernels that XLA cannot partition -----------------------------------------------------------


def _split(ctx: Context, kernel: Callable[..., Any], *args: jax.Array) -> Any:
    """`kernel(*args)`, on each device for the batch elements and kv heads that the device holds.

    Batch and kv heads are the first two dims of every argument and result; the other dims are
    gathered.
    """

    def call(*given: jax.Array) -> Any:
        # The index arithmetic of jax's kernels expects Python numbers to have 32 bits.
        with jax.enable_x64(False):
            return kernel(*given)

    if ctx.platform == "tpu":
        return call(*args) if ctx.attention is None else _per_block(ctx.attention, call, *args)
    return _per_shard(call, *args)


def _per_block(layout: AttentionLayout, call: Callable[..., Any], *args: jax.Array) -> Any:
    """`call(*args)` in a manual region, for TPUs.

    libtpu compiles no call that a partitioner in Python must split ("Custom emitter for
    CustomSPMDPartitioning not found").
    """
    spec = PartitionSpec(layout.batch or None, layout.heads or None)
    size = args[0].shape[0]
    missing = -size % layout.count(layout.batch)
    padded = [jnp.pad(x, [(0, missing), *((0, 0),) * (x.ndim - 1)]) for x in args]
    mapped: Callable[..., Any] = jax.shard_map(
        call, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.tree.map(lambda x: x[:size], mapped(*padded))


def _per_shard(call: Callable[..., Any], *args: jax.Array) -> Any:
    """`call(*args)`, split as the partitioner splits the arguments.

    Without this function the partitioner would gather all dims of the arguments.
    """
    # A partitioned function may hold no constants, such as a kernel's table of blocks: those of the
    # whole call are replicated arguments instead. `on_shard` makes each shard's own constants, for
    # its number of heads.
    whole = jax.make_jaxpr(call)(*args)
    tree = jax.tree.structure(jax.eval_shape(call, *args))
    num_constants = len(whole.consts)

    def body(*given: jax.Array) -> Any:
        constants, rest = given[:num_constants], given[num_constants:]
        return jax.tree.unflatten(
            tree, _core.jaxpr_as_fun(_core.ClosedJaxpr(whole.jaxpr, constants))(*rest)
        )

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
        produced = [dims(f"r{i}d", len(x.shape), "b", "h") for i, x in enumerate(results)]
        return f"{', '.join([*constants, *split])} -> {', '.join(produced)}"

    wrapped = _partitioning.custom_partitioning(body)
    wrapped.def_partition(
        partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule
    )
    return wrapped(*whole.consts, *args)


def _cuda_capability() -> float | None:
    """The first GPU's compute capability, or None where it is not an Nvidia GPU."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    try:
        return float(capability) if capability is not None else None
    except ValueError:  # AMD names its chips (gfx942)
        return None


def _cudnn_takes(
    plan: flash.Plan, query: jax.Array, value: jax.Array, capability: float | None
) -> bool:
    """Whether cuDNN's flash attention computes this.

    It needs 16-bit floats, Ampere or later, and a head dim, equal for queries and values, that is
    a multiple of 8 up to 128 (256 from Hopper on). These are jax's checks: `dot_product_attention`
    and `check_is_flash_attention`. With a causal mask the lengths must be equal too, because
    libraries align the mask of different lengths differently.
    """
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
    """cuDNN's kernel, over (batch, rows, heads, dim) with query heads in the order of kv heads."""
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
    """Whether splash attention computes this: whole blocks of 128 rows and keys, and bfloat16.

    For float32 the kernel's products have less precision than torch's.
    """
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
    """jax's TPU kernel, mapped over the batch.

    The kernel has no scale, so the queries are scaled first. The log of the sum of exponentials is
    None where the result is to be differentiated.
    """
    # Not at the top: the module is experimental, and only programs for TPUs should depend on it.
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
    # The kernel's tables of blocks must be values, not tracers.
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
