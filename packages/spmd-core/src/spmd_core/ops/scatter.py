"""Writes at positions given by tensors: scatter, index_put, index_add and similar operations.

An index outside its dim, or a source too short for its mask, is an error in eager torch on the CPU.
A device cannot raise from inside a program: here such an index writes nothing, such a source
repeats its last element, and no write leaves its array. Where two writes go to one element and are
not combined, neither torch nor XLA specifies which one remains.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_core.ops.kernels import index_rules
from spmd_core.ops.kernels.blocks import apart, write_block
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.kernels.traits import CHOICE
from spmd_core.ops.registry import Context, Number, as_array, lowering

# (base, values, method) -> base with the values written. The method is one of jax's `.at[...]`:
# set, add, multiply, max or min.
Apply = Callable[[jax.Array, jax.Array, str], jax.Array]


def _axis(dim: int, ndim: int) -> int:
    """The dim counted from the front; in torch, a 0-dim tensor has the dims 0 and -1."""
    return dim % max(ndim, 1)


def _write(
    base: jax.Array, key: Any, values: jax.Array, method: str, *, wrap: bool = False
) -> jax.Array:
    """`base` with the values written at `key` by a method of jax's `.at[...]`.

    Sums and products are computed in float32 for 16-bit floats and in int32 for bools; a sum of
    bools is `or`.
    """
    wide = base.dtype
    if method in ("add", "multiply"):
        wide = np.dtype(np.int32) if base.dtype == np.bool_ else opmath(base.dtype)
    target = base.astype(wide).at[key]
    values = apart(values.astype(wide))
    new = getattr(target, method)(values, mode="drop", wrap_negative_indices=wrap)
    return new != 0 if base.dtype == np.bool_ and wide != np.bool_ else new.astype(base.dtype)


def _reduce(
    x: jax.Array, source: jax.Array, apply: Apply, reduce: str, *, include_self: bool
) -> jax.Array:
    """Combines the source's elements at each element written; the others stay as in x.

    With `include_self` the element of x takes part.
    """
    method = {"sum": "add", "prod": "multiply", "mean": "add", "amax": "max", "amin": "min"}[reduce]
    base = x
    if not include_self:
        lowest, highest = (
            (-np.inf, np.inf) if jnp.issubdtype(x.dtype, np.inexact) else _limits(x.dtype)
        )
        identity = {"sum": 0, "prod": 1, "mean": 0, "amax": lowest, "amin": highest}[reduce]
        base = apply(x, jnp.full(source.shape, identity, x.dtype), "set")
    if reduce != "mean":
        return apply(base, source, method)
    wide = opmath(x.dtype)
    total = apply(base.astype(wide), source.astype(wide), "add")
    counts = apply(
        jnp.full(x.shape, int(include_self), np.int32), jnp.ones(source.shape, np.int32), "add"
    )
    counts = jnp.maximum(counts, 1).astype(wide)
    return (
        total / counts if jnp.issubdtype(wide, np.inexact) else jnp.floor_divide(total, counts)
    ).astype(x.dtype)


def _limits(dtype: np.dtype) -> tuple[Any, Any]:
    return (False, True) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)


# Along one dim, with an index for every element: scatter.


def _scattering(dim: int, index: jax.Array) -> Apply:
    """Writes values[..., i, ...] to base[..., index[..., i, ...], ...].

    Of the other dims, only the index's extent is read and written.
    """
    index = jnp.atleast_1d(index)
    axis = _axis(dim, index.ndim)

    def apply(base: jax.Array, values: jax.Array, method: str) -> jax.Array:
        target, values = jnp.atleast_1d(base), jnp.atleast_1d(values)
        if index.size == 0:
            return base
        region = lax.slice(
            target,
            [0] * target.ndim,
            [n if d == axis else index.shape[d] for d, n in enumerate(target.shape)],
        )
        values = lax.slice(values, [0] * values.ndim, index.shape)

        def write(base: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
            return _write(base, index, values, method)

        # vmap makes the other dims batch dims of one scatter, so that they stay sharded. With a
        # table of coordinates the partitioner would gather them.
        for _ in range(index.ndim - 1):
            write = jax.vmap(write)
        new = jnp.moveaxis(
            write(*(jnp.moveaxis(x, axis, -1) for x in (region, index, values))), -1, axis
        )
        return write_block(target, new, [0] * target.ndim).reshape(base.shape)

    return apply


@lowering("aten.scatter.src", indices=index_rules.along_dim())
def _scatter_src(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, src: jax.Array
) -> jax.Array:
    return _scattering(dim, index)(x, src, "set")


@lowering("aten.scatter.value", indices=index_rules.along_dim())
def _scatter_value(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, value: Number | float
) -> jax.Array:
    return _scattering(dim, index)(
        x, jnp.broadcast_to(as_array(value, x.dtype), index.shape), "set"
    )


_METHODS = {"add": "add", "multiply": "multiply"}


@lowering("aten.scatter.reduce", indices=index_rules.along_dim())
def _scatter_reduce(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, src: jax.Array, *, reduce: str
) -> jax.Array:
    return _scattering(dim, index)(x, src, _METHODS[reduce])


@lowering("aten.scatter.value_reduce", indices=index_rules.along_dim())
def _scatter_value_reduce(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, value: Number, *, reduce: str
) -> jax.Array:
    return _scattering(dim, index)(
        x, jnp.broadcast_to(as_array(value, x.dtype), index.shape), _METHODS[reduce]
    )


@lowering("aten.scatter_add.default", indices=index_rules.along_dim())
def _scatter_add(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, src: jax.Array
) -> jax.Array:
    return _scattering(dim, index)(x, src, "add")


@lowering("aten.scatter_reduce.two", indices=index_rules.along_dim(), traits=CHOICE)
def _scatter_reduce_two(
    ctx: Context,
    x: jax.Array,
    dim: int,
    index: jax.Array,
    src: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    if index.size == 0:
        return x
    src = lax.slice(jnp.atleast_1d(src), [0] * max(src.ndim, 1), jnp.atleast_1d(index).shape)
    return _reduce(x, src, _scattering(dim, index), reduce, include_self=include_self)


# Along one dim, with an index for every slice: index_add, index_copy, index_fill, index_reduce.


def _slicing(dim: int, index: jax.Array, ndim: int, *, wrap: bool = False) -> Apply:
    """Writes the i-th slice of the values along `dim` to slice index[i] of the base."""
    key = (slice(None),) * _axis(dim, ndim) + (index.reshape(-1),)

    def apply(base: jax.Array, values: jax.Array, method: str) -> jax.Array:
        return _write(jnp.atleast_1d(base), key, jnp.atleast_1d(values), method, wrap=wrap).reshape(
            base.shape
        )

    return apply


def _check_slices(x: Any, dim: int, index: Any, source: Any) -> None:
    """Raises RuntimeError for a source of the wrong shape, which jax would broadcast.

    The recording has refused it already, unless the tensors were too large to try there
    (`recording.inference`).
    """
    axis = _axis(dim, x.ndim)
    if (
        x.ndim
        and source.ndim
        and (
            source.ndim != x.ndim
            or any(m != n for d, (m, n) in enumerate(zip(source.shape, x.shape)) if d != axis)
        )
    ):
        raise RuntimeError(
            "source tensor shape must match self tensor shape, excluding the specified dimension. "
            f"Got self.shape = {list(x.shape)} source.shape = {list(source.shape)}. "
            "Expand the source."
        )
    num_slices = source.shape[axis] if source.ndim else 1
    if num_slices != (index.shape[0] if index.ndim else 1):
        raise RuntimeError(
            f"Number of indices ({list(index.shape)}) should be equal to source.size(dim): "
            f"({num_slices}), for dim: {axis}. Give one index for each slice of the source."
        )


@lowering("aten.index_add.default", indices=index_rules.along_dim())
def _index_add(
    ctx: Context,
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    *,
    alpha: Number | int = 1,
) -> jax.Array:
    _check_slices(x, dim, index, source)
    factor = as_array(alpha, source.dtype)
    scaled = source & factor if source.dtype == np.bool_ else source * factor
    return _slicing(dim, index, x.ndim)(x, scaled, "add")


@lowering("aten.index_copy.default", indices=index_rules.along_dim())
def _index_copy(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, source: jax.Array
) -> jax.Array:
    return _slicing(dim, index, x.ndim)(x, source, "set")


@lowering(
    "aten.index_fill.int_Scalar",
    "aten.index_fill.int_Tensor",
    indices=index_rules.along_dim(wraps=True),
)
def _index_fill(ctx: Context, x: jax.Array, dim: int, index: jax.Array, value: Any) -> jax.Array:
    return _slicing(dim, index, x.ndim, wrap=True)(x, as_array(value, x.dtype), "set")


@lowering("aten.index_reduce.default", indices=index_rules.along_dim(), traits=CHOICE)
def _index_reduce(
    ctx: Context,
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    _check_slices(x, dim, index, source)
    if index.size == 0:
        return x
    return _reduce(x, source, _slicing(dim, index, x.ndim), reduce, include_self=include_self)


# At points of several dims: index_put.


def _put_mask(
    x: jax.Array, leading: int, mask: jax.Array, values: jax.Array, *, accumulate: bool
) -> jax.Array:
    """The tensor x with `values` at each True of a mask over the dims from `leading` on.

    Raises NotImplementedError where the values differ from one True to the next.
    """
    rest = x.ndim - leading - mask.ndim
    if values.ndim > rest:
        position = values.ndim - rest - 1
        if values.shape[position] != 1:
            raise NotImplementedError(
                "writing through a mask one value per True needs the number of Trues; it is "
                "computed on the host."
            )
        # The dim that stands for the Trues becomes the mask's dims.
        values = values.reshape(
            *values.shape[:position], *(1,) * mask.ndim, *values.shape[position + 1 :]
        )
    where = mask.reshape(*mask.shape, *(1,) * rest)
    new = jnp.broadcast_to(values, x.shape)
    if accumulate:
        new = x | new if x.dtype == np.bool_ else x + new
    return jnp.where(where, new, x)


@lowering("aten._unsafe_index_put.default")
@lowering(
    "aten.index_put.default",
    "aten._index_put_impl.default",
    indices=index_rules.of_each_dim,
)
def _index_put(
    ctx: Context,
    x: jax.Array,
    indices: Sequence[jax.Array | None],
    values: jax.Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> jax.Array:
    values = as_array(values, x.dtype)
    given = [(d, index) for d, index in enumerate(indices) if index is not None]
    if any(index.dtype == np.uint8 for _, index in given):
        raise NotImplementedError(
            "torch takes uint8 indices as a mask in some cases and refuses them in others; it is "
            "computed on the host."
        )
    masks = [(d, index) for d, index in given if index.dtype == np.bool_]
    if masks:
        if len(given) > 1:
            raise NotImplementedError(
                "a mask beside other indices selects a number of elements that depends on its "
                "values; computed on the host."
            )
        leading, mask = masks[0]
        return _put_mask(x, leading, mask, values, accumulate=accumulate)
    key = tuple(slice(None) if index is None else index for index in indices)
    return _write(x, key, values, "add" if accumulate else "set", wrap=True)


@lowering("aten._unsafe_masked_index_put_accumulate.default")
def _unsafe_masked_index_put_accumulate(
    ctx: Context,
    x: jax.Array,
    mask: jax.Array,
    indices: Sequence[jax.Array | None],
    values: jax.Array,
) -> jax.Array:
    key = tuple(slice(None) if index is None else index for index in indices)
    return _write(x, key, jnp.where(mask, values, jnp.zeros((), values.dtype)), "add")


@lowering("aten.put.default", indices=index_rules.of_elements)
def _put(
    ctx: Context, x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False
) -> jax.Array:
    flat = _write(
        x.reshape(-1),
        index.reshape(-1),
        source.reshape(-1),
        "add" if accumulate else "set",
        wrap=True,
    )
    return flat.reshape(x.shape)


# Through a mask, in the order of its Trues.


def _ranks(mask: jax.Array) -> jax.Array:
    """The number of Trues before each element of the flattened mask."""
    return jnp.cumsum(mask.reshape(-1).astype(np.int64)) - mask.reshape(-1)


@lowering("aten.masked_scatter.default")
def _masked_scatter(ctx: Context, x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    mask, x = jnp.broadcast_to(mask, ctx.shape), jnp.broadcast_to(x, ctx.shape)
    if source.size == 0:
        return x
    taken = jnp.take(source.reshape(-1), _ranks(mask), mode="clip").reshape(ctx.shape)
    return jnp.where(mask, taken, x)


@lowering("aten.masked_scatter_backward.default")
def _masked_scatter_backward(
    ctx: Context, grad_output: jax.Array, mask: jax.Array, sizes: list[int]
) -> jax.Array:
    """The gradient of the source: the elements of grad_output under the mask, then zeros."""
    mask = jnp.broadcast_to(mask, grad_output.shape)
    flat = jnp.zeros(int(np.prod(sizes)), ctx.dtype)
    target = jnp.where(mask.reshape(-1), _ranks(mask), flat.shape[0])
    return (
        flat.at[target]
        .set(grad_output.reshape(-1), mode="drop", wrap_negative_indices=False)
        .reshape(ctx.shape)
    )
