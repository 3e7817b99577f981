"""Matrix products, accumulated in float32 for the 16-bit floats and exactly for integers."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd_core.ops.kernels import grouped
from spmd_core.ops.kernels.precision import matmul_precision, opmath
from spmd_core.ops.kernels.traits import PRODUCT, Parts, Traits
from spmd_core.ops.registry import (
    Context,
    Number,
    TransposedRight,
    as_array,
    flop_formula,
    lowering,
)

_DOT = (((0,), (0,)), ((), ()))
_MATRIX_VECTOR = (((1,), (0,)), ((), ()))
_MATRIX_MATRIX = (((1,), (0,)), ((), ()))
_TRANSPOSED_RIGHT = (((1,), (1,)), ((), ()))
_BATCHED = (((2,), (1,)), ((0,), (0,)))


def _contract(a: jax.Array, b: jax.Array, dimension_numbers: Any) -> jax.Array:
    """The contraction, in the dtype that it accumulates in: float32 for 16-bit operands."""
    wide = opmath(a.dtype)
    return lax.dot_general(
        a, b, dimension_numbers, precision=matmul_precision(a.dtype), preferred_element_type=wide
    )


def _of_matrices(ctx: Context, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of two matrices, in the dtype that it accumulates in."""
    is_transposed = ctx.layout(TransposedRight) is not None
    return _contract(a, b, _TRANSPOSED_RIGHT if is_transposed else _MATRIX_MATRIX)


def _scaled(x: jax.Array, factor: Any) -> jax.Array:
    return x if not isinstance(factor, Number) and factor == 1 else x * as_array(factor, x.dtype)


def _is_zero(factor: Any) -> bool:
    return not isinstance(factor, Number) and factor == 0


def _plus_product(
    ctx: Context, x: jax.Array, product: jax.Array, beta: Any, alpha: Any
) -> jax.Array:
    """beta * x + alpha * product, rounded once. If beta is 0, torch ignores `x` and its NaNs."""
    product = _scaled(product, alpha)
    if _is_zero(beta):
        return jnp.broadcast_to(product, ctx.shape).astype(ctx.dtype)
    x = as_array(x, product.dtype)
    term = _scaled(x, beta)
    if isinstance(beta, Number):
        term = jnp.where(as_array(beta, product.dtype) == 0, jnp.zeros_like(x), term)
    return jnp.broadcast_to(term + product, ctx.shape).astype(ctx.dtype)


@lowering(
    "aten.mm.default",
    "aten.mm.dtype",
    traits=Traits(parts=Parts.CHUNKS, is_product=True, right=1),
)
def _mm(ctx: Context, a: Any, b: Any, out_dtype: Any = None) -> jax.Array:
    return _of_matrices(ctx, a, b).astype(ctx.dtype)


@lowering("aten.bmm.default", "aten.bmm.dtype", traits=PRODUCT)
def _bmm(ctx: Context, a: Any, b: Any, out_dtype: Any = None) -> jax.Array:
    return _contract(a, b, _BATCHED).astype(ctx.dtype)


@lowering("aten._int_mm.default")
def _int_mm(ctx: Context, a: Any, b: Any) -> jax.Array:
    return lax.dot_general(a, b, _MATRIX_MATRIX, preferred_element_type=np.int32)


@lowering("aten.mv.default")
def _mv(ctx: Context, matrix: Any, vector: Any) -> jax.Array:
    return _contract(matrix, vector, _MATRIX_VECTOR).astype(ctx.dtype)


@lowering("aten.dot.default")
def _dot(ctx: Context, a: Any, b: Any) -> jax.Array:
    return _contract(a, b, _DOT).astype(ctx.dtype)


@lowering("aten.vdot.default")
def _vdot(ctx: Context, a: Any, b: Any) -> jax.Array:
    return _contract(jnp.conj(a) if jnp.iscomplexobj(a) else a, b, _DOT).astype(ctx.dtype)


@flop_formula("aten.linear")
def _linear_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * math.prod(weight[:-1])


@lowering("aten.linear.default", traits=Traits(parts=Parts.DIMS, is_product=True))
def _linear(ctx: Context, x: Any, weight: Any, bias: Any = None) -> jax.Array:
    """x @ weight^T + bias.

    No dim of `x` is merged with another, so that each may be split over its own mesh axis. A weight
    of one dim has one output, without an output dim.
    """
    product = _contract(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    # Not by `ctx.shape`: a device may compute its part of the rows (`program.partial_sums`).
    total = product if bias is None else as_array(bias, product.dtype) + product
    return total.astype(ctx.dtype)


@flop_formula("aten.linear_backward")
def _linear_backward_flops(
    x: Any, grad: Any, weight: Any, output_mask: Sequence[bool], **_: Any
) -> int:
    return (output_mask[0] + output_mask[1]) * _linear_flops(x, weight)


def _meta_linear_backward(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, output_mask: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    bias = grad.new_empty(grad.shape[grad.dim() - weight.dim() + 1 :])
    results = (torch.empty_like(x), torch.empty_like(weight), bias)
    return tuple(result if yes else None for result, yes in zip(results, output_mask))


def _contract_leading(ctx: Context, a: jax.Array, b: jax.Array) -> jax.Array:
    """(..., m) and (..., n) as (m, n), summed over the leading dims."""
    if ctx.platform == "cpu" and ctx.split_dims.isdisjoint(range(1 - a.ndim, -1)):
        # XLA's CPU backend copies an operand to sum over two of its dims. So the dims are merged
        # where this moves nothing between devices.
        a, b = (x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in (a, b))
    dims = tuple(range(a.ndim - 1))
    if _is_tall_on_cpu(ctx, a, b):
        # Behind a barrier, as XLA would compute the transpose of a product as the other product.
        return lax.optimization_barrier(_contract(b, a, ((dims, dims), ((), ())))).T
    return _contract(a, b, ((dims, dims), ((), ())))


def _is_tall_on_cpu(ctx: Context, a: jax.Array, b: jax.Array) -> bool:
    """Whether the transpose of `_contract_leading` is computed faster, on a device of its own.

    The kernel of XLA's CPU backend computes 60 GFLOP/s of (2048, 512) x (512, 256), the gradient of
    a head's weight, and 83 of its transpose, where a first operand is read column by column.
    """
    num_summed = math.prod(a.shape[:-1])
    is_alone = ctx.platform == "cpu" and ctx.num_devices == 1 and a.dtype == np.float32
    return is_alone and a.shape[-1] >= max(4 * b.shape[-1], 512) and num_summed >= 512


@lowering(
    "aten.linear_backward.default",
    meta=_meta_linear_backward,
    traits=Traits(parts=Parts.CHUNKS, is_product=True, gradients=(0, 2)),
)
def _linear_backward(
    ctx: Context, x: Any, grad: Any, weight: Any, output_mask: Sequence[bool]
) -> tuple[jax.Array | None, ...]:
    grad_x = grad_weight = grad_bias = None
    grad_outputs = grad if weight.ndim == 2 else grad[..., None]  # (..., outputs)
    if output_mask[0]:
        rows = weight.reshape(grad_outputs.shape[-1], weight.shape[-1])
        grad_x = _contract(
            grad_outputs, jnp.conj(rows), (((grad_outputs.ndim - 1,), (0,)), ((), ()))
        ).astype(x.dtype)
    if output_mask[1]:
        grad_weight = (
            _contract_leading(ctx, grad_outputs, jnp.conj(x))
            .reshape(weight.shape)
            .astype(weight.dtype)
        )
    if output_mask[2]:
        grad_bias = jnp.sum(grad.astype(opmath(grad.dtype)), axis=tuple(range(x.ndim - 1))).astype(
            grad.dtype
        )
    return grad_x, grad_weight, grad_bias


@lowering("aten.addmm.default", traits=Traits(is_product=True, right=2))
def _addmm(ctx: Context, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    return _plus_product(ctx, x, _of_matrices(ctx, a, b), beta, alpha)


@lowering("aten.addmm.dtype", traits=Traits(is_product=True, right=2))
def _addmm_dtype(
    ctx: Context, x: Any, a: Any, b: Any, out_dtype: Any, *, beta: Any = 1, alpha: Any = 1
) -> jax.Array:
    return _plus_product(ctx, x, _of_matrices(ctx, a, b), beta, alpha)


@lowering("aten.baddbmm.default", traits=PRODUCT)
def _baddbmm(ctx: Context, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    return _plus_product(ctx, x, _contract(a, b, _BATCHED), beta, alpha)


@lowering("aten.baddbmm.dtype", traits=PRODUCT)
def _baddbmm_dtype(
    ctx: Context, x: Any, a: Any, b: Any, out_dtype: Any, *, beta: Any = 1, alpha: Any = 1
) -> jax.Array:
    return _plus_product(ctx, x, _contract(a, b, _BATCHED), beta, alpha)


@lowering("aten.addbmm.default")
def _addbmm(ctx: Context, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    return _plus_product(ctx, x, _contract(a, b, (((0, 2), (0, 1)), ((), ()))), beta, alpha)


@lowering("aten.addmv.default")
def _addmv(
    ctx: Context, x: Any, matrix: Any, vector: Any, *, beta: Any = 1, alpha: Any = 1
) -> jax.Array:
    return _plus_product(ctx, x, _contract(matrix, vector, _MATRIX_VECTOR), beta, alpha)


@lowering("aten.addr.default")
def _addr(ctx: Context, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    dtype = opmath(ctx.dtype)
    if ctx.dtype == np.bool_:
        outer = a.astype(dtype)[:, None] & b.astype(dtype)[None, :] & as_array(alpha, dtype)
        return jnp.broadcast_to(outer | (as_array(x, dtype) & as_array(beta, dtype)), ctx.shape)
    return _plus_product(
        ctx, x, as_array(a, dtype)[:, None] * as_array(b, dtype)[None, :], beta, alpha
    )


@lowering("aten._addmm_activation.default")
def _addmm_activation(
    ctx: Context, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> jax.Array:
    total = _plus_product(ctx, x, _contract(a, b, _MATRIX_MATRIX), beta, alpha)
    return (
        jax.nn.gelu(total, approximate=True)
        if use_gelu
        else jnp.maximum(total, jnp.zeros_like(total))
    )


@lowering("aten._trilinear.default")
def _trilinear(
    ctx: Context,
    a: Any,
    b: Any,
    c: Any,
    expand1: Any,
    expand2: Any,
    expand3: Any,
    sumdim: Any,
    unroll_dim: int = 1,
) -> jax.Array:
    wide = opmath(ctx.dtype)
    a, b, c = (
        jnp.expand_dims(as_array(x, wide), tuple(dims))
        for x, dims in ((a, expand1), (b, expand2), (c, expand3))
    )
    letters = "abcdefghijklmnop"[: a.ndim]
    kept = "".join(letter for d, letter in enumerate(letters) if d not in sumdim)
    # einsum needs equal sizes of a shared index: dims of size 1, which broadcast, are left out.
    full = jnp.broadcast_shapes(a.shape, b.shape, c.shape)
    terms, operands = [], []
    for x in (a, b, c):
        used = [d for d in range(x.ndim) if x.shape[d] == full[d] and full[d] != 1]
        terms.append("".join(letters[d] for d in used))
        operands.append(lax.squeeze(x, [d for d in range(x.ndim) if d not in used]))
    present = "".join(letter for letter in kept if any(letter in term for term in terms))
    result = jnp.einsum(
        f"{','.join(terms)}->{present}", *operands, precision=matmul_precision(wide)
    )
    return result.reshape(ctx.shape).astype(ctx.dtype)


def _ragged(
    ctx: Context,
    a: jax.Array,
    b: jax.Array,
    ends: jax.Array,
    *,
    contracting: tuple[int, int],
    ragged: int,
    groups: tuple[int, ...],
) -> jax.Array:
    """A product for each group, where dim `ragged` of `a` is cut into groups that end at `ends`.

    The groups are dim 0 of `b`, or of the result.
    """
    if ctx.platform == "cpu":
        # There a ragged dot becomes batched dots, and XLA's CPU backend refuses some batched dots
        # of 16-bit operands into float32. The cast ends when it supports them.
        a, b = a.astype(opmath(a.dtype)), b.astype(opmath(b.dtype))
    sizes = jnp.diff(ends.astype(np.int32), prepend=np.int32(0))
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((contracting[0],), (contracting[1],)), ((), ())),
        lhs_ragged_dimensions=[ragged],
        rhs_group_dimensions=groups,
    )
    return lax.ragged_dot_general(
        a,
        b,
        sizes,
        dims,
        precision=matmul_precision(a.dtype),
        preferred_element_type=opmath(a.dtype),
    )


def _grouped_meta(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> torch.Tensor:
    """The result, without two requirements of torch's meta kernel.

    Those are 16-bit operands, and strides that are multiples of 16 bytes.
    """
    groups = b.shape[0] if offs is None else offs.shape[0]
    flat = a.dim() == b.dim() == 2
    fits = (
        a.shape[-1] == b.shape[-2]
        and (offs is None) == (a.dim() == b.dim() == 3)
        and (flat or groups in (a.shape[0], b.shape[0]))
    )
    if (
        not fits
        or a.dtype != b.dtype
        or a.dtype not in (torch.float32, torch.bfloat16, torch.float16)
    ):
        raise RuntimeError(
            "_grouped_mm multiplies (rows, k) or (groups, rows, k) by (k, columns) or "
            "(groups, k, columns), in float32, bfloat16 or float16, and one "
            f"offset for each group unless both have groups; got {tuple(a.shape)} {a.dtype}, "
            f"{tuple(b.shape)} {b.dtype} and "
            f"{None if offs is None else tuple(offs.shape)} offsets. "
            "Give both one dtype and matching dims."
        )
    leading = (groups,) if flat or offs is None else ()
    return torch.empty(
        (*leading, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype, device="meta"
    )


def _batched(a: jax.Array, b: jax.Array) -> jax.Array:
    return _contract(a, b, _BATCHED)


def _in_blocks(ctx: Context, a: jax.Array, b: jax.Array, ends: jax.Array) -> jax.Array:
    """A grouped product that is less work than a ragged dot, if there are many groups.

    TPUs have a kernel for ragged dots. Elsewhere XLA computes all rows for each group, masked.
    Blocks take about twice the work of the rows alone, on each device, because the rows are
    gathered.
    """
    # If no value with three dims has its first dim split, neither are the groups.
    parts = math.gcd(ends.shape[0], ctx.num_devices) if ctx.split_dims & {-3} else 1
    a, b = a.astype(opmath(a.dtype)), b.astype(opmath(b.dtype))
    if a.ndim == b.ndim == 2:
        return grouped.sums_by_groups(a.T, b, ends, _batched, num_parts=parts)
    if a.ndim == 2:
        return grouped.rows_by_groups(a, b, ends, _batched, num_parts=parts)
    by_columns = jnp.swapaxes(a, 1, 2)
    return grouped.rows_by_groups(b.T, by_columns, ends, _batched, num_parts=parts).T


@lowering("aten._grouped_mm.default", meta=_grouped_meta)
def _grouped_mm(
    ctx: Context, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> jax.Array:
    """One product for each group.

    Rows or columns after the last group are 0; torch leaves them uninitialized.
    """
    if offs is None:
        product = _contract(a, b, _BATCHED)
    elif ctx.platform != "tpu" and offs.shape[0] > 2 * ctx.num_devices:
        product = _in_blocks(ctx, a, b, offs.astype(np.int32))
    elif a.ndim == 2 and b.ndim == 2:
        product = _ragged(ctx, a, b, offs, contracting=(1, 0), ragged=1, groups=())
    elif a.ndim == 2:
        product = _ragged(ctx, a, b, offs, contracting=(1, 1), ragged=0, groups=(0,))
    else:
        product = _ragged(ctx, b, a, offs, contracting=(0, 2), ragged=1, groups=(0,)).T
    return (product if bias is None else product + as_array(bias, product.dtype)).astype(ctx.dtype)
