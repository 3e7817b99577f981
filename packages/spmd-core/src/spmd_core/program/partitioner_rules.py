"""Forms of primitives that XLA's partitioner gets right, in a program over several devices.

The partitioner errs on some primitives, such as a scatter of one index. A rule of `_RULES` writes
an equation of such a primitive in another form. `docs/xla_errors.md` has each error, the jaxlib
versions that have it, and what ends the rule. `benchmarks/partitioner` looks for more errors, by
random programs.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, primitives

from spmd_core.ops.kernels.blocks import apart
from spmd_core.ops.kernels.extremes import with_nan
from spmd_core.ops.kernels.transforms import transform
from spmd_core.program.scatter_rules import gather, scatter
from spmd_core.program.splits import Splits, with_whole_dims
from spmd_core.runtime import devices

Rule = Callable[[Splits, JaxprEqn, Sequence[jax.Array]], Sequence[jax.Array] | None]


def _has_dot_rule(eqn: JaxprEqn, splits: Splits) -> bool:
    """Whether a product contracts three dims or more, or within batches, or may join axes.

    Over two axes of one size, products within batches are right.
    """
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    is_square = len(splits.axis_sizes) == 2 and len({*splits.axis_sizes}) == 1
    in_batches = bool(batch and contracted and not is_square)
    return len(contracted) > 2 or in_batches or _may_join_axes(eqn, splits)


def _may_join_axes(eqn: JaxprEqn, splits: Splits) -> bool:
    """Whether one dim of a product may be split over two axes, and another one over a third."""
    result: Any = eqn.outvars[0].aval
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    return splits.joins_axes and bool(contracted) and not batch and result.ndim > 1


def _dot_general(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Keeps contracted dims whole, in a program that uses several axes.

    All but two: of three, of which the operands split different ones, some products are left out.
    And within batches, all of the smaller operand: where one axis splits the batches and another
    one the contracted dim, and the result's batches the other one, its blocks change places. So do
    the blocks of a result of which the axis of the contracted dim splits a dim, and two axes
    another one: all contracted dims of the smaller operand are whole, or the result if it is
    smaller than both.
    """
    left, right = inputs
    contracted, batch = eqn.params["dimension_numbers"]
    smaller = left if left.size < right.size else right
    made: Any = eqn.outvars[0].aval
    may_join = _may_join_axes(eqn, splits)
    is_result_whole = may_join and made.size < smaller.size
    is_one_whole = bool(batch[0]) or (may_join and not is_result_whole)
    operands, numbers = [], []
    for x, own, own_batch in zip((left, right), contracted, batch):
        whole = own if is_one_whole and x is smaller else own[2:]
        # The product itself reads what is whole: behind a transpose it would be split again.
        order = [*(d for d in range(x.ndim) if d not in whole), *whole]
        x = jnp.transpose(x, order)
        operands.append(splits.keep_whole(x, len(whole)) if whole else x)
        numbers.append([tuple(order.index(d) for d in dims) for dims in (own, own_batch)])
    dims = tuple(zip(*numbers))
    result = eqn.primitive.bind(*operands, **{**eqn.params, "dimension_numbers": dims})
    return [splits.keep_whole(result, result.ndim) if is_result_whole else result]


def _slice(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """No step where a slice keeps one element: the partitioner returns another one, or refuses."""
    params = eqn.params
    starts, limits, strides = params["start_indices"], params["limit_indices"], params["strides"]
    if strides is None:
        return None
    single = [-(-(b - a) // s) == 1 and s > 1 for a, b, s in zip(starts, limits, strides)]
    if not any(single):
        return None
    limits = [a + 1 if one else b for a, b, one in zip(starts, limits, single)]
    strides = [1 if one else s for s, one in zip(strides, single)]
    return [lax.slice(inputs[0], starts, limits, strides)]


def _dynamic_slice(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Starts that are clamped, as XLA clamps those of a whole tensor.

    The partitioner drops a block of one element that is to be written beyond the ends, and reads
    each device's part of a split block from its own clamped start.
    """
    num_operands = 1 + (eqn.primitive is primitives.dynamic_update_slice_p)
    operands, starts = inputs[:num_operands], inputs[num_operands:]
    inside = [_clamped(x, last) for x, last in zip(starts, _last_starts(eqn))]
    return [eqn.primitive.bind(*operands, *inside, **eqn.params)]


def _last_starts(eqn: JaxprEqn) -> Sequence[int]:
    """The largest starts of a dynamic slice, or of an update, inside of the operand."""
    is_update = eqn.primitive is primitives.dynamic_update_slice_p
    whole: Any = eqn.invars[0].aval
    block: Any = eqn.invars[1].aval if is_update else eqn.outvars[0].aval
    return [size - part for size, part in zip(whole.shape, block.shape)]


def _has_dynamic_slice_rule(eqn: JaxprEqn) -> bool:
    """Whether some start is computed, or outside."""
    last = _last_starts(eqn)
    return not all(
        isinstance(start, Literal) and 0 <= start.val <= end
        for start, end in zip(eqn.invars[-len(last) :], last)
    )


def _clamped(start: Any, last: int) -> Any:
    """An integer in [0, last]."""
    dtype = np.dtype(start.dtype)
    if last == 0:
        return np.zeros((), dtype)
    bound = np.asarray(min(last, np.iinfo(dtype).max), dtype)
    if not isinstance(start, jax.core.Tracer):
        return np.clip(np.asarray(start), 0, bound)
    return lax.clamp(np.zeros((), dtype), start, bound)


def _pad(splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]) -> Sequence[jax.Array] | None:
    """Padding between the elements and padding that cuts off elements are operations of their own.

    The partitioner leaves out or repeats elements where the result of a padding between elements is
    split and the operand is not; it errs where a padding is negative; it loses some of a few
    elements that move over several shards, which are written into a tensor of padding instead; and
    it pads with the first value alone where a tensor is padded alike with several. So all padding
    is zeros, which other values replace.
    """
    config = eqn.params["padding_config"]
    x, value = inputs
    zero = np.zeros((), x.dtype)
    result = _padded(splits, x, zero, config)
    if not isinstance(value, jax.core.Tracer) and np.asarray(value).tobytes() == zero.tobytes():
        return [result]
    inside: Any = True
    for dim, (low, _, inner) in enumerate(config):
        at = lax.broadcasted_iota(np.int32, result.shape, dim) - low
        last = (x.shape[dim] - 1) * (inner + 1)
        inside &= (at >= 0) & (at <= last) & (at % (inner + 1) == 0)
    return [jnp.where(inside, result, value)]


def _padded(
    splits: Splits, x: jax.Array, value: Any, config: Sequence[tuple[int, int, int]]
) -> jax.Array:
    for dim, (_, _, inner) in enumerate(config):
        if inner and x.shape[dim] > 1:
            x = _spread(x, value, dim, inner)
    sizes = [size + max(low, 0) + max(high, 0) for size, (low, high, _) in zip(x.shape, config)]
    few = [
        dim
        for dim, (low, _, _) in enumerate(config)
        if low > 0 and 1 < x.shape[dim] < splits.num_devices < sizes[dim]
    ]
    for dim in few:
        x = _written(x, value, dim, config[dim][0], sizes[dim])
    edges = [
        (0, 0, 0) if d in few else (max(low, 0), max(high, 0), 0)
        for d, (low, high, _) in enumerate(config)
    ]
    wide = lax.pad(x, value, edges)
    if all(low >= 0 and high >= 0 for low, high, _ in config):
        return wide
    starts = [max(-low, 0) for low, _, _ in config]
    limits = [size - max(-high, 0) for size, (_, high, _) in zip(sizes, config)]
    # Kept from the padding, with which jaxlib 0.10.0 would join it again.
    return lax.slice(apart(wide), starts, limits)


def _written(x: jax.Array, value: Any, dim: int, start: int, size: int) -> jax.Array:
    """`x` from `start` on along a dim of that size, with the value everywhere else."""
    wide = jnp.broadcast_to(value, (*x.shape[:dim], size, *x.shape[dim + 1 :]))
    return lax.dynamic_update_slice(wide, x, [start if d == dim else 0 for d in range(x.ndim)])


def _spread(x: jax.Array, value: Any, dim: int, count: int) -> jax.Array:
    """`x` with so many times the value between two elements along a dim: rows of a new dim."""
    edges = [(0, count if d == dim + 1 else 0, 0) for d in range(x.ndim + 1)]
    rows = lax.pad(jnp.expand_dims(x, dim + 1), value, edges)
    long = x.shape[dim] * (count + 1)
    wide = rows.reshape(*x.shape[:dim], long, *x.shape[dim + 1 :])
    return lax.slice_in_dim(wide, 0, wide.shape[dim] - count, axis=dim)


def _convert(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """A constant stays one, such as the value of a padding."""
    (x,) = inputs
    is_constant = not isinstance(x, jax.core.Tracer)
    return [np.asarray(x).astype(eqn.params["new_dtype"])] if is_constant else None  # type: ignore


# How often a tensor is named anew before an operation reads windows of it. What fills the windows
# at the borders differs, and the partitioner takes the first that a tensor's windows had.
_NAMES = {
    primitives.reduce_window_max_p: 1,
    primitives.cummax_p: 1,
    primitives.reduce_window_min_p: 2,
    primitives.cummin_p: 2,
    primitives.cumprod_p: 3,
    primitives.cumlogsumexp_p: 4,
    primitives.reduce_window_p: 5,
    primitives.select_and_gather_add_p: 6,
    primitives.select_and_scatter_p: 7,
    primitives.select_and_scatter_add_p: 8,
}


def _windows(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """No two kinds of windows read the same tensor; windows of several tensors are whole.

    The partitioner keeps a tensor's blocks with what their windows read of the neighbors, and takes
    them again for other windows of the same shape, whatever value fills the borders: a running
    product of a tensor that also has a running sum begins with 0. And it may split tensors that are
    reduced together in different ways.
    """
    times = _NAMES[eqn.primitive]
    renamed = [
        reduce(lambda y, _: splits.keep_whole(y, 0), range(times), x) if np.ndim(x) else x
        for x in inputs
    ]
    is_joint = eqn.primitive is primitives.select_and_gather_add_p or len(eqn.outvars) > 1
    if is_joint:
        renamed = [splits.keep_whole(x, x.ndim) if np.ndim(x) else x for x in renamed]
    made = eqn.primitive.bind(*renamed, **eqn.params)
    results = made if eqn.primitive.multiple_results else [made]
    return [splits.keep_whole(x, x.ndim) for x in results] if is_joint else results


def _reverse(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """The operand is a buffer of its own.

    Where it is a broadcast whose dims a reshape has merged, and each device has one row, the
    partitioner takes the rows for equal and does not exchange them.
    """
    return [eqn.primitive.bind(apart(inputs[0]), **eqn.params)]


def _reshape(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Where a dim becomes several ones, no less dims than before; a second reshape drops them.

    The partitioner ends the process where a dim that is split unevenly becomes a shorter one, and
    the result has less dims. XLA joins reshapes that follow each other, so they are kept apart.
    """
    (x,), shape = inputs, eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None:
        x = lax.transpose(x, eqn.params["dimensions"])
    long = (*shape, *(1,) * (x.ndim - len(shape)))
    if splits.uneven:
        x = splits.keep_whole(x, 0)
    return [lax.reshape(splits.keep_whole(lax.reshape(x, long), 0), shape)]


def _has_reshape_rule(eqn: JaxprEqn, splits: Splits) -> bool:
    """Whether it makes several dims out of one, and fewer in all or in a program of uneven dims."""
    x: Any = eqn.invars[0].aval
    new, order = eqn.params["new_sizes"], eqn.params["dimensions"]
    old = x.shape if order is None else [x.shape[d] for d in order]
    return (len(new) < len(old) or bool(splits.uneven)) and _divides_a_dim(old, new)


def _divides_a_dim(old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether a reshape makes several dims, of more than one element each, out of some dims."""
    if math.prod(old) < 2:
        return False
    borders = {*accumulate(old, operator.mul)}
    return any(
        size > 1 and end not in borders for size, end in zip(new, accumulate(new, operator.mul))
    )


def _extreme(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """The maximum or minimum of integers in the order of the floats, NaN beyond all of them.

    A collective of floats may drop a NaN.
    """
    (x,) = inputs
    may_cross = any(x.shape[axis] > 1 for axis in eqn.params["axes"]) and x.size > 0
    if not may_cross or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
        return None
    is_max = eqn.primitive is primitives.reduce_max_p
    return [with_nan(lambda x: eqn.primitive.bind(x, **eqn.params), x, is_max=is_max)]


_RULES: dict[Any, Rule] = {
    primitives.reduce_max_p: _extreme,
    primitives.reduce_min_p: _extreme,
    primitives.reshape_p: _reshape,
    primitives.scatter_p: scatter,
    primitives.scatter_add_p: scatter,
    lax.scatter_sub_p: scatter,
    primitives.scatter_mul_p: scatter,
    primitives.scatter_min_p: scatter,
    primitives.scatter_max_p: scatter,
    primitives.gather_p: gather,
    primitives.dot_general_p: _dot_general,
    primitives.slice_p: _slice,
    primitives.dynamic_slice_p: _dynamic_slice,
    primitives.dynamic_update_slice_p: _dynamic_slice,
    primitives.pad_p: _pad,
    primitives.rev_p: _reverse,
    primitives.convert_element_type_p: _convert,
    **dict.fromkeys(_NAMES, _windows),
}


def _conv(splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]) -> Sequence[jax.Array] | None:
    """Whole but for the batch: the partitioner errs on split positions, channels and kernels."""
    left, right = inputs
    dims = eqn.params["dimension_numbers"]
    is_grouped = eqn.params["batch_group_count"] > 1
    wide = {"left": dims.lhs_spec, "out": dims.out_spec}
    whole = {name: spec if is_grouped else spec[1:] for name, spec in wide.items()}
    left = with_whole_dims(splits.keep_whole, left, whole["left"])
    right = splits.keep_whole(right, right.ndim)
    return [
        with_whole_dims(
            splits.keep_whole, eqn.primitive.bind(left, right, **eqn.params), whole["out"]
        )
    ]


def _whole_reduced(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Whole reduced dims: XLA has no collective of integers' bits, or of a user's computation."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    if all(x.dtype == np.bool_ for x in inputs):
        return None
    whole = [with_whole_dims(splits.keep_whole, x, axes) if np.ndim(x) else x for x in inputs]
    made = eqn.primitive.bind(*whole, **eqn.params)
    return made if eqn.primitive.multiple_results else [made]


def _fft(splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]) -> Sequence[jax.Array] | None:
    """Whole transformed dims, in the layout that CPUs need: as torch's transforms."""
    kind, lengths = eqn.params["fft_type"], eqn.params["fft_lengths"]
    return [
        transform(
            inputs[0],
            kind,
            lengths,
            keep_whole=splits.keep_whole,
            platform=devices.platform(),
        )
    ]


_RULES_OF_USERS: dict[Any, Rule] = {
    primitives.conv_general_dilated_p: _conv,
    primitives.fft_p: _fft,
    primitives.reduce_p: _whole_reduced,
    primitives.reduce_and_p: _whole_reduced,
    primitives.reduce_or_p: _whole_reduced,
    primitives.reduce_xor_p: _whole_reduced,
}


def has_rule(eqn: JaxprEqn, splits: Splits) -> bool:
    """Whether an equation may be one that the partitioner gets wrong, in such a program."""
    if eqn.primitive is primitives.convert_element_type_p:
        return False  # its rule only helps others
    # Very common, and seldom with a rule.
    if eqn.primitive is primitives.dot_general_p:
        return len(splits.axis_sizes) > 1 and _has_dot_rule(eqn, splits)
    if eqn.primitive is primitives.reshape_p:
        return _has_reshape_rule(eqn, splits)
    if eqn.primitive in (primitives.dynamic_slice_p, primitives.dynamic_update_slice_p):
        return _has_dynamic_slice_rule(eqn)
    if eqn.primitive in (primitives.reduce_max_p, primitives.reduce_min_p):
        return splits.keeps_nan
    if eqn.primitive in _RULES_OF_USERS:
        return splits.is_users
    return eqn.primitive in _RULES


def rule_of(eqn: JaxprEqn) -> Rule | None:
    """The rule for an equation's primitive, if there is one."""
    return _RULES.get(eqn.primitive) or _RULES_OF_USERS.get(eqn.primitive)
