"""Sums over the classes of a linear layer's logits, which are computed in chunks of rows.

A cross entropy needs two numbers of each row of logits: the logit of the target class, and the
logarithm of the sum of the exponentials. A loop over chunks of rows computes both, and backward
recomputes the logits, so that the logits of one chunk are in memory at a time. Rows that mesh axes
split stay split inside of each chunk: a chunk has rows of every device, and the weight's gradient
is summed over devices once, after the loop. The partitioner would give each chunk to one device, so
the rows are split explicitly, like the program's data (`split_dims.data_splits`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd_core.ops.kernels import index_rules, loops
from spmd_core.ops.kernels.precision import matmul_precision, opmath
from spmd_core.ops.registry import Context, as_array, flop_formula, lowering

_library = torch.library.Library("spmd", "FRAGMENT")
_library.define(
    "class_sums(Tensor x, Tensor weight, Tensor? bias, Tensor target, int chunks) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "class_sums_backward(Tensor grad_picked, Tensor grad_lse, Tensor x, Tensor weight, "
    "Tensor? bias, Tensor target, Tensor lse, int chunks, bool[3] output_mask) "
    "-> (Tensor, Tensor, Tensor)"
)


@flop_formula("spmd.class_sums")
def _flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * x[0] * weight[0] * weight[1])


@flop_formula("spmd.class_sums_backward")
def _flops_backward(
    grad_picked: Any, grad_lse: Any, x: Any, weight: Any, *rest: Any, **__: Any
) -> int:
    """The recomputed logits, and the gradients of the rows and of the weight."""
    of_x, of_weight, _ = rest[-1]
    return (1 + of_x + of_weight) * _flops(x, weight)


def _meta(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    chunks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(target.shape, dtype=wide), x.new_empty(target.shape, dtype=wide)


def _meta_backward(
    grad_picked: torch.Tensor,
    grad_lse: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    lse: torch.Tensor,
    chunks: int,
    output_mask: Any,
) -> tuple[torch.Tensor | None, ...]:
    layout = torch.contiguous_format
    return tuple(
        torch.empty_like(t, memory_format=layout) if want and t is not None else None
        for t, want in zip((x, weight, bias), output_mask)
    )


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The contraction, in the dtype that it accumulates in."""
    wide = opmath(a.dtype)
    return jnp.einsum(spec, a, b, precision=matmul_precision(a.dtype), preferred_element_type=wide)


class _Chunks:
    """Rows in chunks: (rows, ...) as (chunks, parts of the batch, rows of a chunk and part, ...).

    Rows are padded if they do not divide evenly.
    """

    def __init__(self, ctx: Context, num_rows: int, chunks: int) -> None:
        self._ctx, self._num_rows = ctx, num_rows
        self.parts = ctx.batch.count if num_rows % ctx.batch.count == 0 else 1
        of_part = num_rows // self.parts
        self._size = -(-of_part // min(chunks, max(of_part, 1)))
        self.count = -(-of_part // self._size) if of_part else 0
        self._padding = self.count * self._size - of_part

    def split(self, x: jax.Array, padding: float = 0) -> jax.Array:
        rows = self._laid_out(x.reshape(self.parts, -1, *x.shape[1:]))
        widths = [(0, 0), (0, self._padding)] + [(0, 0)] * (x.ndim - 1)
        rows = jnp.pad(rows, widths, constant_values=padding)
        return jnp.moveaxis(rows.reshape(self.parts, self.count, self._size, *x.shape[1:]), 1, 0)

    def joined(self, chunks: jax.Array) -> jax.Array:
        rows = jnp.moveaxis(chunks, 0, 1).reshape(self.parts, -1, *chunks.shape[3:])
        rows = self._laid_out(rows[:, : self._num_rows // self.parts])
        return rows.reshape(self._num_rows, *chunks.shape[3:])

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """A sum for each part of the batch."""
        return self._laid_out(jnp.zeros((self.parts, *shape), dtype))

    def _laid_out(self, x: jax.Array) -> jax.Array:
        return self._ctx.batch.split(x) if self.parts > 1 else x


def _logits(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    logits = _product("pnd,cd->pnc", x, weight)
    return logits if bias is None else logits + as_array(bias, logits.dtype)


def _chosen(target: jax.Array, logits: jax.Array) -> jax.Array:
    """Whether each logit is that of its row's target; a comparison needs no gather of classes."""
    return lax.broadcasted_iota(target.dtype, logits.shape, 2) == target[..., None]


@lowering("spmd.class_sums.default", meta=_meta, indices=index_rules.of_rows("target", "weight"))
def _class_sums(
    ctx: Context, x: Any, weight: Any, bias: Any, target: Any, chunks: int
) -> tuple[jax.Array, jax.Array]:
    """The logit of each row's target, and the logarithm of the sum of exponentials."""
    rows = _Chunks(ctx, x.shape[0], chunks)

    def step(carry: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, Any]:
        logits = _logits(chunk[0], weight, bias)
        largest = lax.stop_gradient(logits.max(-1, keepdims=True))
        finite = jnp.where(jnp.isfinite(largest), largest, 0)
        lse = jnp.log(jnp.exp(logits - finite).sum(-1)) + finite[..., 0]
        picked = jnp.where(_chosen(chunk[1], logits), logits, 0).sum(-1)
        return None, (picked, lse)

    if rows.count == 0:
        empty = jnp.zeros(target.shape, ctx.dtype)
        return empty, empty
    _, (picked, lse) = loops.scan(step, None, (rows.split(x), rows.split(target)))
    return rows.joined(picked), rows.joined(lse)


@lowering("spmd.class_sums_backward.default", meta=_meta_backward)
def _class_sums_backward(
    ctx: Context,
    grad_picked: Any,
    grad_lse: Any,
    x: Any,
    weight: Any,
    bias: Any,
    target: Any,
    lse: Any,
    chunks: int,
    output_mask: Any,
) -> tuple[jax.Array | None, ...]:
    rows = _Chunks(ctx, x.shape[0], chunks)
    wide = lse.dtype
    wanted = tuple(output_mask)

    def step(sums: Any, chunk: Any) -> tuple[Any, Any]:
        x, target, lse, grad_picked, grad_lse = chunk
        logits = _logits(x, weight, bias)
        share = jnp.exp(logits - lse[..., None]) * grad_lse[..., None]
        grad = share + jnp.where(_chosen(target, logits), grad_picked[..., None], 0)
        of_weight, of_bias = sums
        narrow = grad.astype(x.dtype)
        if wanted[1]:
            of_weight = of_weight + _product("pnc,pnd->pcd", narrow, x)
        if wanted[2]:
            of_bias = of_bias + grad.sum(1)
        return (of_weight, of_bias), _product("pnc,cd->pnd", narrow, weight) if wanted[0] else None

    num_classes = weight.shape[0]
    start = (
        rows.zeros(weight.shape, wide) if wanted[1] else None,
        rows.zeros((num_classes,), wide) if wanted[2] else None,
    )
    if rows.count == 0:
        return tuple(
            jnp.zeros(t.shape, t.dtype) if want else None
            for t, want in zip((x, weight, bias), wanted)
        )
    x_lse = rows.split(lse, padding=np.inf)  # so that padding adds nothing
    grads = map(rows.split, (grad_picked, grad_lse))
    chunked = (rows.split(x), rows.split(target), x_lse, *grads)
    (of_weight, of_bias), of_x = loops.scan(step, start, chunked)
    return (
        rows.joined(of_x).astype(x.dtype) if wanted[0] else None,
        of_weight.sum(0).astype(weight.dtype) if of_weight is not None else None,
        of_bias.sum(0).astype(bias.dtype) if of_bias is not None else None,
    )
