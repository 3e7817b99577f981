"""Evaluates a function whose sizes grow with one number, on arrays that are padded to a bound.

The function is given by its jaxprs for two values of the number. The equations are evaluated with
the sizes for the bound, and the number itself is an input: elements from the number on are padding
with arbitrary values, and each rule below keeps them out of the elements before. What has no rule
is refused, and so is compiled for each size by itself.

Bucketing is the usual name of padding to few sizes, so that few programs are compiled.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec

from spmd_core.program.affine_sizes import (
    Affine,
    Fit,
    Form,
    GrowthRefusedError,
    Size,
    Sizes,
    shape_of,
)
from spmd_core.program.partitioner_rules import called


@dataclass
class Padded:
    """An array with padding behind the elements of each growing dim.

    Attributes:
        array: of the shape for the bound.
        sizes: of its dims without padding.
    """

    array: Any
    sizes: Sizes

    @property
    def growing(self) -> set[int]:
        """The dims that grow."""
        return {dim for dim, size in enumerate(self.sizes) if isinstance(size, Affine)}


class Evaluation:
    """The evaluation of one function.

    Args:
        fit: how integers depend on the number.
        bound: the greatest value of the number.
        number: the number, a traced 0-dim int64 array.
    """

    def __init__(self, fit: Fit, bound: int, number: jax.Array) -> None:
        self.fit, self.bound, self.number = fit, bound, number

    def run(self, first: ClosedJaxpr, second: ClosedJaxpr, inputs: Sequence[Any]) -> list[Padded]:
        """The function's results.

        Args:
            first: the function at the first value of the number.
            second: the same at the second value.
            inputs: the arguments, of the shapes for the bound.

        Raises:
            GrowthRefusedError: an operation has no rule for what grows in it.
        """
        a, b = first.jaxpr, second.jaxpr
        values: dict[Any, Padded] = {}
        for var, const, other in zip(a.constvars, first.consts, second.consts):
            if not np.array_equal(np.asarray(const), np.asarray(other)):
                raise GrowthRefusedError("a constant array depends on the size")
            values[var] = Padded(const, np.shape(const))
        for v, w, x in zip(a.invars, b.invars, inputs):
            sizes = self.fit.sizes(shape_of(v), shape_of(w))
            assert np.shape(x) == self.shape(sizes)
            values[v] = Padded(x, sizes)
        outer = source_info_util.current_name_stack()
        for e, f in zip(a.eqns, b.eqns, strict=True):
            read = [self._read(x, y, values) for x, y in zip(e.invars, f.invars)]
            with source_info_util.set_name_stack(outer + e.source_info.name_stack):
                values.update(zip(e.outvars, self._equation(e, f, read)))
        return [self._read(x, y, values) for x, y in zip(a.outvars, b.outvars)]

    def _read(self, first: Any, second: Any, values: dict[Any, Padded]) -> Padded:
        if not isinstance(first, Literal):
            return values[first]
        a, b = np.asarray(first.val), np.asarray(second.val)
        if a.shape == b.shape and a.tobytes() == b.tobytes():
            return Padded(first.val, a.shape)
        if a.dtype.kind in "iu":
            return Padded(self.value(self.fit.size(int(a), int(b)), a.dtype), ())
        size, inverse = self.fit.literal(float(a), float(b))
        value = self.value(size, np.dtype(np.float64))
        return Padded((1 / value if inverse else value).astype(a.dtype), ())

    def _equation(self, first: JaxprEqn, second: JaxprEqn, read: list[Padded]) -> list[Padded]:
        inner, other = called(first), called(second)
        if inner is not None and other is not None:
            return self.run(inner, other, [x.array for x in read])
        outs = [
            self.fit.sizes(shape_of(v), shape_of(w)) for v, w in zip(first.outvars, second.outvars)
        ]
        equation = Equation(self, first, second, read, outs)
        grows = any(x.growing for x in read) or any(
            isinstance(size, Affine) for sizes in outs for size in sizes
        )
        if not grows and equation.is_fixed():
            # Of a shard_map, such as a mark along one axis, parameters hold a function. Some
            # releases of jax give it apart from the others.
            found = first.primitive.get_bind_params(first.params)
            functions, params = found if isinstance(found, tuple) else ((), found)
            results = first.primitive.bind(*functions, *(x.array for x in read), **params)
            arrays = results if first.primitive.multiple_results else [results]
        else:
            rule = _RULES.get(first.primitive.name)
            if rule is None:
                raise GrowthRefusedError(f"{first.primitive.name} has no rule for growing sizes")
            arrays = rule(equation)
        for x, sizes in zip(arrays, outs, strict=True):
            if np.shape(x) != self.shape(sizes):
                raise GrowthRefusedError(f"{first.primitive.name} does not grow as its sizes do")
        return [Padded(x, sizes) for x, sizes in zip(arrays, outs)]

    def at_bound(self, size: Size) -> int:
        return size if isinstance(size, int) else int(size.at(self.bound))

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape with padding."""
        return tuple(self.at_bound(size) for size in sizes)

    def value(self, size: Size, dtype: Any = np.int64) -> Any:
        """The integer in the program."""
        if isinstance(size, int):
            return np.asarray(size, dtype)
        return size.at(self.number).astype(dtype)

    def is_element(self, shape: tuple[int, ...], sizes: Sizes, dims: set[int]) -> jax.Array:
        """Whether the elements of a shape lie before the padding of these dims."""
        inside: Any = True
        for dim in sorted(dims):
            position = lax.broadcasted_iota(np.int64, shape, dim)
            inside = inside & (position < self.value(sizes[dim]))
        return jnp.broadcast_to(inside, shape)

    def filled(self, x: Padded, dims: set[int], value: Any) -> jax.Array:
        """The array with `value` as padding of those dims that grow."""
        dims = dims & x.growing
        if not dims:
            return x.array
        inside = self.is_element(x.array.shape, x.sizes, dims)
        return jnp.where(inside, x.array, jnp.asarray(value, x.array.dtype))


@dataclass
class Equation:
    """One equation, at both values of the number.

    Attributes:
        run: the evaluation.
        first: at the first value.
        second: at the second value.
        read: its inputs.
        outs: the sizes of its results.
    """

    run: Evaluation
    first: JaxprEqn
    second: JaxprEqn
    read: list[Padded]
    outs: list[Sizes]

    def is_fixed(self) -> bool:
        """Whether the parameters do not depend on the number."""
        forms = []
        for eqn in (self.first, self.second):
            form = Form()
            for name, value in eqn.params.items():
                form.skeleton.append(name)
                form.add_param(value)
            forms.append(form)
        return forms[0] == forms[1]

    def param(self, name: str) -> Any:
        """A parameter, with `Size` for each integer."""
        return self._sized(self.first.params[name], self.second.params[name])

    def _sized(self, a: Any, b: Any) -> Any:
        if isinstance(a, (bool, np.bool_)):
            return a
        if isinstance(a, (int, np.integer)):
            return self.run.fit.size(int(a), int(b))
        if isinstance(a, (tuple, list)):
            items = [self._sized(x, y) for x, y in zip(a, b, strict=True)]
            return type(a)(*items) if hasattr(a, "_fields") else type(a)(items)
        return a

    def bind(self, *arrays: Any, **changed: Any) -> list[Any]:
        """The results of the primitive with the parameters for the bound."""
        params = {}
        for name in self.first.params:
            params[name] = changed[name] if name in changed else self._bound(self.param(name))
        results = self.first.primitive.bind(*arrays, **params)
        return list(results) if self.first.primitive.multiple_results else [results]

    def _bound(self, value: Any) -> Any:
        if isinstance(value, Affine):
            return self.run.at_bound(value)
        if isinstance(value, (tuple, list)):
            items = [self._bound(x) for x in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    @property
    def arrays(self) -> list[Any]:
        return [x.array for x in self.read]


Rule = Callable[[Equation], Sequence[Any]]


def _per_element(eqn: Equation) -> Sequence[Any]:
    """Each element of a result depends on the elements at one place alone."""
    return eqn.bind(*eqn.arrays)


def _constraint(eqn: Equation) -> Sequence[Any]:
    """A sharding constraint, on dims that do not grow."""
    params = eqn.first.params
    spec = getattr(params.get("sharding", params.get("dst_sharding")), "spec", None)
    whole = (None, (), PartitionSpec.UNCONSTRAINED)
    if spec is None or any(
        dim < len(spec) and spec[dim] not in whole for dim in eqn.read[0].growing
    ):
        raise GrowthRefusedError("a dim that grows is split")
    return eqn.bind(*eqn.arrays)


def _reshape(eqn: Equation) -> Sequence[Any]:
    """Elements keep their order: a growing dim may only be merged with, or split into, dims of
    size 1 before it and fixed dims behind it."""
    if 0 in eqn.read[0].sizes:
        raise GrowthRefusedError("a reshape of no elements")
    for before, after in _groups(eqn.read[0].sizes, eqn.outs[0]):
        for sizes in (before, after):
            wide = [size for size in sizes if size != 1]
            if any(isinstance(size, Affine) for size in wide[1:]):
                raise GrowthRefusedError("a reshape merges a dim that grows into another one")
    return eqn.bind(*eqn.arrays)


def _groups(before: Sizes, after: Sizes) -> Iterator[tuple[list[Size], list[Size]]]:
    """The dims of the two shapes of a reshape, in the smallest groups of equal size."""
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = [*before[i : i + 1]], [*after[j : j + 1]]
        i, j = i + 1, j + 1
        while (a := _product(left)) != (b := _product(right)):
            # The sizes of both sides at a large number tell which of the two is to be extended.
            if _at_large(a) < _at_large(b) and i < len(before):
                left.append(before[i])
                i += 1
            elif j < len(after):
                right.append(after[j])
                j += 1
            elif i < len(before):
                left.append(before[i])
                i += 1
            else:
                raise GrowthRefusedError("a reshape mixes dims that grow")
        yield left, right


def _product(sizes: list[Size]) -> Size:
    growing = [size for size in sizes if isinstance(size, Affine)]
    if len(growing) > 1:
        raise GrowthRefusedError("a reshape merges two dims that grow")
    fixed = math.prod(size for size in sizes if isinstance(size, int))
    if not growing:
        return fixed
    return Affine(growing[0].slope * fixed, growing[0].offset * fixed)


def _at_large(size: Size) -> int:
    return size if isinstance(size, int) else int(size.at(1 << 40))


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
    """The padding gets the value that changes no result."""
    kind = eqn.first.primitive.name.removeprefix("reduce_").removeprefix("arg")
    x = eqn.read[0]
    return eqn.bind(eqn.run.filled(x, {*eqn.first.params["axes"]}, _NEUTRAL[kind](x.array.dtype)))


def _cumulative(eqn: Equation) -> Sequence[Any]:
    """Padding comes last; in reverse it comes first, and gets the value that changes no result."""
    kind = eqn.first.primitive.name.removeprefix("cum")
    x = eqn.read[0]
    if not eqn.first.params["reverse"]:
        return eqn.bind(x.array)
    return eqn.bind(eqn.run.filled(x, {eqn.first.params["axis"]}, _NEUTRAL[kind](x.array.dtype)))


def _dot_general(eqn: Equation) -> Sequence[Any]:
    """Zero on both sides, as a padding of infinities times zero would be NaN."""
    (left, right), _ = eqn.first.params["dimension_numbers"]
    a, b = eqn.read
    return eqn.bind(eqn.run.filled(a, {*left}, 0), eqn.run.filled(b, {*right}, 0))


def _concatenate(eqn: Equation) -> Sequence[Any]:
    """Each part is written behind the elements of those before it."""
    dim = eqn.first.params["dimension"]
    if not any(dim in x.growing for x in eqn.read):
        return eqn.bind(*eqn.arrays)
    run = eqn.run
    result = jnp.zeros(run.shape(eqn.outs[0]), eqn.arrays[0].dtype)
    start: Any = 0
    for x in eqn.read:
        # A part ends, with its padding, within the result: its start is at most that at the bound.
        result = lax.dynamic_update_slice_in_dim(result, x.array, start, dim)
        start = start + run.value(x.sizes[dim])
    return [result]


def _slice(eqn: Equation) -> Sequence[Any]:
    starts, strides = eqn.param("start_indices"), eqn.first.params["strides"]
    x, run = eqn.read[0], eqn.run
    for dim in range(len(x.sizes)):
        moves = isinstance(starts[dim], Affine) or isinstance(eqn.outs[0][dim], Affine)
        if moves and strides is not None and strides[dim] != 1:
            raise GrowthRefusedError("a strided slice grows")
    fixed = [None if isinstance(start, Affine) else start for start in starts]
    array = x.array
    for dim, start in enumerate(starts):
        if isinstance(start, Affine):
            size = run.at_bound(eqn.outs[0][dim])
            array = _piece(array, run.value(start), size, dim, isinstance(eqn.outs[0][dim], Affine))
    limits = []
    for dim, start in enumerate(fixed):
        if start is None:
            limits.append(array.shape[dim])
        elif isinstance(eqn.outs[0][dim], Affine):
            limits.append(start + run.at_bound(eqn.outs[0][dim]))
        else:
            limits.append(run.at_bound(eqn.param("limit_indices")[dim]))
    # A slice of a dim that does not grow, such as the part of a cache that is filled, ends in it.
    beyond = [(0, max(limit - n, 0), 0) for limit, n in zip(limits, array.shape)]
    array = lax.pad(array, jnp.zeros((), array.dtype), beyond)
    return [lax.slice(array, [start or 0 for start in fixed], limits, strides)]


def _piece(array: jax.Array, start: Any, size: int, dim: int, grows: bool) -> jax.Array:
    """`size` elements from `start` on; where `size` includes padding, they may lie beyond."""
    if grows:
        pads = [(0, size if i == dim else 0, 0) for i in range(array.ndim)]
        array = lax.pad(array, jnp.zeros((), array.dtype), pads)
    return lax.dynamic_slice_in_dim(array, start, size, dim)


def _dynamic_slice(eqn: Equation) -> Sequence[Any]:
    x, *starts = eqn.read
    run, array = eqn.run, x.array
    for dim, start in enumerate(starts):
        size = eqn.outs[0][dim]
        if dim not in x.growing and not isinstance(size, Affine):
            array = lax.dynamic_slice_in_dim(array, start.array, size, dim)
            continue
        greatest = run.value(x.sizes[dim]) - run.value(size)
        begin = jnp.clip(jnp.asarray(start.array).astype(np.int64), 0, greatest)
        array = _piece(array, begin, run.at_bound(size), dim, isinstance(size, Affine))
    return [array]


def _dynamic_update_slice(eqn: Equation) -> Sequence[Any]:
    """The padding of the update leaves what it would cover as it is."""
    x, update, *starts = eqn.read
    run = eqn.run
    begins = []
    for dim, start in enumerate(starts):
        greatest = run.value(x.sizes[dim]) - run.value(update.sizes[dim])
        begins.append(jnp.clip(jnp.asarray(start.array).astype(np.int64), 0, greatest))
    array, piece = x.array, update.array
    if not update.growing:
        return [lax.dynamic_update_slice(array, piece, begins)]
    room = [(0, piece.shape[dim] if dim in update.growing else 0, 0) for dim in range(array.ndim)]
    wide = lax.pad(array, jnp.zeros((), array.dtype), room)
    inside = run.is_element(piece.shape, update.sizes, update.growing)
    piece = jnp.where(inside, piece, lax.dynamic_slice(wide, begins, piece.shape))
    wide = lax.dynamic_update_slice(wide, piece, begins)
    return [lax.slice(wide, (0,) * array.ndim, array.shape)]


_CLIP, _FILL = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP


def _bounded(
    run: Evaluation, x: Padded, indices: Any, dims: Sequence[int], window: Sequence[int], mode: Any
) -> Any:
    """Indices into the padding, as the mode treats those beyond the dim."""
    columns = []
    for position, dim in enumerate(dims):
        column = indices[..., position]
        greatest = run.value(x.sizes[dim]) - window[position]
        if mode == _CLIP:
            column = jnp.clip(column.astype(np.int64), 0, greatest)
        elif mode == _FILL and dim in x.growing:
            column = jnp.where(column.astype(np.int64) > greatest, x.array.shape[dim], column)
        columns.append(column.astype(indices.dtype))
    return jnp.stack(columns, axis=-1)


def _gather(eqn: Equation) -> Sequence[Any]:
    x, indices = eqn.read
    numbers, mode = eqn.first.params["dimension_numbers"], eqn.first.params["mode"]
    sizes = eqn.param("slice_sizes")
    for dim in x.growing:
        whole = dim not in numbers.start_index_map and sizes[dim] == x.sizes[dim]
        indexed = dim in numbers.start_index_map and isinstance(sizes[dim], int)
        batch = dim in numbers.operand_batching_dims
        if not (whole or indexed or batch):
            raise GrowthRefusedError("a gather takes part of a dim that grows")
    if any(isinstance(size, Affine) and dim not in x.growing for dim, size in enumerate(sizes)):
        raise GrowthRefusedError("a gather takes a part that grows")
    if {len(indices.sizes) - 1} & indices.growing:
        raise GrowthRefusedError("a gather indexes ever more dims")
    dims = numbers.start_index_map
    window = [sizes[dim] for dim in dims]
    bounded = _bounded(eqn.run, x, indices.array, dims, window, mode)
    return eqn.bind(x.array, bounded, indices_are_sorted=False)


def _scatter(eqn: Equation) -> Sequence[Any]:
    """Updates of the padding are dropped, by an index beyond the dim."""
    x, indices, updates = eqn.read
    numbers, mode = eqn.first.params["dimension_numbers"], eqn.first.params["mode"]
    dims = numbers.scatter_dims_to_operand_dims
    run, last = eqn.run, len(indices.sizes) - 1
    if last in indices.growing or numbers.operand_batching_dims:
        raise GrowthRefusedError("a scatter in batches grows")
    windows = [
        dim for dim in range(len(x.sizes)) if dim not in numbers.inserted_window_dims
    ]  # the operand's dims, in the order of the updates' window dims
    window_of = dict(zip(windows, numbers.update_window_dims))
    window: list[int] = []
    for dim, whole in enumerate(x.sizes):
        size = updates.sizes[window_of[dim]] if dim in window_of else 1
        if dim in dims and isinstance(size, Affine):
            raise GrowthRefusedError("a scatter writes a part that grows")
        if dim not in dims and size != whole and {Affine} & {type(size), type(whole)}:
            raise GrowthRefusedError("a scatter writes part of a dim that grows")
    for dim in dims:
        size = updates.sizes[window_of[dim]] if dim in window_of else 1
        assert isinstance(size, int)
        window.append(size)
    if mode not in (_CLIP, _FILL):
        mode = _FILL  # all indices are promised to lie inside
    bounded = _bounded(run, x, indices.array, dims, window, mode)
    if indices.growing:
        inside = run.is_element(bounded.shape, indices.sizes, indices.growing)
        beyond = jnp.iinfo(bounded.dtype).max
        bounded = jnp.where(inside, bounded, jnp.asarray(beyond, bounded.dtype))
    hints = {"indices_are_sorted": False, "unique_indices": False}
    return eqn.bind(x.array, bounded, updates.array, mode=_FILL, **hints)


def _pad(eqn: Equation) -> Sequence[Any]:
    """The operand's padding gets the padding's value: it is what lies behind the elements."""
    x, value = eqn.read
    config = eqn.param("padding_config")
    for dim, (low, high, interior) in enumerate(config):
        grows = dim in x.growing or isinstance(high, Affine)
        if isinstance(low, Affine) or isinstance(interior, Affine) or (grows and interior):
            raise GrowthRefusedError("a padding in front grows")
    exposed = {dim for dim, (_, high, _) in enumerate(config) if high != 0}
    return eqn.bind(eqn.run.filled(x, exposed, value.array), value.array)


def _top_k(eqn: Equation) -> Sequence[Any]:
    x = eqn.read[0]
    axis = eqn.first.params.get("axis", len(x.sizes) - 1) % len(x.sizes)
    if isinstance(eqn.param("k"), Affine):
        raise GrowthRefusedError("top_k takes ever more elements")
    return eqn.bind(eqn.run.filled(x, {axis}, _least(x.array.dtype)))


def _along(name: str) -> Rule:
    """A rule for an operation that is refused along a dim that grows."""

    def rule(eqn: Equation) -> Sequence[Any]:
        dims = eqn.first.params[name]
        if any({*np.atleast_1d(dims).tolist()} & x.growing for x in eqn.read):
            raise GrowthRefusedError(f"{eqn.first.primitive.name} along a dim that grows")
        return eqn.bind(*eqn.arrays)

    return rule


def _split(eqn: Equation) -> Sequence[Any]:
    axis, sizes = eqn.first.params["axis"], eqn.param("sizes")
    x = eqn.read[0]
    if axis not in x.growing and all(isinstance(size, int) for size in sizes):
        return eqn.bind(x.array)
    run, pieces, start = eqn.run, [], 0
    for size in sizes:
        pieces.append(_piece(x.array, start, run.at_bound(size), axis, isinstance(size, Affine)))
        start = start + run.value(size)
    return pieces


_PER_ELEMENT = [
    "broadcast_in_dim", "iota", "transpose", "abs", "acos", "acosh", "add", "add_any", "and",
    "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "nextafter", "not", "optimization_barrier", "or", "population_count", "pow",
    "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
]  # fmt: skip
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_PER_ELEMENT, _per_element),
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
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "reshard": _constraint,
    "rev": _along("dimensions"),
    "sharding_constraint": _constraint,
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _split,
    "squeeze": _along("dimensions"),
    "top_k": _top_k,
}
