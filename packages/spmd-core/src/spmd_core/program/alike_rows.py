"""Whether an operation treats rows alike: each row of its results depends on that row alone.

If it does, rows of its operands in another order give rows of its results in that order. The
operation's kernel is traced, and each of its equations is looked at: an elementwise function passes
an order on, a slice of columns does, and a sum over rows ends it. A cumulative sum, a slice of rows
and random numbers do not treat rows alike; neither does what nothing is known of.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmd_core import dtypes
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops import registry


class NotAlikeError(Exception):
    """An operation does not treat rows alike, or is not known to."""


@dataclass(frozen=True)
class Order:
    """How an array depends on the order of rows.

    Attributes:
        dim: the dim that has the rows; None if the array does not depend on their order.
        uniform: of an array that does not, the dims along which all its elements are equal.
    """

    dim: int | None = None
    uniform: frozenset[int] = frozenset()


def orders(entry: Entry, operands: Sequence[Spec], given: Sequence[Order]) -> list[Order]:
    """How the results of an operation depend on the order of rows.

    Args:
        entry: the operation.
        operands: the specs of its operands.
        given: how each of these depends on the order; at least one does.

    Raises:
        NotAlikeError: the operation does not treat rows alike.
    """
    if entry.random or entry.border is not None or entry.subgraphs:
        raise NotAlikeError(entry.name)
    arrays = [jax.ShapeDtypeStruct(x.shape, dtypes.to_jax(x.dtype)) for x in operands]
    types = {float: np.float64, int: np.int64, bool: np.bool_, complex: np.complex128}
    numbers = [jax.ShapeDtypeStruct((), types[kind]) for kind in entry.number_kinds]
    outs = tuple(registry.Out(x.shape, x.dtype) for x in entry.outs)

    def computed(arrays: list[jax.Array], values: list[jax.Array]) -> list[jax.Array]:
        typed = [registry.Number(x, kind) for x, kind in zip(values, entry.number_kinds)]
        found: list[jax.Array] = entry.kernel(registry.Context(outs, "cpu"), arrays, typed)
        return found

    with jax.enable_x64(True):
        traced = jax.make_jaxpr(computed)(arrays, numbers)
    return _followed(traced.jaxpr, [*given, *(Order() for _ in numbers)])


def _followed(jaxpr: Any, given: Sequence[Order]) -> list[Order]:
    """The orders of a jaxpr's results, from those of its inputs."""
    known: dict[Any, Order] = dict(zip(jaxpr.invars, given, strict=True))

    def order(x: Any) -> Order:
        # A literal is a scalar; a constant of the trace is an array, of which nothing is known.
        return Order() if hasattr(x, "val") else known.get(x, Order())

    for eqn in jaxpr.eqns:
        found = _results(eqn, [order(x) for x in eqn.invars])
        known.update(zip(eqn.outvars, found, strict=True))
    return [order(x) for x in jaxpr.outvars]


def _results(eqn: Any, given: list[Order]) -> list[Order]:
    name, params = eqn.primitive.name, eqn.params
    inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), 0)
    if inner and name in _CALLS:
        return _followed(getattr(inner, "jaxpr", inner), given)
    if name in ("optimization_barrier", "sharding_constraint"):
        return given
    dims = {x.dim for x in given if x.dim is not None}
    if not dims:
        return [Order(uniform=_uniform(eqn, given))] * len(eqn.outvars)
    shape = eqn.invars[0].aval.shape
    if name in _ELEMENTWISE and len(dims) == 1:
        (dim,) = dims
        _require_uniform(eqn, given, dim)
        return [Order(dim)] * len(eqn.outvars)
    rule = _RULES.get(name)
    if rule is None:
        raise NotAlikeError(name)
    return [rule(eqn, given, shape)] * len(eqn.outvars)


def _require_uniform(eqn: Any, given: Sequence[Order], dim: int) -> None:
    """Raises NotAlikeError if an operand has rows of its own, in an order that stays."""
    for x, order in zip(eqn.invars, given):
        if order.dim is None and x.aval.ndim and dim not in order.uniform:
            raise NotAlikeError(eqn.primitive.name)


def _uniform(eqn: Any, given: Sequence[Order]) -> frozenset[int]:
    """The dims along which all elements of a result are equal, if no operand has rows."""
    name, params = eqn.primitive.name, eqn.params
    dims = range(eqn.outvars[0].aval.ndim) if len(eqn.outvars) == 1 else ()
    if name == "iota":
        return frozenset(dims) - {params["dimension"]}
    if name == "broadcast_in_dim":
        kept = params["broadcast_dimensions"]
        sizes = eqn.invars[0].aval.shape
        varies = {
            d
            for i, d in enumerate(kept)
            if i not in given[0].uniform and not (sizes[i] == 1 < params["shape"][d])
        }
        return frozenset(dims) - varies
    if name in _ELEMENTWISE:
        of_arrays = [order.uniform for x, order in zip(eqn.invars, given) if x.aval.ndim]
        return frozenset(dims).intersection(*of_arrays)
    return frozenset()


# The rules of equations whose operands have rows: (equation, orders, shape of the first operand).


def _dim_of(order: Order) -> int:
    if order.dim is None:
        raise NotAlikeError("an operand without rows")
    return order.dim


def _broadcast(eqn: Any, given: Sequence[Order], shape: tuple[int, ...]) -> Order:
    return Order(eqn.params["broadcast_dimensions"][_dim_of(given[0])])


def _transpose(eqn: Any, given: Sequence[Order], shape: tuple[int, ...]) -> Order:
    return Order(eqn.params["permutation"].index(_dim_of(given[0])))


def _reshape(eqn: Any, given: Sequence[Order], shape: tuple[int, ...]) -> Order:
    dim, new = _dim_of(given[0]), eqn.outvars[0].aval.shape
    before = math.prod(shape[:dim])
    for d, size in enumerate(new):
        if size == shape[dim] and math.prod(new[:d]) == before:
            return Order(d)
    raise NotAlikeError("reshape")


def _squeeze(eqn: Any, given: Sequence[Order], shape: tuple[int, ...]) -> Order:
    return _without(eqn.params["dimensions"], _dim_of(given[0]))


def _without(dims: Sequence[int], dim: int) -> Order:
    return Order(dim - sum(d < dim for d in dims))


def _reduce(eqn: Any, given: Sequence[Order], shape: tuple[int, ...]) -> Order:
    axes, dim = eqn.params["axes"], _dim_of(given[0])
    if dim not in axes:
        return _without(axes, dim)
    if eqn.primitive.name in ("argmax", "argmin"):
        raise NotAlikeError(eqn.primitive.name)
    return Order()


def _slice(eqn: Any, given: Sequence[Order], shape: tuple[int, ...]) -> Order:
    dim, params = _dim_of(given[0]), eqn.params
    steps = params["strides"] or (1,) * len(shape)
    found = params["start_indices"][dim], params["limit_indices"][dim], steps[dim]
    if found != (0, shape[dim], 1):
        raise NotAlikeError("slice")
    return Order(dim)


def _pad(eqn: Any, given: Sequence[Order], shape: tuple[int, ...]) -> Order:
    dim = _dim_of(given[0])
    if any(eqn.params["padding_config"][dim]):
        raise NotAlikeError("pad")
    return Order(dim)


def _along(*names: str) -> Callable[..., Order]:
    """For what is computed along a dim, which must not be that of the rows."""

    def rule(eqn: Any, given: Sequence[Order], shape: tuple[int, ...]) -> Order:
        (dim, *others) = {x.dim for x in given if x.dim is not None}
        along = [eqn.params[name] for name in names if name in eqn.params]
        if others or dim in (along[0] if isinstance(along[0], tuple) else along):
            raise NotAlikeError(eqn.primitive.name)
        _require_uniform(eqn, given, dim)
        return Order(dim)

    return rule


def _dot(eqn: Any, given: Sequence[Order], shape: tuple[int, ...]) -> Order:
    (contracted, batch), (left, right) = eqn.params["dimension_numbers"], given
    for own, other, side in ((left, right, 0), (right, left, 1)):
        if own.dim is None:
            continue
        for dims in (contracted, batch):
            if own.dim in dims[side]:
                # Rows meet rows; otherwise one of them would be in another order.
                at = tuple(dims[side]).index(own.dim)
                if other.dim != dims[1 - side][at]:
                    raise NotAlikeError("dot_general")
                return Order() if dims is contracted else Order(at)
        if other.dim is not None:
            raise NotAlikeError("dot_general")
        bound = {*contracted[side], *batch[side]}
        free = sum(d not in bound for d in range(own.dim))
        if side == 0:
            return Order(len(batch[0]) + free)
        num_left = eqn.invars[0].aval.ndim - len(contracted[0]) - len(batch[0])
        return Order(len(batch[0]) + num_left + free)
    raise NotAlikeError("dot_general")


_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *("custom_vjp_call_jaxpr", "remat", "checkpoint", "custom_lin"),
}
_ELEMENTWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh"),
    *("cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh", "digamma", "div"),
    *("eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow"),
    *("is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne"),
    *("neg", "nextafter", "not", "or", "pow", "reduce_precision", "rem", "round", "rsqrt"),
    *("select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin"),
    *("sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
}
_RULES: dict[str, Callable[[Any, Sequence[Order], tuple[int, ...]], Order]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        _reduce,
    ),
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    "slice": _slice,
    "pad": _pad,
    "concatenate": _along("dimension"),
    "sort": _along("dimension"),
    "split": _along("axis"),
    "rev": _along("dimensions"),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "dot_general": _dot,
}
