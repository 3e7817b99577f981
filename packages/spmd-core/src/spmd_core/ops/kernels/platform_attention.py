"""Attention by platforms' own kernels: cuDNN's on GPUs, jax's splash attention on TPUs.

XLA cannot partition these kernels. On GPUs, `_per_shard` splits them over batch and heads as the
partitioner chose. On TPUs, where the partitioner cannot call Python, `_per_block` splits them by
the layout that the pass `attention_layouts` chose. For arguments that they do not support, the
caller computes attention in plain jax (`flash`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core import releases
from spmd_core.ops.kernels import flash
from spmd_core.ops.kernels.precision import is_sixteen_bit
from spmd_core.ops.registry import AttentionLayout, Context

_core = releases.jax_module("jax.extend.core", "ClosedJaxpr", "jaxpr_as_fun")
_partitioning = releases.jax_module("jax.experimental.custom_partitioning", "custom_partitioning")


def takes(
    ctx: Context,
    options: flash.AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: flash.Mask,
    seed: Any,
) -> bool:
    """Whether the platform has a kernel for these arguments; `query` is grouped, as for `flash`."""
    is_array = mask is not None and not isinstance(mask, flash.Documents)
    if is_array or seed is not None or query.ndim != 5 or query.size == 0 or key.size == 0:
        # With a mask, the kernels do not return torch's zeros for a row that attends to no key;
        # with documents, each row attends to itself. cuDNN's dropout seed is static.
        return False
    if ctx.platform == "gpu":
        if mask is not None:  # cuDNN's kernel takes no ids
            return False
        return _cudnn_takes(options, query, value, _cuda_capability())
    is_split_known = ctx.num_devices == 1 or ctx.layout(AttentionLayout) is not None
    return ctx.platform == "tpu" and is_split_known and _splash_takes(options, query, value)


def forward(
    ctx: Context,
    options: flash.AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: flash.Mask = None,
) -> tuple[jax.Array, jax.Array]:
    """The attended values, and the log of the sum of the scores' exponentials."""
    found: tuple[jax.Array, jax.Array] = _split(
        ctx,
        lambda *args: _kernel(ctx, options, *args, differentiable=False),
        *(query, key, value, *_ids(mask)),
    )
    return found


def backward(
    ctx: Context,
    options: flash.AttentionOptions,
    grad: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: flash.Mask = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value.

    The forward is computed again under `jax.vjp`, because jax has no function that takes the
    forward's saved results.
    """

    def gradients(
        query: jax.Array, key: jax.Array, value: jax.Array, grad: jax.Array, *ids: jax.Array
    ) -> Any:
        _, vjp = jax.vjp(
            lambda *args: _kernel(ctx, options, *args, *ids, differentiable=True)[0],
            query,
            key,
            value,
        )
        return vjp(grad)

    found: tuple[jax.Array, jax.Array, jax.Array] = _split(
        ctx, gradients, query, key, value, grad, *_ids(mask)
    )
    return found


def _ids(mask: flash.Mask) -> list[jax.Array]:
    """The documents' ids, int32 of shape (batch, rows), if there are any."""
    if mask is None:
        return []
    assert isinstance(mask, flash.Documents), "takes() refuses other masks"
    rows = mask.rows
    return [rows.reshape(rows.shape[0], rows.shape[-2]).astype(np.int32)]


def _kernel(
    ctx: Context,
    options: flash.AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *ids: jax.Array,
    differentiable: bool,
) -> tuple[jax.Array, jax.Array | None]:
    if ctx.platform == "gpu":
        return _cudnn(options, query, key, value)
    return _splash(options, query, key, value, *ids, differentiable=differentiable)


def _split(ctx: Context, kernel: Callable[..., Any], *args: jax.Array) -> Any:
    """`kernel(*args)`, on each device for its own batch elements and kv heads.

    Batch and kv heads are the first two dims of every argument and result (ids only have a batch);
    the other dims are gathered.
    """

    def call(*given: jax.Array) -> Any:
        # The index arithmetic of jax's kernels expects Python numbers to have 32 bits.
        with jax.enable_x64(False):
            return kernel(*given)

    if ctx.platform == "tpu":
        layout = ctx.layout(AttentionLayout)
        return call(*args) if layout is None else _per_block(layout, call, *args)
    return _per_shard(call, *args)


def _per_block(layout: AttentionLayout, call: Callable[..., Any], *args: jax.Array) -> Any:
    """`call(*args)` in a manual region, for TPUs.

    libtpu does not support jax's `custom_partitioning` ("Custom emitter for CustomSPMDPartitioning
    not found").
    """
    spec = PartitionSpec(layout.batch or None, layout.heads or None)
    of_ids = PartitionSpec(layout.batch or None)
    size = args[0].shape[0]
    missing = -size % layout.count(layout.batch)
    padded = [jnp.pad(x, [(0, missing), *((0, 0),) * (x.ndim - 1)]) for x in args]
    mapped: Callable[..., Any] = jax.shard_map(
        call,
        mesh=layout.mesh,
        in_specs=tuple(spec if x.ndim > 2 else of_ids for x in args),
        out_specs=spec,
        check_vma=False,
    )
    return jax.tree.map(lambda x: x[:size], mapped(*padded))


def _per_shard(call: Callable[..., Any], *args: jax.Array) -> Any:
    """`call(*args)`, split like the arguments.

    Without this, the partitioner would gather all dims of the arguments.
    """
    # A partitioned function must not have constants, such as a kernel's table of blocks. Those of
    # the global call become replicated arguments. `on_shard` traces each shard's own constants, for
    # its number of heads.
    traced = jax.make_jaxpr(call)(*args)
    tree = jax.tree.structure(jax.eval_shape(call, *args))
    num_constants = len(traced.consts)

    def body(*given: jax.Array) -> Any:
        constants, rest = given[:num_constants], given[num_constants:]
        return jax.tree.unflatten(
            tree, _core.jaxpr_as_fun(_core.ClosedJaxpr(traced.jaxpr, constants))(*rest)
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
    return wrapped(*traced.consts, *args)


def _cuda_capability() -> float | None:
    """The first GPU's compute capability; None if it is not an Nvidia GPU."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    try:
        return float(capability) if capability is not None else None
    except ValueError:  # AMD names its chips (gfx942)
        return None


def _cudnn_takes(
    options: flash.AttentionOptions, query: jax.Array, value: jax.Array, capability: float | None
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
        and not (options.is_causal and options.num_queries != options.num_keys)
    )


def _cudnn(
    options: flash.AttentionOptions, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cuDNN's kernel, over (batch, rows, heads, dim) with query heads in the order of kv heads."""
    batch, heads, group, rows, dim = query.shape
    rows_first = query.reshape(batch, heads * group, rows, dim).swapaxes(1, 2)
    out, lse = jax.nn.dot_product_attention(
        rows_first,
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        scale=options.scale,
        is_causal=options.is_causal,
        implementation="cudnn",
        return_residual=True,
    )
    return out.swapaxes(1, 2).reshape(query.shape), lse.swapaxes(1, 2).reshape(query.shape[:-1])


def _splash_takes(options: flash.AttentionOptions, query: jax.Array, value: jax.Array) -> bool:
    """Whether splash attention supports this: multiples of 128 rows and keys, in bfloat16.

    For float32, the kernel's products have less precision than torch's.
    """
    return (
        query.dtype == jnp.bfloat16
        and options.num_queries % 128 == 0
        and options.num_keys % 128 == 0
        and query.shape[-1] % 64 == 0
        and value.shape[-1] % 64 == 0
    )


def _splash(
    options: flash.AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array | None = None,
    *,
    differentiable: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """jax's TPU kernel, mapped over the batch.

    Blocks of queries and keys that share no document in `ids` are computed, too, and masked. The
    kernel has no scale, so the queries are scaled first. The log of the sum of exponentials is None
    if the result is to be differentiated.
    """
    # Not at the top: the module is experimental, and only programs for TPUs should depend on it.
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
        splash_attention_kernel as splash_kernel,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
        splash_attention_mask as splash_mask,
    )

    batch, heads, group, rows, dim = query.shape
    size = (options.num_queries, options.num_keys)
    mask = splash_mask.CausalMask(size) if options.is_causal else splash_mask.FullMask(size)
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
        (query.astype(np.float32) * np.float32(options.scale))
        .astype(query.dtype)
        .reshape(batch, heads * group, rows, dim)
    )
    segments = () if ids is None else (splash_kernel.SegmentIds(q=ids, kv=ids),)
    found = jax.vmap(kernel)(scaled, key, value, *segments)
    out, lse = (
        (found, None) if differentiable else (found[0], found[1][0].reshape(query.shape[:-1]))
    )
    return out.reshape(*query.shape[:-1], value.shape[-1]), lse
