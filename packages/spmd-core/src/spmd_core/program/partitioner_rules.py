"""Forms of primitives that XLA's partitioner gets right, in a program over several devices.

The partitioner errs on some primitives, such as a scatter of one index. A rule in `_RULES` rewrites
an equation of such a primitive. `docs/explanation/xla_errors.md` has each error, the jaxlib
versions that have it, and when the rule can be removed. `benchmarks/partitioner` looks for more
errors with random programs.
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
from spmd_core.program.splits import Splits, replicate_dims
from spmd_core.runtime import devices

Rule = Callable[[Splits, JaxprEqn, Sequence[jax.Array]], Sequence[jax.Array] | None]


def _has_dot_rule(eqn: JaxprEqn, splits: Splits) -> bool:
    """Whether `_dot_general` rewrites a product: see there for the three cases.

    The partitioner handles batched products correctly if two axes of equal size split the program.
    """
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    is_square = len(splits.axis_sizes) == 2 and len({*splits.axis_sizes}) == 1
    in_batches = bool(batch and contracted and not is_square)
    return len(contracted) > 2 or in_batches or _may_join_axes(eqn, splits)


def _may_join_axes(eqn: JaxprEqn, splits: Splits) -> bool:
    """Whether two axes may split one dim of a product's result, and a third axis another dim."""
    result: Any = eqn.outvars[0].aval
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    return splits.joins_axes and bool(contracted) and not batch and result.ndim > 1


def _dot_general(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Replicates contracted dims, in a program that uses several axes.

    The partitioner errs in three cases:

    - Of three or more contracted dims, if the operands split different ones, it leaves out some
      products. So at most two contracted dims stay split.
    - If one axis splits the batch dim and another axis a contracted dim, and that other axis splits
      the result's batch dim, blocks change places. So all contracted dims of the smaller operand of
      a batched product are replicated.
    - If the axis of a contracted dim splits a dim of the result, and two axes split another dim of
      it, blocks change places, too. So all contracted dims of the smaller operand are
      replicated, or the result if it is smaller than both operands.
    """
    left, right = inputs
    contracted, batch = eqn.params["dimension_numbers"]
    smaller = left if left.size < right.size else right
    made: Any = eqn.outvars[0].aval
    may_join = _may_join_axes(eqn, splits)
    replicates_result = may_join and made.size < smaller.size
    replicates_smaller = bool(batch[0]) or (may_join and not replicates_result)
    operands, numbers = [], []
    for x, own, own_batch in zip((left, right), contracted, batch):
        last = own if replicates_smaller and x is smaller else own[2:]
        # The product itself must read the replicated dims: a transpose between would split them.
        order = [*(d for d in range(x.ndim) if d not in last), *last]
        x = jnp.transpose(x, order)
        operands.append(splits.replicate_last_dims(x, len(last)) if last else x)
        numbers.append([tuple(order.index(d) for d in dims) for dims in (own, own_batch)])
    dims = tuple(zip(*numbers))
    result = eqn.primitive.bind(*operands, **{**eqn.params, "dimension_numbers": dims})
    return [splits.replicate_last_dims(result, result.ndim) if replicates_result else result]


def _slice(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """A stride of 1 in dims of which a slice keeps one element.

    With another stride the partitioner returns another element, or refuses the program.
    """
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
    """Clamps the starts explicitly, as StableHLO defines them for the global tensor.

    The partitioner drops an update of one element that lies out of bounds, and clamps the start of
    each device's part of a split block by itself.
    """
    num_operands = 1 + (eqn.primitive is primitives.dynamic_update_slice_p)
    operands, starts = inputs[:num_operands], inputs[num_operands:]
    inside = [_clamped(x, last) for x, last in zip(starts, _last_starts(eqn))]
    return [eqn.primitive.bind(*operands, *inside, **eqn.params)]


def _last_starts(eqn: JaxprEqn) -> Sequence[int]:
    """The largest starts at which the block of a dynamic slice or update lies in the operand."""
    is_update = eqn.primitive is primitives.dynamic_update_slice_p
    operand: Any = eqn.invars[0].aval
    block: Any = eqn.invars[1].aval if is_update else eqn.outvars[0].aval
    return [size - part for size, part in zip(operand.shape, block.shape)]


def _has_dynamic_slice_rule(eqn: JaxprEqn) -> bool:
    """Whether some start is not a constant, or out of bounds."""
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
    """Writes interior padding, negative padding and padding values as operations of their own.

    The partitioner errs in four cases:

    - Interior padding: it drops or repeats elements if it splits the result and not the operand.
      The elements become rows of a new dim, which a reshape merges.
    - Negative padding: a slice cuts off the elements.
    - Padding that moves a few elements across several shards: it loses some. They are written into
      a tensor of padding instead.
    - A tensor that is padded several times by the same amounts with different values: it uses the
      first value for all. So everything is padded with zeros, which a select replaces.
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
    # An optimization barrier: jaxlib 0.10.0 would merge the slice with the padding again.
    return lax.slice(apart(wide), starts, limits)


def _written(x: jax.Array, value: Any, dim: int, start: int, size: int) -> jax.Array:
    """An array of that size along the dim: `x` from `start` on, and the value everywhere else."""
    wide = jnp.broadcast_to(value, (*x.shape[:dim], size, *x.shape[dim + 1 :]))
    return lax.dynamic_update_slice(wide, x, [start if d == dim else 0 for d in range(x.ndim)])


def _spread(x: jax.Array, value: Any, dim: int, count: int) -> jax.Array:
    """`x` with `count` times the value between two elements along a dim, by way of a new dim."""
    edges = [(0, count if d == dim + 1 else 0, 0) for d in range(x.ndim + 1)]
    rows = lax.pad(jnp.expand_dims(x, dim + 1), value, edges)
    long = x.shape[dim] * (count + 1)
    wide = rows.reshape(*x.shape[:dim], long, *x.shape[dim + 1 :])
    return lax.slice_in_dim(wide, 0, wide.shape[dim] - count, axis=dim)


def _convert(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Folds a dtype conversion of a constant, such as the value of a padding."""
    (x,) = inputs
    is_constant = not isinstance(x, jax.core.Tracer)
    return [np.asarray(x).astype(eqn.params["new_dtype"])] if is_constant else None  # type: ignore


# How many no-op constraints to insert, so that each window operation has an operand of its own. The
# partitioner caches halo exchanges by operand, and ignores that the padding values differ.
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
    """Gives each kind of window operation its own operand; replicates windows of several tensors.

    The partitioner caches the halo exchange of a tensor, and reuses it for other windows of the
    same shape, whatever their padding value is: the running product of a tensor that also has a
    running sum would begin with 0. And it may split tensors that one operation reduces together in
    different ways.
    """
    times = _NAMES[eqn.primitive]
    renamed = [
        reduce(lambda y, _: splits.replicate_last_dims(y, 0), range(times), x) if np.ndim(x) else x
        for x in inputs
    ]
    is_joint = eqn.primitive is primitives.select_and_gather_add_p or len(eqn.outvars) > 1
    if is_joint:
        renamed = [splits.replicate_last_dims(x, x.ndim) if np.ndim(x) else x for x in renamed]
    made = eqn.primitive.bind(*renamed, **eqn.params)
    results = made if eqn.primitive.multiple_results else [made]
    return [splits.replicate_last_dims(x, x.ndim) for x in results] if is_joint else results


def _reverse(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Has the operand computed first, as a buffer of its own.

    If the operand is a broadcast whose dims a reshape has merged, and each device has one row, the
    partitioner takes the rows for equal and does not exchange them.
    """
    return [eqn.primitive.bind(apart(inputs[0]), **eqn.params)]


def _reshape(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Writes a reshape that splits a dim and has fewer dims in all as two reshapes.

    The partitioner aborts the process if a dim that is split unevenly becomes a shorter one, and
    the result has fewer dims. So the first reshape keeps the number of dims, and the second one
    drops them. A constraint between keeps XLA from merging the two.
    """
    (x,), shape = inputs, eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None:
        x = lax.transpose(x, eqn.params["dimensions"])
    long = (*shape, *(1,) * (x.ndim - len(shape)))
    if splits.uneven:
        x = splits.replicate_last_dims(x, 0)
    return [lax.reshape(splits.replicate_last_dims(lax.reshape(x, long), 0), shape)]


def _has_reshape_rule(eqn: JaxprEqn, splits: Splits) -> bool:
    """Whether `_reshape` rewrites it.

    It does if the reshape splits a dim, and has fewer dims in all or the program has uneven dims.
    """
    x: Any = eqn.invars[0].aval
    new, order = eqn.params["new_sizes"], eqn.params["dimensions"]
    old = x.shape if order is None else [x.shape[d] for d in order]
    return (len(new) < len(old) or bool(splits.uneven)) and _divides_a_dim(old, new)


def _divides_a_dim(old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether a reshape splits some dim into several dims of more than one element."""
    if math.prod(old) < 2:
        return False
    borders = {*accumulate(old, operator.mul)}
    return any(
        size > 1 and end not in borders for size, end in zip(new, accumulate(new, operator.mul))
    )


def _extreme(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Computes the maximum or minimum on integers that are ordered like the floats, NaN last.

    An all-reduce of floats may drop a NaN.
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
    """Replicates all dims but the batch: the partitioner errs on the others."""
    left, right = inputs
    dims = eqn.params["dimension_numbers"]
    is_grouped = eqn.params["batch_group_count"] > 1
    wide = {"left": dims.lhs_spec, "out": dims.out_spec}
    dims_of = {name: spec if is_grouped else spec[1:] for name, spec in wide.items()}
    left = replicate_dims(splits.replicate_last_dims, left, dims_of["left"])
    right = splits.replicate_last_dims(right, right.ndim)
    return [
        replicate_dims(
            splits.replicate_last_dims,
            eqn.primitive.bind(left, right, **eqn.params),
            dims_of["out"],
        )
    ]


def _with_replicated_reduced_dims(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Replicates reduced dims: XLA has no all-reduce of bits, or with a user's computation."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    if all(x.dtype == np.bool_ for x in inputs):
        return None
    operands = [
        replicate_dims(splits.replicate_last_dims, x, axes) if np.ndim(x) else x for x in inputs
    ]
    made = eqn.primitive.bind(*operands, **eqn.params)
    return made if eqn.primitive.multiple_results else [made]


def _fft(splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]) -> Sequence[jax.Array] | None:
    """Replicates transformed dims, in the layout that CPUs need, as for torch's transforms."""
    kind, lengths = eqn.params["fft_type"], eqn.params["fft_lengths"]
    return [
        transform(
            inputs[0],
            kind,
            lengths,
            replicate_last_dims=splits.replicate_last_dims,
            platform=devices.platform(),
        )
    ]


_RULES_OF_USERS: dict[Any, Rule] = {
    primitives.conv_general_dilated_p: _conv,
    primitives.fft_p: _fft,
    primitives.reduce_p: _with_replicated_reduced_dims,
    primitives.reduce_and_p: _with_replicated_reduced_dims,
    primitives.reduce_or_p: _with_replicated_reduced_dims,
    primitives.reduce_xor_p: _with_replicated_reduced_dims,
}


def has_rule(eqn: JaxprEqn, splits: Splits) -> bool:
    """Whether the partitioner may get an equation wrong in a program with these splits."""
    if eqn.primitive is primitives.convert_element_type_p:
        return False  # its rule only helps the rules of others
    # These are very common, and most of them need no rule.
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
