"""The rule of each primitive for padded arrays without merged dims.

Padding has arbitrary values, and each rule keeps it out of the true elements of the results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from spmd_core.ops.kernels import threefry
from spmd_core.program.affine_sizes import Affine, GrowthRefusedError
from spmd_core.program.padded_arrays import Capacity, Padded, compacted, reshaped
from spmd_core.program.padded_equation import Equation
from spmd_core.program.shardy_constraints import SHARDY_CONSTRAINT

Rule = Callable[[Equation], Sequence[Any]]


def _per_element(eqn: Equation) -> Sequence[Any]:
    """Elementwise: each element of a result depends on the operands' elements at its position."""
    if eqn.name == "bitcast_convert_type" and len(eqn.outs[0]) != len(eqn.read[0].sizes):
        raise GrowthRefusedError("bits are split or joined along a dim")
    return eqn.bind(*eqn.arrays)


def _each_operand(eqn: Equation) -> Sequence[Any]:
    """Each result is one of the operands."""
    return eqn.bind(*eqn.arrays)


def _constraint(eqn: Equation) -> Sequence[Any]:
    """A sharding constraint on dims of fixed size."""
    spec = getattr(constraint_of(eqn), "spec", None)
    not_split = (None, (), PartitionSpec.UNCONSTRAINED)
    if spec is None or any(
        dim < len(spec) and spec[dim] not in not_split for dim in eqn.read[0].growing
    ):
        raise GrowthRefusedError("a dim that grows is split")
    return eqn.bind(*eqn.arrays)


def constraint_of(eqn: Equation) -> Any:
    """The sharding of a sharding constraint or of a `reshard`."""
    return eqn.param("sharding" if "sharding" in eqn.first else "dst_sharding")


def _least(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return False
    if jnp.issubdtype(dtype, jnp.inexact):
        return -np.inf if dtype.itemsize > 1 else jnp.finfo(dtype).min
    return jnp.iinfo(dtype).min


def _greatest(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.inf if dtype.itemsize > 1 else jnp.finfo(dtype).max
    return jnp.iinfo(dtype).max


_NEUTRAL: dict[str, Callable[[np.dtype], Any]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": _least,
    "min": _greatest,
    "and": lambda dtype: _greatest(dtype) if dtype.kind in ("b", "u") else -1,
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    "logsumexp": _least,
}


def _reduction(eqn: Equation) -> Sequence[Any]:
    """Sets the padding to the neutral element of the reduction."""
    kind = eqn.name.removeprefix("reduce_").removeprefix("arg")
    x = eqn.read[0]
    return eqn.bind(eqn.filled(x, {*eqn.param("axes")}, _NEUTRAL[kind](x.array.dtype)))


def _cumulative(eqn: Equation) -> Sequence[Any]:
    """Padding comes last; in reverse it comes first, and is set to the neutral element."""
    kind = eqn.name.removeprefix("cum")
    x = eqn.read[0]
    if not eqn.param("reverse"):
        return eqn.bind(x.array)
    return eqn.bind(eqn.filled(x, {eqn.param("axis")}, _NEUTRAL[kind](x.array.dtype)))


def _dot_general(eqn: Equation) -> Sequence[Any]:
    """Sets the padding of both operands to zero, as infinity times zero would be NaN."""
    (left, right), _ = eqn.param("dimension_numbers")
    a, b = eqn.read
    return eqn.bind(eqn.filled(a, {*left}, 0), eqn.filled(b, {*right}, 0))


def _concatenate(eqn: Equation) -> Sequence[Any]:
    """Writes each operand after the elements of the operands before it."""
    dim = eqn.param("dimension")
    if not any(dim in x.growing for x in eqn.read):
        return eqn.bind(*eqn.arrays)
    capacity = eqn.capacity
    result = jnp.zeros(capacity.shape(eqn.outs[0]), eqn.arrays[0].dtype)
    start: Any = 0
    for x in eqn.read:
        # Each operand fits into the result with its padding: its start is at most that at the
        # bound.
        part = capacity.replicate_dims(x.array, [dim])
        result = lax.dynamic_update_slice_in_dim(result, part, start, dim)
        start = start + capacity.value(x.sizes[dim])
    return [result]


def _slice(eqn: Equation) -> Sequence[Any]:
    starts, strides = eqn.param("start_indices"), eqn.param("strides")
    x, capacity, sizes = eqn.read[0], eqn.capacity, eqn.outs[0]
    strides = [1] * len(starts) if strides is None else strides
    array = x.array
    fixed, limits = [], []
    for dim, (start, stride, size) in enumerate(zip(starts, strides, sizes)):
        if isinstance(start, Affine) and stride != 1:
            raise GrowthRefusedError("a strided slice grows")
        count = capacity.at_bound(size)
        if isinstance(start, Affine):
            value = capacity.value(start)
            array = _piece(capacity, array, value, count, dim, isinstance(size, Affine))
            start = 0
        fixed.append(start)
        limits.append(start + max(count - 1, 0) * stride + min(count, 1))
    # The slice of a fixed dim may grow, such as the filled part of a cache. Its limit at the bound
    # may then be out of bounds, so the dim is padded.
    beyond = [(0, max(limit - n, 0), 0) for limit, n in zip(limits, array.shape)]
    array = lax.pad(array, jnp.zeros((), array.dtype), beyond)
    return [lax.slice(array, fixed, limits, strides)]


def _piece(
    capacity: Capacity, array: jax.Array, start: Any, size: int, dim: int, grows: bool
) -> jax.Array:
    """`size` elements from `start` on; if `size` includes padding, they may end out of bounds."""
    array = capacity.replicate_dims(array, [dim])
    if grows:
        pads = [(0, size if i == dim else 0, 0) for i in range(array.ndim)]
        array = lax.pad(array, jnp.zeros((), array.dtype), pads)
    return lax.dynamic_slice_in_dim(array, start, size, dim)


def _dynamic_slice(eqn: Equation) -> Sequence[Any]:
    x, *starts = eqn.read
    capacity, array = eqn.capacity, x.array
    for dim, start in enumerate(starts):
        size = eqn.outs[0][dim]
        if dim not in x.growing and not isinstance(size, Affine):
            array = lax.dynamic_slice_in_dim(array, start.array, size, dim)
            continue
        greatest = capacity.value(x.sizes[dim]) - capacity.value(size)
        begin = jnp.clip(jnp.asarray(start.array).astype(np.int64), 0, greatest)
        room = capacity.at_bound(size)
        array = _piece(capacity, array, begin, room, dim, isinstance(size, Affine))
    return [array]


def _dynamic_update_slice(eqn: Equation) -> Sequence[Any]:
    """Writes the update without its padding."""
    x, update, *starts = eqn.read
    capacity = eqn.capacity
    begins = []
    for dim, start in enumerate(starts):
        greatest = capacity.value(x.sizes[dim]) - capacity.value(update.sizes[dim])
        begins.append(jnp.clip(jnp.asarray(start.array).astype(np.int64), 0, greatest))
    array, piece = x.array, update.array
    varying = x.growing | update.growing
    array, piece = capacity.replicate_dims(array, varying), capacity.replicate_dims(piece, varying)
    if not update.growing:
        return [lax.dynamic_update_slice(array, piece, begins)]
    room = [(0, piece.shape[dim] if dim in update.growing else 0, 0) for dim in range(array.ndim)]
    wide = lax.pad(array, jnp.zeros((), array.dtype), room)
    inside = capacity.is_element(piece.shape, update.sizes, update.growing)
    piece = jnp.where(inside, piece, lax.dynamic_slice(wide, begins, piece.shape))
    wide = lax.dynamic_update_slice(wide, piece, begins)
    return [lax.slice(wide, (0,) * array.ndim, array.shape)]


_CLIP, _FILL = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP


def _bounded(
    capacity: Capacity,
    x: Padded,
    indices: Any,
    dims: Sequence[int],
    window: Sequence[int],
    mode: Any,
) -> Any:
    """Treats indices into the padding as the mode treats indices out of bounds."""
    columns = []
    for position, dim in enumerate(dims):
        column = indices[..., position]
        greatest = capacity.value(x.sizes[dim]) - window[position]
        if mode == _CLIP:
            column = jnp.clip(column.astype(np.int64), 0, greatest)
        elif mode == _FILL and dim in x.growing:
            column = jnp.where(column.astype(np.int64) > greatest, x.array.shape[dim], column)
        columns.append(column.astype(indices.dtype))
    return jnp.stack(columns, axis=-1)


def _gather(eqn: Equation) -> Sequence[Any]:
    x, indices = eqn.read
    numbers, mode = eqn.param("dimension_numbers"), eqn.param("mode")
    sizes = eqn.param("slice_sizes")
    for dim in x.growing:
        is_complete = dim not in numbers.start_index_map and sizes[dim] == x.sizes[dim]
        indexed = dim in numbers.start_index_map and isinstance(sizes[dim], int)
        batch = dim in numbers.operand_batching_dims
        if not (is_complete or indexed or batch):
            raise GrowthRefusedError("a gather takes part of a dim that grows")
    if any(isinstance(size, Affine) and dim not in x.growing for dim, size in enumerate(sizes)):
        raise GrowthRefusedError("a gather takes a part that grows")
    if {len(indices.sizes) - 1} & indices.growing:
        raise GrowthRefusedError("a gather indexes ever more dims")
    dims = numbers.start_index_map
    window = [sizes[dim] for dim in dims]
    bounded = _bounded(eqn.capacity, x, indices.array, dims, window, mode)
    return eqn.bind(x.array, bounded, indices_are_sorted=False)


def _scatter(eqn: Equation) -> Sequence[Any]:
    """Drops updates that are padding, by an index out of bounds."""
    x, indices, updates = eqn.read
    numbers, mode = eqn.param("dimension_numbers"), eqn.param("mode")
    dims = numbers.scatter_dims_to_operand_dims
    capacity, last = eqn.capacity, len(indices.sizes) - 1
    if {last} & indices.growing:
        raise GrowthRefusedError("a scatter indexes ever more dims")
    batches = numbers.operand_batching_dims
    windows = [
        dim
        for dim in range(len(x.sizes))
        if dim not in numbers.inserted_window_dims and dim not in batches
    ]  # the operand's dims, in the order of the updates' window dims
    window_of = dict(zip(windows, numbers.update_window_dims))
    window: list[int] = []
    for dim, full_size in enumerate(x.sizes):
        size = updates.sizes[window_of[dim]] if dim in window_of else 1
        if dim in dims and isinstance(size, Affine):
            raise GrowthRefusedError("a scatter writes a part that grows")
        if (
            dim not in dims
            and dim not in batches
            and size != full_size
            and {Affine} & {type(size), type(full_size)}
        ):
            raise GrowthRefusedError("a scatter writes part of a dim that grows")
    for dim in dims:
        size = updates.sizes[window_of[dim]] if dim in window_of else 1
        assert isinstance(size, int)
        window.append(size)
    if mode not in (_CLIP, _FILL):
        mode = _FILL  # the caller promised that all indices are in bounds
    bounded = _bounded(capacity, x, indices.array, dims, window, mode)
    if indices.growing:
        inside = capacity.is_element(bounded.shape, indices.sizes, indices.growing)
        beyond = jnp.iinfo(bounded.dtype).max
        bounded = jnp.where(inside, bounded, jnp.asarray(beyond, bounded.dtype))
    hints = {"indices_are_sorted": False, "unique_indices": False}
    return eqn.bind(x.array, bounded, updates.array, mode=_FILL, **hints)


def _pad(eqn: Equation) -> Sequence[Any]:
    """Sets the operand's padding to the padding value, which comes after the elements."""
    (x, value), capacity, sizes = eqn.read, eqn.capacity, eqn.outs[0]
    config = list(eqn.param("padding_config"))
    moving = [dim for dim, (low, _, _) in enumerate(config) if isinstance(low, Affine)]
    for dim, (_, high, interior) in enumerate(config):
        grows = dim in x.growing or isinstance(high, Affine) or dim in moving
        if isinstance(interior, Affine) or (grows and interior):
            raise GrowthRefusedError("a padding between elements grows")
        if dim in moving and not isinstance(high, Affine) and high < 0:
            raise GrowthRefusedError("a padding in front grows, and behind elements are cut off")
    exposed = {dim for dim, (_, high, _) in enumerate(config) if high != 0}
    array = eqn.filled(x, exposed, value.array)
    lows = {dim: config[dim][0] for dim in moving}
    for dim in moving:
        config[dim] = (0, 0, 0)
    [array] = eqn.bind(array, value.array, padding_config=_at_bound(capacity, config))
    for dim, low in lows.items():
        room, size = capacity.at_bound(sizes[dim]), array.shape[dim]
        # Twice the capacity, so that the written block never starts before `low`.
        shape = [room + size if d == dim else n for d, n in enumerate(array.shape)]
        wide = jnp.broadcast_to(value.array, shape)
        array = capacity.replicate_dims(array, [dim])
        wide = lax.dynamic_update_slice_in_dim(wide, array, capacity.value(low), dim)
        array = lax.slice_in_dim(wide, 0, room, axis=dim)
    return [array]


def _at_bound(capacity: Capacity, config: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(capacity.at_bound(size) for size in dim) for dim in config)


def _stack(eqn: Equation) -> Sequence[Any]:
    """Stacks along a new dim, whose size is fixed."""
    return eqn.bind(*eqn.arrays)


def _unstack(eqn: Equation) -> Sequence[Any]:
    if eqn.param("axis") in eqn.read[0].growing:
        raise GrowthRefusedError("an array is taken apart along a dim that grows")
    return eqn.bind(*eqn.arrays)


def _top_k(eqn: Equation) -> Sequence[Any]:
    x = eqn.read[0]
    axis = (eqn.param("axis") if "axis" in eqn.first else -1) % len(x.sizes)
    if isinstance(eqn.param("k"), Affine):
        raise GrowthRefusedError("top_k takes ever more elements")
    return eqn.bind(eqn.filled(x, {axis}, _least(x.array.dtype)))


def _reversed(eqn: Equation) -> Sequence[Any]:
    """Reverses, and slices off the padding, which then comes first."""
    x, capacity = eqn.read[0], eqn.capacity
    dims = eqn.param("dimensions")
    array = lax.rev(x.array, dims)
    for dim in {*dims} & x.growing:
        room = capacity.at_bound(x.sizes[dim])
        array = _piece(capacity, array, room - capacity.value(x.sizes[dim]), room, dim, True)
    return [array]


def _sort(eqn: Equation) -> Sequence[Any]:
    """An additional first key sorts the padding after all elements."""
    dim, num_keys = eqn.param("dimension"), eqn.param("num_keys")
    x = eqn.read[0]
    if dim not in x.growing:
        return eqn.bind(*eqn.arrays)
    if len(eqn.read) == 1 and x.array.dtype.kind in "fiub":
        last = np.nan if x.array.dtype.kind == "f" else _greatest(x.array.dtype)
        return eqn.bind(eqn.filled(x, {dim}, last))
    inside = eqn.capacity.is_element(x.array.shape, x.sizes, {dim})
    order = jnp.where(inside, np.int8(0), np.int8(1))
    return eqn.bind(order, *eqn.arrays, num_keys=num_keys + 1)[1:]


def _tile(eqn: Equation) -> Sequence[Any]:
    """Copies along a new dim, which is then merged with the repeated dim."""
    x, capacity = eqn.read[0], eqn.capacity
    sizes: tuple[Any, ...] = ()
    for count, size in zip(eqn.param("reps"), x.sizes, strict=True):
        sizes = (*sizes, count, size)
    array = lax.broadcast_in_dim(x.array, capacity.shape(sizes), range(1, len(sizes), 2))
    return [compacted(capacity, reshaped(capacity, Padded.plain(array, sizes), eqn.outs[0])).array]


def _squeeze(eqn: Equation) -> Sequence[Any]:
    if {*eqn.param("dimensions")} & eqn.read[0].growing:
        raise GrowthRefusedError("a dim that grows is squeezed")
    return eqn.bind(*eqn.arrays)


def _convolution(eqn: Equation) -> Sequence[Any]:
    """Convolutions whose batch varies; a sum over the batch reads zeros as padding."""
    left, right = eqn.read
    numbers = eqn.param("dimension_numbers")
    lhs, rhs = numbers.lhs_spec, numbers.rhs_spec
    if {*lhs[2:]} & left.growing or {*rhs[2:]} & right.growing:
        raise GrowthRefusedError("a convolution along a dim that grows")
    for name in ("feature_group_count", "batch_group_count"):
        count = eqn.param(name)
        if isinstance(count, Affine) or (count != 1 and (left.growing | right.growing) - {lhs[0]}):
            raise GrowthRefusedError("a convolution in groups that grow")
        if name == "batch_group_count" and count != 1:
            raise GrowthRefusedError("a convolution in groups that grow")
    return eqn.bind(eqn.filled(left, {lhs[1]}, 0), eqn.filled(right, {rhs[1]}, 0))


# The window parameters along a dim in which each window has one element.
_ONE_POSITION: dict[str, Any] = {
    "window_dimensions": 1,
    "window_strides": 1,
    "padding": (0, 0),
    "base_dilation": 1,
    "window_dilation": 1,
}


def _windows(eqn: Equation) -> Sequence[Any]:
    """Reductions of windows that have one element along each dim of varying size."""
    for dim in {dim for x in eqn.read for dim in x.growing}:
        for name, neutral in _ONE_POSITION.items():
            if name in eqn.first and eqn.param(name)[dim] != neutral:
                raise GrowthRefusedError(f"{eqn.name} along a dim that grows")
    return eqn.bind(*eqn.arrays)


def _random_bits(eqn: Equation) -> Sequence[Any]:
    """Hashes each element's position in the array without padding."""
    capacity, shape = eqn.capacity, eqn.outs[0]
    if eqn.read[0].sizes != () or not threefry.is_supported(eqn.read[0].array):
        raise GrowthRefusedError("random bits of another generator grow")
    strides: list[Any] = []
    step: Any = np.int64(1)
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * capacity.value(size)
    width = eqn.param("bit_width")
    return [threefry.bits_at(eqn.read[0].array, width, capacity.shape(shape), strides)]


def _along(name: str) -> Rule:
    """A rule for a collective, which refuses a dim of varying size."""

    def rule(eqn: Equation) -> Sequence[Any]:
        dim = eqn.param(name)
        if any(dim in x.growing for x in eqn.read) or isinstance(eqn.outs[0][dim], Affine):
            raise GrowthRefusedError(f"{eqn.name} along a dim that grows")
        return eqn.bind(*eqn.arrays)

    return rule


def _split(eqn: Equation) -> Sequence[Any]:
    axis, sizes = eqn.param("axis"), eqn.param("sizes")
    x = eqn.read[0]
    if axis not in x.growing and all(isinstance(size, int) for size in sizes):
        return eqn.bind(x.array)
    capacity, pieces, start = eqn.capacity, [], 0
    for size in sizes:
        room = capacity.at_bound(size)
        pieces.append(_piece(capacity, x.array, start, room, axis, isinstance(size, Affine)))
        start = start + capacity.value(size)
    return pieces


PER_ELEMENT = [
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bitcast_convert_type", "cbrt", "ceil", "clamp", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "nextafter", "not", "or", "population_count", "pow",
    "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
]  # fmt: skip
COLLECTIVES = {"all_gather": "all_gather_dimension", "reduce_scatter": "scatter_dimension"}
REDUCE_WINDOWS = [
    "reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum",
    "select_and_gather_add", "select_and_scatter_add",
]  # fmt: skip
RULES: dict[str, Rule] = {
    **dict.fromkeys(PER_ELEMENT, _per_element),
    **dict.fromkeys(["broadcast_in_dim", "iota", "transpose"], _per_element),
    **dict.fromkeys(
        [
            *(f"reduce_{kind}" for kind in ("sum", "prod", "max", "min", "and", "or", "xor")),
            *("argmax", "argmin"),
        ],
        _reduction,
    ),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _cumulative),
    **dict.fromkeys(
        ["scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter-mul"], _scatter
    ),
    **dict.fromkeys(["scatter_max", "scatter-max", "scatter_min", "scatter-min"], _scatter),
    **dict.fromkeys(REDUCE_WINDOWS, _windows),
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(["optimization_barrier", "pmax", "pmin", "psum"], _each_operand),
    **dict.fromkeys(["ppermute", "psum_invariant"], _each_operand),
    **{name: _along(dim) for name, dim in COLLECTIVES.items()},
    "pad": _pad,
    "reshard": _constraint,
    "random_bits": _random_bits,
    "rev": _reversed,
    "sharding_constraint": _constraint,
    SHARDY_CONSTRAINT: _constraint,
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "stack": _stack,
    "squeeze": _squeeze,
    "tile": _tile,
    "top_k": _top_k,
    "unstack": _unstack,
}
