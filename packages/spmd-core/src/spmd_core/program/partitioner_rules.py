"""Evaluates kernels in forms that XLA's partitioner gets right, in a program over several devices.

The partitioner errs on some primitives, such as a scatter of one index. A rule of `_RULES` writes
such an equation of a kernel's jaxpr in another form; all other equations stay as they are. So
lowerings, jax's own library and a user's jax functions are written without a thought of it.
`docs/xla_errors.md` has each error, the jaxlib versions that have it, and what ends the rule.

`benchmarks/partitioner` looks for more errors, by random programs.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun, primitives

from spmd_core.ops.kernels.blocks import apart
from spmd_core.ops.kernels.extremes import with_nan
from spmd_core.ops.kernels.transforms import transform
from spmd_core.runtime import devices

Rule = Callable[["Splits", JaxprEqn, Sequence[jax.Array]], Sequence[jax.Array] | None]


@dataclass(frozen=True)
class Splits:
    """How a program splits dims.

    Attributes:
        keep_whole: `Context.keep_whole`.
        num_devices: of the program.
        axis_sizes: of the axes of the mesh that split some dim.
        joins_axes: whether some tensor has a dim that is split over several axes, and another one
            over yet another axis.
        uneven: the numbers of shards over which some sharding splits a dim that they do not divide.
        has_whole_indices: whether the indices of gathers and scatters are to be whole on each
            device.
        keeps_nan: whether a maximum or minimum is to be NaN where an operand is.
        is_users: whether the function is a user's. Lowerings have convolutions and their own forms
            of other operations that the partitioner gets right.
    """

    keep_whole: Callable[[jax.Array, int], jax.Array]
    num_devices: int
    axis_sizes: tuple[int, ...] = ()
    joins_axes: bool = False
    uneven: frozenset[int] = frozenset()
    has_whole_indices: bool = False
    keeps_nan: bool = True
    is_users: bool = False

    def even_size(self, size: int) -> int:
        """The next size that each of the numbers of shards divides."""
        unit = math.lcm(*self.uneven)
        return -(-size // unit) * unit


def in_safe_forms(
    function: Callable[..., Sequence[jax.Array]], arguments: Any, splits: Splits
) -> Sequence[jax.Array] | None:
    """The function's results with every rule applied, or None where no rule has a say.

    Args:
        function: a pure jax function.
        arguments: its one argument, a tree of arrays.
        splits: of the program that is traced.
    """
    closed = jax.make_jaxpr(function)(arguments)
    if not _has_rule(closed.jaxpr, splits):
        return None
    return _evaluate(closed, jax.tree.leaves(arguments), splits)


def _has_rule(jaxpr: Jaxpr, splits: Splits) -> bool:
    return any(_is_ruled(eqn, splits) for eqn in jaxpr.eqns)


# Primitives that call one function, by the name of the parameter that has it. `scan`, `while` and
# `cond` are not among them: their bodies are rebuilt.
_CALLS = {
    primitives.jit_p: "jaxpr",
    primitives.closed_call_p: "call_jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
}


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an equation is a mere call of; None for any other equation."""
    name = _CALLS.get(eqn.primitive)
    return None if name is None else eqn.params[name]


def _inner(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The functions that an equation calls."""
    if (inner := called(eqn)) is not None:
        return [inner]
    if eqn.primitive is primitives.scan_p:
        return [eqn.params["jaxpr"]]
    if eqn.primitive is primitives.while_p:
        return [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
    if eqn.primitive is primitives.remat_p:
        return [ClosedJaxpr(eqn.params["jaxpr"], ())]
    if eqn.primitive is primitives.linear_solve_p:
        return [eqn.params["jaxprs"].solve]
    return list(eqn.params["branches"]) if eqn.primitive is primitives.cond_p else []


def _evaluate(
    closed: ClosedJaxpr, arguments: Sequence[jax.Array], splits: Splits
) -> list[jax.Array]:
    """The function's results; the equations between two that have rules are evaluated together."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts))
    values.update(zip(jaxpr.invars, arguments))
    outer = source_info_util.current_name_stack()

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for has_rule, group in groupby(
        jaxpr.eqns, lambda eqn: _is_ruled(eqn, splits) or _is_scalar_conversion(eqn)
    ):
        if not has_rule:
            _evaluate_as_is(jaxpr, list(group), values)
            continue
        for eqn in group:
            inputs = [read(x) for x in eqn.invars]
            with source_info_util.set_name_stack(outer + eqn.source_info.name_stack):
                values.update(zip(eqn.outvars, _ruled(eqn, inputs, splits)))
    return [read(x) for x in jaxpr.outvars]


def _is_ruled(eqn: JaxprEqn, splits: Splits) -> bool:
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
    return eqn.primitive in _RULES or any(_has_rule(x.jaxpr, splits) for x in _inner(eqn))


def _is_scalar_conversion(eqn: JaxprEqn) -> bool:
    made: Sequence[Any] = eqn.outvars
    return eqn.primitive is primitives.convert_element_type_p and not made[0].aval.shape


def _evaluate_as_is(jaxpr: Jaxpr, eqns: list[JaxprEqn], values: dict[Any, Any]) -> None:
    """Adds the values that the equations compute to `values`, by jax's own evaluation."""
    made = [x for eqn in eqns for x in eqn.outvars if not isinstance(x, DropVar)]
    read = {x for eqn in eqns for x in eqn.invars if not isinstance(x, Literal)}
    given = [x for x in values if x in read]
    names = jaxpr.debug_info._replace(arg_names=("",) * len(given), result_paths=("",) * len(made))
    part = jaxpr.replace(constvars=[], invars=given, outvars=made, eqns=eqns, debug_info=names)
    values.update(zip(made, jaxpr_as_fun(ClosedJaxpr(part, ()))(*(values[x] for x in given))))


def _ruled(eqn: JaxprEqn, inputs: Sequence[Any], splits: Splits) -> Sequence[jax.Array]:
    rule = _RULES.get(eqn.primitive) or _RULES_OF_USERS.get(eqn.primitive)
    if rule is None:
        return _with_inner_rules(eqn, inputs, splits)
    found = rule(splits, eqn, inputs)
    return [eqn.primitive.bind(*inputs, **eqn.params)] if found is None else found


def _with_inner_rules(eqn: JaxprEqn, inputs: Sequence[Any], splits: Splits) -> Sequence[jax.Array]:
    """The results of an equation that calls functions, with the rules applied inside of them."""
    if (inner := called(eqn)) is not None:
        return _evaluate(inner, inputs, splits)
    if eqn.primitive is primitives.linear_solve_p:
        counts = eqn.params["const_lengths"]
        first = counts.matvec + counts.vecmat
        constants, right = inputs[first : first + counts.solve], inputs[sum(counts) :]
        return _evaluate(eqn.params["jaxprs"].solve, [*constants, *right], splits)
    params = dict(eqn.params)

    def rebuilt(inner: ClosedJaxpr) -> ClosedJaxpr:
        return jax.make_jaxpr(lambda *xs: _evaluate(inner, xs, splits))(*inner.in_avals)

    if eqn.primitive is primitives.remat_p:  # whose function has its constants as operands
        found = rebuilt(ClosedJaxpr(params["jaxpr"], ()))
        params["jaxpr"] = _without_constants(found.jaxpr)
        return eqn.primitive.bind(*found.consts, *inputs, **params)
    for name in ("jaxpr", "cond_jaxpr", "body_jaxpr"):
        if name in params:
            params[name] = rebuilt(params[name])
    if "branches" in params:
        params["branches"] = tuple(rebuilt(branch) for branch in params["branches"])
    results: Sequence[jax.Array] = eqn.primitive.bind(*inputs, **params)
    return results


def _without_constants(jaxpr: Jaxpr) -> Jaxpr:
    """The function with its constants as its first operands."""
    operands = [*jaxpr.constvars, *jaxpr.invars]
    names = jaxpr.debug_info._replace(arg_names=("",) * len(operands))
    return jaxpr.replace(constvars=[], invars=operands, debug_info=names)


def _scatter(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """At least two indices, and as many as every number of shards divides.

    XLA turns a scatter of one index into a dynamic-update-slice, which the partitioner gets wrong
    where the operand is itself computed from a split dim. And where indices are split unevenly over
    some axes of a mesh, it adds the padding of the last shard at index 0. An index outside of the
    operand writes nothing, so such indices fill up.
    """
    operand, indices, updates = inputs
    if splits.has_whole_indices:
        indices = splits.keep_whole(indices, indices.ndim)
    elif indices.shape[-1] > 1:
        indices = splits.keep_whole(indices, 1)
    params = eqn.params
    dims = params["dimension_numbers"]
    batching = dims.scatter_indices_batching_dims
    free = [d for d in range(indices.ndim - 1) if d not in batching]
    if len(splits.axis_sizes) > 1 and batching:
        indices, updates = _with_whole_scattered_dims(splits.keep_whole, dims, indices, updates)
    if np.iinfo(indices.dtype).max < max(operand.shape, default=0):
        indices = indices.astype(np.int64)
    if params["mode"] == lax.GatherScatterMode.CLIP:
        indices = _clamped_indices(operand, indices, updates, dims)
        params = {**params, "mode": lax.GatherScatterMode.FILL_OR_DROP}
    is_split_otherwise = bool(
        batching or splits.uneven or _has_part_windows(operand, updates, dims)
    )
    if is_split_otherwise and indices.dtype != np.int32 and max(operand.shape) < 2**31:
        # The partitioner pads indices that it splits unevenly as if they were of int32, and ends
        # the process.
        bounds = (-1 if jnp.issubdtype(indices.dtype, np.signedinteger) else 0, max(operand.shape))
        indices = jnp.clip(indices, *bounds).astype(np.int32)
    if not free:
        # The window dims come after the batching dims among the updates' dims, as `indices` says.
        indices = jnp.expand_dims(indices, indices.ndim - 1)
        at = _position_of_new_dim(dims, updates.ndim)
        updates = jnp.expand_dims(updates, at)
        dims = dims._replace(
            update_window_dims=tuple(d + (d >= at) for d in dims.update_window_dims)
        )
        free = [indices.ndim - 2]
    scattered = [d for d in range(updates.ndim) if d not in dims.update_window_dims]
    sizes = {d: splits.even_size(indices.shape[d]) for d in free}
    if math.prod(sizes.values()) == 1:
        sizes[free[0]] = 2
    outside = np.asarray(max(operand.shape), indices.dtype)
    for d, size in sizes.items():
        more = size - indices.shape[d]
        indices = _appended(indices, d, more, outside)
        updates = _appended(updates, scattered[d], more, np.zeros((), updates.dtype))
    return [eqn.primitive.bind(operand, indices, updates, **{**params, "dimension_numbers": dims})]


def _has_part_windows(
    operand: jax.Array, updates: jax.Array, dims: lax.ScatterDimensionNumbers
) -> bool:
    """Whether the updates' windows are shorter than some dim of the operand that they lie along."""
    left_out = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    sizes = [size for d, size in enumerate(operand.shape) if d not in left_out]
    return any(updates.shape[d] < size for d, size in zip(dims.update_window_dims, sizes))


def _clamped_indices(
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    dims: lax.ScatterDimensionNumbers,
) -> jax.Array:
    """Indices of which each window of the updates lies inside of the operand."""
    sizes = dict.fromkeys((*dims.inserted_window_dims, *dims.operand_batching_dims), 1)
    window = iter(dims.update_window_dims)
    last = [
        size - (sizes[d] if d in sizes else updates.shape[next(window)])
        for d, size in enumerate(operand.shape)
    ]
    bounds = np.asarray([last[d] for d in dims.scatter_dims_to_operand_dims], indices.dtype)
    return jnp.clip(indices, np.zeros((), indices.dtype), bounds)


def _with_whole_scattered_dims(
    keep_whole: Callable[[jax.Array, int], jax.Array],
    dims: lax.ScatterDimensionNumbers,
    indices: jax.Array,
    updates: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Indices and updates of which only batching dims and window dims may be split.

    Where one axis splits the batching dim of the updates and also the operand's scattered dim, and
    another one the updates' scattered dim, the partitioner counts some updates for wrong elements.
    """
    batching = dims.scatter_indices_batching_dims
    of_indices = [d for d in range(indices.ndim) if d not in batching]
    scattered = [d for d in range(updates.ndim) if d not in dims.update_window_dims]
    of_updates = [d for d, i in zip(scattered, range(indices.ndim)) if i not in batching]
    return _whole(keep_whole, indices, of_indices), _whole(keep_whole, updates, of_updates)


def _whole(
    keep_whole: Callable[[jax.Array, int], jax.Array], x: jax.Array, dims: Sequence[int]
) -> jax.Array:
    """`x` with some dims whole on each device."""
    order = [*(d for d in range(x.ndim) if d not in dims), *dims]
    back = [order.index(d) for d in range(x.ndim)]
    return jnp.transpose(keep_whole(jnp.transpose(x, order), len(dims)), back)


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


def _gather(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Whole indices, in a program that was refused otherwise.

    The partitioner makes a slice that is larger than its operand, where the indices and the
    operand's columns are split over the same axis and the result is marked otherwise.
    """
    if not splits.has_whole_indices:
        return None
    operand, indices = inputs
    return [eqn.primitive.bind(operand, splits.keep_whole(indices, indices.ndim), **eqn.params)]


def _position_of_new_dim(dims: lax.ScatterDimensionNumbers, ndim: int) -> int:
    """Where a new last index dim stands among the dims of the updates."""
    scattered = [d for d in range(ndim) if d not in dims.update_window_dims]
    return scattered[-1] + 1 if scattered else 0


def _appended(x: jax.Array, dim: int, count: int, value: Any) -> jax.Array:
    edges = [(0, count if d == dim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, value, edges) if count else x


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
    primitives.scatter_p: _scatter,
    primitives.scatter_add_p: _scatter,
    lax.scatter_sub_p: _scatter,
    primitives.scatter_mul_p: _scatter,
    primitives.scatter_min_p: _scatter,
    primitives.scatter_max_p: _scatter,
    primitives.gather_p: _gather,
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
    left = _whole(splits.keep_whole, left, whole["left"])
    right = splits.keep_whole(right, right.ndim)
    return [_whole(splits.keep_whole, eqn.primitive.bind(left, right, **eqn.params), whole["out"])]


def _whole_reduced(
    splits: Splits, eqn: JaxprEqn, inputs: Sequence[jax.Array]
) -> Sequence[jax.Array] | None:
    """Whole reduced dims: XLA has no collective of integers' bits, or of a user's computation."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    if all(x.dtype == np.bool_ for x in inputs):
        return None
    whole = [_whole(splits.keep_whole, x, axes) if np.ndim(x) else x for x in inputs]
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
