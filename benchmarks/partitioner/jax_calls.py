"""The jax functions whose layouts `benchmarks.partitioner.jax_functions` tries, by primitive.

Together they have every primitive of jax that XLA's partitioner splits in a way of its own, and
each of jax's loops, calls and transformations around some of them. Each takes float64 and int64
arrays. What is not determined (signs of eigenvectors, the order of equal keys) does not leave them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# B, T, D: sizes that the axes of most meshes divide, and sizes that they do not.
SIZES = {"even": (8, 4, 12), "uneven": (5, 6, 7)}
Make = Callable[[np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class JaxCall:
    """A jax function whose layouts are tried.

    Attributes:
        function: of the operands; returns an array, or a tuple of arrays.
        operands: for B, T and D, what makes each operand.
        has_gradient: whether the gradients of floating-point operands are compared too.
        tolerance: of float64 values near 1.
    """

    function: Callable[..., Any]
    operands: Callable[[int, int, int], Sequence[Make]]
    has_gradient: bool = True
    tolerance: float = 1e-8

    def arrays(self, size: str) -> list[np.ndarray]:
        """The operands for a key of `SIZES`, float64 or int64, the same at each call."""
        generator = np.random.default_rng(0)
        return [make(generator) for make in self.operands(*SIZES[size])]


def floats(*shape: int) -> Make:
    return lambda generator: generator.standard_normal(shape)


def with_nan(*shape: int) -> Make:
    def make(generator: np.random.Generator) -> np.ndarray:
        x = generator.standard_normal(shape)
        x.flat[x.size // 7], x.flat[x.size // 3], x.flat[x.size // 2] = np.nan, np.inf, -np.inf
        return x

    return make


def ints(low: int, high: int, *shape: int) -> Make:
    return lambda generator: generator.integers(low, high, shape)


def given(*values: int) -> Make:
    return lambda generator: np.asarray(values)


def order(size: int, count: int) -> Make:
    """Distinct integers below `size`."""
    return lambda generator: generator.permutation(size)[:count]


def _one(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(b, t, d)]


def _matrix(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(b, d)]


def _matrices(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(b, t, t)]


def _nan(b: int, t: int, d: int) -> Sequence[Make]:
    return [with_nan(b, t, d)]


# Starts of slices: inside, and past both ends, where jax takes the first or the last elements.
_STARTS = given(2, 99, -99, 0)


def _slices(sizes: Callable[[jax.Array], Sequence[int]], dims: Sequence[int]) -> Any:
    """Dynamic slices of those sizes whose starts along those dims are computed."""

    def function(x: jax.Array, starts: jax.Array) -> Any:
        return tuple(
            lax.dynamic_slice(x, [starts[i] if d in dims else 0 for d in range(x.ndim)], sizes(x))
            for i in range(starts.shape[0])
        )

    return function


def _updates(dims: Sequence[int], *, is_chain: bool = False) -> Any:
    """Dynamic updates whose starts along those dims are computed."""

    def function(x: jax.Array, block: jax.Array, starts: jax.Array) -> Any:
        results = []
        for i in range(starts.shape[0]):
            at = [starts[i] if d in dims else 0 for d in range(x.ndim)]
            results.append(lax.dynamic_update_slice(x, block * (i + 1), at))
            x = results[-1] if is_chain else x
        return results[-1] if is_chain else tuple(results)

    return function


def _block(*sizes: int | None) -> Callable[[int, int, int], Sequence[Make]]:
    """Operands of an update of that block; None: the whole dim."""
    return lambda b, t, d: [
        floats(b, t, d),
        floats(*(n if n is not None else m for n, m in zip(sizes, (b, t, d)))),
        _STARTS,
    ]


def _tables(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(d, t), ints(0, d, b)]


def _tables_outside(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(d, t), ints(-2 * d, 2 * d, b)]


def _written(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(d, t), order(d, 4), floats(4, t)]


def _written_outside(b: int, t: int, d: int) -> Sequence[Make]:
    # Distinct, also as clamped.
    return [floats(d, t), given(1, 99, -99, 2), floats(4, t)]


def _update(method: str, mode: str | None = None) -> Any:
    return lambda x, i, rows: getattr(x.at[i], method)(rows, mode=mode)


def _gather_windows(mode: str) -> Any:
    dims = lax.GatherDimensionNumbers((1, 2), (), (0, 1))
    return lambda x, i: lax.gather(x, i, dims, (2, 3), mode=mode)


def _scatter_windows(mode: str) -> Any:
    dims = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    return lambda x, i, w: lax.scatter_add(x, i, w, dims, mode=mode)


def _window(reducer: Any, init: float, shape: Sequence[int], **more: Any) -> Any:
    """A reduction in windows over all dims."""
    strides = more.pop("strides", (1,) * len(shape))
    padding = more.pop("padding", "SAME")
    return lambda x: lax.reduce_window(x, init, reducer, shape, strides, padding, **more)


def _multiplied(a: jax.Array, b: jax.Array) -> jax.Array:
    return a * b + 0 * a  # no monoid that jax knows


_CONV = ("NCH", "OIH", "NCH")


def _conv(**more: Any) -> Any:
    more = {"window_strides": (1,), "padding": [(1, 1)], **more}
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=_CONV, **more)


def _images(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(b, t, d), floats(6, t, 3)]


def _dot(contracted: Any, batch: Any) -> Any:
    return lambda a, b: lax.dot_general(a, b, (contracted, batch))


def _definite(x: jax.Array) -> jax.Array:
    return x @ x.mT + 2 * x.shape[-1] * jnp.eye(x.shape[-1])


def _with_key(function: Callable[..., Any]) -> Any:
    """A function of random bits, whose key is made from an operand."""
    return lambda x, seed: function(jax.random.wrap_key_data(seed.astype(np.uint32)), x)


def _keyed(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(b, t, d), ints(0, 1 << 30, 2)]


def _decoded(x: jax.Array, rows: jax.Array) -> Any:
    """A cache that a loop writes at one position after the other, beyond its end too."""

    def step(cache: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        position, row = at
        cache = lax.dynamic_update_slice(cache, row[:, None], (0, position, 0))
        return cache, lax.dynamic_index_in_dim(cache, position - 1, 1, keepdims=False)

    return lax.scan(step, x, (jnp.arange(3) * 3, rows))


def _while(x: jax.Array, count: jax.Array) -> jax.Array:
    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, y = state
        value = lax.dynamic_slice(y, (0, i * 5, 0), (y.shape[0], 1, y.shape[2])) + 1
        return i + 1, lax.dynamic_update_slice(y, value, (0, i * 5 - 1, 0))

    return lax.while_loop(lambda state: state[0] < count[0], body, (count[0] * 0, x))[1]


def _put_at(x: jax.Array, at: jax.Array) -> jax.Array:
    """One column written, one read, one of another dim added; past the end too."""
    y = lax.dynamic_update_slice(x, x[:, :1] * 2, (0, at, 0))
    z = lax.dynamic_slice(y, (0, 0, at), (*y.shape[:2], 1))
    return y.at[:, :, at].add(z[..., 0], mode="clip")


def _starting(function: Callable[..., Any]) -> Any:
    """Something around `_put_at`, at starts of all kinds."""
    return lambda x, starts: tuple(function(x, starts[i]) for i in range(starts.shape[0]))


@jax.custom_jvp
def _with_jvp(x: jax.Array, at: jax.Array) -> jax.Array:
    return _put_at(x, at)


@_with_jvp.defjvp
def _with_jvp_rule(primals: Any, tangents: Any) -> Any:
    x, at = primals
    return _put_at(x, at), _put_at(tangents[0], at)


@jax.custom_vjp
def _with_vjp(x: jax.Array, at: jax.Array) -> jax.Array:
    return _put_at(x, at)


_with_vjp.defvjp(
    lambda x, at: (_with_vjp(x, at), at),
    lambda at, grad: (_put_at(grad, at), np.zeros((), jax.dtypes.float0)),
)


def _started(b: int, t: int, d: int) -> Sequence[Make]:
    return [floats(b, t, d), _STARTS]


def _solved(a: jax.Array, b: jax.Array) -> jax.Array:
    def solve(matvec: Any, y: jax.Array) -> jax.Array:
        return jax.scipy.linalg.solve(_definite(a), y)

    return lax.custom_linear_solve(lambda v: _definite(a) @ v, b, solve, symmetric=True)


SLICES: dict[str, JaxCall] = {
    "slice": JaxCall(lambda x: lax.slice(x, (1, 0, 2), (4, 4, 7), (2, 3, 1)), _one),
    "slice_one": JaxCall(lambda x: (x[:1], x[:, 3:4], x[..., 4::9], x[:, -1:]), _one),
    "dynamic_slice_one": JaxCall(_slices(lambda x: (x.shape[0], 1, x.shape[2]), [1]), _started),
    "dynamic_slice_row": JaxCall(_slices(lambda x: (1, *x.shape[1:]), [0]), _started),
    "dynamic_slice_element": JaxCall(_slices(lambda x: (1, 1, 1), [0, 1, 2]), _started),
    "dynamic_slice_block": JaxCall(_slices(lambda x: (2, 3, x.shape[2]), [0, 1]), _started),
    "dynamic_slice_mixed": JaxCall(_slices(lambda x: (1, 2, 3), [0, 1, 2]), _started),
    "dynamic_slice_whole": JaxCall(_slices(lambda x: x.shape, [0, 1, 2]), _started),
    "dynamic_update_one": JaxCall(_updates([1]), _block(None, 1, None)),
    "dynamic_update_row": JaxCall(_updates([0]), _block(1, None, None)),
    "dynamic_update_last": JaxCall(_updates([2]), _block(None, None, 1)),
    "dynamic_update_element": JaxCall(_updates([0, 1, 2]), _block(1, 1, 1)),
    "dynamic_update_block": JaxCall(_updates([0, 1]), _block(2, 3, None)),
    "dynamic_update_mixed": JaxCall(_updates([0, 1, 2]), _block(1, 2, 3)),
    "dynamic_update_whole": JaxCall(_updates([0, 1, 2]), _block(None, None, None)),
    "dynamic_update_chain": JaxCall(_updates([1], is_chain=True), _block(None, 1, None)),
    "dynamic_update_blocks": JaxCall(_updates([1, 2], is_chain=True), _block(None, 2, 1)),
    "dynamic_index": JaxCall(
        lambda x, i: tuple(
            lax.dynamic_index_in_dim(x, i[k], axis, keepdims=k > 1)
            for k in range(4)
            for axis in (0, 1, 2)
        ),
        _started,
    ),
    "dynamic_update_index": JaxCall(
        lambda x, i: tuple(lax.dynamic_update_index_in_dim(x, x[:, 1], i[k], 1) for k in range(4)),
        _started,
    ),
    "dynamic_slices_in_batches": JaxCall(
        jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, i - 2), (1, 3))),
        lambda b, t, d: [floats(b, t, d), ints(-9, 19, b)],
    ),
    "dynamic_updates_in_batches": JaxCall(
        jax.vmap(lambda x, w, i: lax.dynamic_update_slice(x, w, (i, i - 2))),
        lambda b, t, d: [floats(b, t, d), floats(b, 1, 3), ints(-9, 19, b)],
    ),
}

GATHERS: dict[str, JaxCall] = {
    "rows": JaxCall(lambda x, i: x[i], _tables),
    "rows_clip": JaxCall(lambda x, i: x.at[i].get(mode="clip"), _tables_outside),
    "rows_fill": JaxCall(lambda x, i: x.at[i].get(mode="fill", fill_value=3), _tables_outside),
    "rows_nan": JaxCall(lambda x, i: jnp.nan_to_num(jnp.take(x, i, axis=0)), _tables_outside),
    "rows_promised": JaxCall(lambda x, i: x.at[i].get(mode="promise_in_bounds"), _tables),
    "columns_clip": JaxCall(
        lambda x, i: jnp.take(x, i, axis=1, mode="clip"),
        lambda b, t, d: [floats(b, d, t), ints(-2 * d, 2 * d, 6)],
    ),
    "one_row": JaxCall(lambda x, i: tuple(x[i[k]] for k in range(4)), _started),
    "one_row_clip": JaxCall(
        lambda x, i: tuple(x.at[:, i[k]].get(mode="clip") for k in range(4)), _started
    ),
    "two_dims": JaxCall(
        lambda x, i, j: x.at[i, :, j].get(mode="clip"),
        lambda b, t, d: [floats(b, t, d), ints(-20, 20, 6), ints(-20, 20, 6)],
    ),
    "along_dim": JaxCall(
        lambda x, i: jnp.take_along_axis(x, i, 1, mode="clip"),
        lambda b, t, d: [floats(b, d), ints(-2 * d, 2 * d, b, 6)],
    ),
    "along_dim_fill": JaxCall(
        lambda x, i: jnp.take_along_axis(x, i, 0, mode="fill", fill_value=1),
        lambda b, t, d: [floats(b, d), ints(-2 * b, 2 * b, 6, d)],
    ),
    "windows_clip": JaxCall(
        _gather_windows("clip"), lambda b, t, d: [floats(b, d), ints(-9, 19, 4, 2)]
    ),
    "windows_fill": JaxCall(
        _gather_windows("fill"), lambda b, t, d: [floats(b, d), ints(0, 4, 4, 2)]
    ),
    "rows_in_batches": JaxCall(
        jax.vmap(lambda x, i: x.at[i].get(mode="clip")),
        lambda b, t, d: [floats(b, d, t), ints(-9, 19, b, 5)],
    ),
    "searchsorted": JaxCall(
        lambda x, y: jnp.searchsorted(jnp.sort(x), y),
        lambda b, t, d: [floats(d), floats(b, t)],
        has_gradient=False,
    ),
}

SCATTERS: dict[str, JaxCall] = {
    "set_rows": JaxCall(_update("set"), _written),
    "set_rows_drop": JaxCall(_update("set", "drop"), _written_outside),
    "set_rows_clip": JaxCall(_update("set", "clip"), _written_outside),
    "set_rows_promised": JaxCall(_update("set", "promise_in_bounds"), _written),
    "add_rows_drop": JaxCall(_update("add", "drop"), _written_outside),
    "add_rows_clip": JaxCall(_update("add", "clip"), _written_outside),
    "add_equal_rows": JaxCall(
        _update("add"), lambda b, t, d: [floats(d, t), ints(0, 3, b), floats(b, t)]
    ),
    "subtract_rows": JaxCall(lambda x, i, rows: x.at[i].subtract(rows), _written),
    "multiply_rows": JaxCall(
        lambda x, i, rows: x.at[i].multiply(rows, unique_indices=True), _written
    ),
    "multiply_equal_rows": JaxCall(
        _update("multiply", "clip"),
        lambda b, t, d: [floats(d, t), ints(-9, 3, b), floats(b, t)],
        has_gradient=False,
    ),
    "min_rows": JaxCall(_update("min", "clip"), _written_outside, has_gradient=False),
    "max_rows": JaxCall(_update("max"), _written_outside, has_gradient=False),
    "apply_rows": JaxCall(
        lambda x, i, rows: x.at[i].apply(jnp.sin) + rows.sum(), _written, has_gradient=False
    ),
    "set_one_row": JaxCall(
        lambda x, i: tuple(x.at[i[k]].set(x[1] * 2) for k in range(4)), _started
    ),
    "set_one_row_clip": JaxCall(
        lambda x, i: tuple(x.at[:, i[k]].set(x[:, 1] * 2, mode="clip") for k in range(4)),
        _started,
    ),
    "add_one_element_clip": JaxCall(
        lambda x, i: tuple(x.at[i[k], i[k], 1].add(2.5, mode="clip") for k in range(4)), _started
    ),
    "two_dims_add": JaxCall(
        lambda x, i, j, w: x.at[i, :, j].add(w, mode="clip"),
        lambda b, t, d: [floats(b, t, d), ints(-20, 20, 6), ints(-20, 20, 6), floats(6, t)],
    ),
    "windows_add_clip": JaxCall(
        _scatter_windows("clip"),
        lambda b, t, d: [floats(b, d), ints(-9, 19, 4, 2), floats(4, 2, 3)],
    ),
    "windows_add_drop": JaxCall(
        _scatter_windows("drop"),
        lambda b, t, d: [floats(b, d), ints(-9, 19, 4, 2), floats(4, 2, 3)],
    ),
    "add_in_batches": JaxCall(
        jax.vmap(lambda x, i, w: x.at[i].add(w)),
        lambda b, t, d: [floats(b, d, t), ints(-9, 19, b, 5), floats(b, 5, t)],
    ),
    "add_in_batches_clip": JaxCall(
        jax.vmap(lambda x, i, w: x.at[i].add(w, mode="clip")),
        lambda b, t, d: [floats(b, d, t), ints(-9, 19, b, 5), floats(b, 5, t)],
    ),
    "segment_sum": JaxCall(
        lambda x, i: jax.ops.segment_sum(x, i, 4), lambda b, t, d: [floats(b, d), ints(-2, 6, b)]
    ),
    "segment_max": JaxCall(
        lambda x, i: jnp.maximum(jax.ops.segment_max(x, i, 4), -9),
        lambda b, t, d: [floats(b, d), ints(0, 3, b)],
        has_gradient=False,
    ),
    "bincount": JaxCall(
        lambda i: jnp.bincount(i, length=7), lambda b, t, d: [ints(0, 9, b * d)], has_gradient=False
    ),
    "histogram": JaxCall(
        lambda x: jnp.histogram(x, bins=5, range=(-1, 1))[0], _matrix, has_gradient=False
    ),
    "nonzero": JaxCall(
        lambda x: jnp.stack(jnp.nonzero(x > 0, size=9)), _matrix, has_gradient=False
    ),
}

RUNNING: dict[str, JaxCall] = {
    **{
        f"{name}_{axis}": JaxCall(partial(getattr(lax, name), axis=axis, reverse=axis == 1), _one)
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
        for axis in (0, 1, 2)
    },
    "running_sums_of_all_kinds": JaxCall(
        lambda x: (lax.cumsum(x, 1), lax.cumprod(x, 1), lax.cummax(x, 1), lax.cummin(x, 1)), _one
    ),
    "associative_scan": JaxCall(
        lambda x: lax.associative_scan(lambda a, b: a * b + b, x, axis=1), _one
    ),
    "cumsum_of_integers": JaxCall(
        lambda i: jnp.cumsum(i, axis=0), lambda b, t, d: [ints(0, 9, d, t)], has_gradient=False
    ),
}

SORTS: dict[str, JaxCall] = {
    "sort": JaxCall(lambda x: lax.sort(x, dimension=1), _one),
    "sort_descending": JaxCall(lambda x: jnp.sort(x, axis=0, descending=True), _one),
    "argsort": JaxCall(lambda x: jnp.argsort(x, axis=-1), _one, has_gradient=False),
    "sort_by_two_keys": JaxCall(
        lambda i, j, x: lax.sort((i, j, x), dimension=1, num_keys=3)[2],
        lambda b, t, d: [ints(0, 3, b, d), ints(0, 2, b, d), floats(b, d)],
    ),
    "sort_stable": JaxCall(
        lambda i, x: lax.sort((i, x), dimension=1, num_keys=1, is_stable=True)[1],
        lambda b, t, d: [ints(0, 3, b, d), floats(b, d)],
    ),
    "top_k": JaxCall(lambda x: lax.top_k(x, 3), _one),
    "approx_max_k": JaxCall(lambda x: lax.approx_max_k(x, 3)[0], _one),
    "approx_min_k": JaxCall(
        lambda x: lax.approx_min_k(x, 2, reduction_dimension=1)[0], _one, has_gradient=False
    ),
    "median": JaxCall(lambda x: jnp.median(x, axis=1), _one),
    "quantile": JaxCall(lambda x: jnp.quantile(x, 0.3, axis=-1), _one),
    "unique": JaxCall(
        lambda i: jnp.unique(i, size=4), lambda b, t, d: [ints(0, 5, b, t)], has_gradient=False
    ),
    "argmax": JaxCall(
        lambda x: (jnp.argmax(x, 0), jnp.argmin(x, 1), jnp.argmax(x, 2), jnp.argmax(x)),
        _nan,
        has_gradient=False,
    ),
    "argmax_of_equals": JaxCall(
        lambda i: (lax.argmax(i, 0, np.int32), lax.argmin(i, 1, np.int64), jnp.argmax(i)),
        lambda b, t, d: [ints(0, 2, b, d)],
        has_gradient=False,
    ),
}

REDUCTIONS: dict[str, JaxCall] = {
    "sum": JaxCall(lambda x: (x.sum(), x.sum(0), x.sum((1, 2)), x.mean(1)), _one),
    "prod": JaxCall(lambda x: (x.prod(0), x.prod((1, 2))), _one),
    "max": JaxCall(lambda x: (x.max(0), x.max((1, 2)), x.min(1), x.min()), _one),
    "max_of_nan": JaxCall(
        lambda x: (x.max(0), x.max((1, 2)), x.min(1), x.min(), jnp.nanmax(x, 1)),
        _nan,
        has_gradient=False,
    ),
    "and_or_xor": JaxCall(
        lambda i: (
            jnp.bitwise_and.reduce(i, axis=0),
            jnp.bitwise_or.reduce(i, axis=1),
            lax.reduce_xor(i, (0,)),
            (i > 3).all(0),
            (i > 40).any(1),
        ),
        lambda b, t, d: [ints(0, 64, b, d)],
        has_gradient=False,
    ),
    "max_of_integers": JaxCall(
        lambda i: (i.max(0), i.min(1), i.sum(), i.prod(1)),
        lambda b, t, d: [ints(-9, 9, b, d)],
        has_gradient=False,
    ),
    "reduce_pairs": JaxCall(
        lambda x, i: lax.reduce(
            (x, i),
            (-jnp.inf, 0),
            lambda a, b: (jnp.maximum(a[0], b[0]), jnp.where(a[0] > b[0], a[1], b[1])),
            (1,),
        ),
        lambda b, t, d: [floats(b, d), ints(0, 99, b, d)],
        has_gradient=False,
    ),
    "reduce_other": JaxCall(
        lambda x: lax.reduce(x, 1.0, _multiplied, (0, 2)), _one, has_gradient=False
    ),
    "logsumexp": JaxCall(lambda x: jax.nn.logsumexp(x, axis=(0, 1)), _one),
    "softmax": JaxCall(lambda x: jax.nn.softmax(x, axis=1), _one),
    "var": JaxCall(lambda x: (x.var(1), x.std((0, 2))), _one),
    "norm": JaxCall(lambda x: jnp.linalg.norm(x, axis=1), _one),
    "reduce_precision": JaxCall(lambda x: lax.reduce_precision(x, 8, 7), _one, has_gradient=False),
}

WINDOWS: dict[str, JaxCall] = {
    "window_sum": JaxCall(_window(lax.add, 0.0, (1, 2, 3)), _one),
    "window_sum_strides": JaxCall(_window(lax.add, 0.0, (1, 2, 3), strides=(1, 2, 2)), _one),
    "window_sum_long": JaxCall(_window(lax.add, 0.0, (1, 1, 5)), _one),
    "window_sum_batch": JaxCall(
        _window(lax.add, 0.0, (3, 1, 1), padding=[(2, 0), (0, 0), (0, 0)]), _one
    ),
    "window_sum_dilated": JaxCall(
        _window(lax.add, 0.0, (1, 1, 2), padding="VALID", window_dilation=(1, 1, 2)), _one
    ),
    "window_sum_base_dilated": JaxCall(
        _window(lax.add, 0.0, (1, 1, 2), padding="VALID", base_dilation=(1, 1, 2)), _one
    ),
    "window_max": JaxCall(_window(lax.max, -np.inf, (1, 2, 3)), _one),
    "window_max_strides": JaxCall(_window(lax.max, -np.inf, (1, 1, 3), strides=(1, 1, 2)), _one),
    "window_max_dilated": JaxCall(
        _window(lax.max, -np.inf, (1, 1, 2), padding="VALID", window_dilation=(1, 1, 3)),
        _one,
        has_gradient=False,
    ),
    "window_min": JaxCall(_window(lax.min, np.inf, (2, 2, 1)), _one),
    "window_other": JaxCall(_window(_multiplied, 1.0, (1, 2, 2)), _one, has_gradient=False),
    "window_pairs": JaxCall(
        lambda x: lax.reduce_window(
            (x, -x),
            (0.0, -np.inf),
            lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])),
            (1, 2, 2),
            (1, 1, 1),
            "SAME",
        ),
        _one,
        has_gradient=False,
    ),
    "windows_of_all_kinds": JaxCall(
        lambda x: (
            _window(lax.add, 0.0, (1, 1, 3))(x),
            _window(lax.max, -np.inf, (1, 1, 3))(x),
            _window(lax.min, np.inf, (1, 1, 3))(x),
        ),
        _one,
    ),
}

CONVOLUTIONS: dict[str, JaxCall] = {
    "conv": JaxCall(_conv(), _images),
    "conv_stride": JaxCall(_conv(window_strides=(2,)), _images),
    "conv_input_dilated": JaxCall(_conv(lhs_dilation=(2,)), _images),
    "conv_kernel_dilated": JaxCall(_conv(rhs_dilation=(2,), padding=[(2, 2)]), _images),
    "conv_all": JaxCall(
        _conv(window_strides=(2,), lhs_dilation=(3,), rhs_dilation=(2,), padding=[(3, 1)]), _images
    ),
    "conv_cut": JaxCall(_conv(padding=[(-1, 2)]), _images),
    "conv_long": JaxCall(
        _conv(padding=[(3, 3)]), lambda b, t, d: [floats(b, t, d), floats(6, t, 7)]
    ),
    "conv_groups": JaxCall(
        _conv(feature_group_count=2),
        lambda b, t, d: [floats(b, 2 * t, d), floats(6, t, 3)],
    ),
    "conv_depthwise": JaxCall(
        lambda x, w: _conv(feature_group_count=w.shape[0])(x, w),
        lambda b, t, d: [floats(b, t, d), floats(t, 1, 3)],
    ),
    "conv_batch_groups": JaxCall(
        _conv(batch_group_count=2), lambda b, t, d: [floats(2 * t, b, d), floats(6, b, 3)]
    ),
    "conv_positions_last": JaxCall(
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        ),
        lambda b, t, d: [floats(b, d, t), floats(3, t, 6)],
    ),
    "conv_transpose": JaxCall(
        lambda x, w: lax.conv_transpose(
            x, w, (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        ),
        lambda b, t, d: [floats(b, d, t), floats(3, t, 6)],
    ),
    "conv_2d": JaxCall(
        lambda x, w: lax.conv_general_dilated(x, w, (1, 2), "SAME"),
        lambda b, t, d: [floats(2, 3, b, d), floats(4, 3, 3, 3)],
    ),
    "patches": JaxCall(lambda x: lax.conv_general_dilated_patches(x, (3,), (2,), [(1, 1)]), _one),
    "convolve": JaxCall(
        lambda x, w: jnp.convolve(x, w, "same"), lambda b, t, d: [floats(2 * d), floats(3)]
    ),
    "resize": JaxCall(
        lambda x: jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 5), "linear"), _one
    ),
}

PRODUCTS: dict[str, JaxCall] = {
    "dot": JaxCall(jnp.dot, lambda b, t, d: [floats(b, d), floats(d, t)]),
    "dot_batch": JaxCall(
        _dot(((2,), (1,)), ((0,), (0,))), lambda b, t, d: [floats(b, t, d), floats(b, d, t)]
    ),
    "dot_two_contracted": JaxCall(
        _dot(((0, 2), (1, 0)), ((), ())), lambda b, t, d: [floats(b, t, d), floats(d, b, 3)]
    ),
    "dot_three_contracted": JaxCall(
        _dot(((0, 1, 2), (1, 2, 0)), ((), ())),
        lambda b, t, d: [floats(b, t, d, 2), floats(d, b, t, 3)],
    ),
    "dot_batch_two_contracted": JaxCall(
        _dot(((2, 3), (1, 3)), ((0,), (2,))),
        lambda b, t, d: [floats(b, t, d, 2), floats(3, d, b, 2)],
    ),
    "dot_all_batch": JaxCall(
        _dot(((), ()), ((0, 1), (1, 0))), lambda b, t, d: [floats(b, d), floats(d, b)]
    ),
    "outer": JaxCall(_dot(((), ()), ((0,), (0,))), lambda b, t, d: [floats(b, t), floats(b, d)]),
    "einsum": JaxCall(
        lambda a, b, c: jnp.einsum("btd,bd,te->be", a, b, c),
        lambda b, t, d: [floats(b, t, d), floats(b, d), floats(t, 3)],
    ),
    "ragged_dot": JaxCall(
        lambda a, w: lax.ragged_dot(a, w, jnp.array([2, 0, 3])),
        lambda b, t, d: [floats(b, d), floats(3, d, t)],
    ),
    "attention": JaxCall(
        lambda q, k: jax.nn.dot_product_attention(q, k, k * 2, is_causal=True),
        lambda b, t, d: [floats(b, t, 4, 6), floats(b, t, 2, 6)],
        tolerance=1e-5,  # jax computes its softmax in float32
    ),
    "kron": JaxCall(jnp.kron, lambda b, t, d: [floats(b, t), floats(3, d)]),
    "cross": JaxCall(jnp.cross, lambda b, t, d: [floats(b, d, 3), floats(b, d, 3)]),
}

SHAPES: dict[str, JaxCall] = {
    "concatenate": JaxCall(
        lambda a, b: jnp.concatenate([a, b, a * 2], 1),
        lambda b, t, d: [floats(b, d), floats(b, 3)],
    ),
    "concatenate_rows": JaxCall(
        lambda a, b: jnp.concatenate([a, b], 0), lambda b, t, d: [floats(b, d), floats(1, d)]
    ),
    "stack": JaxCall(lambda x: jnp.stack([x, x * 2, -x], 1), _matrix),
    "split": JaxCall(lambda x: lax.split(x, (1, x.shape[2] - 1), 2), _one),
    "pad": JaxCall(lambda x: lax.pad(x, 2.0, [(1, 0, 0), (0, 3, 0), (2, 1, 0)]), _one),
    "pad_negative": JaxCall(lambda x: lax.pad(x, 2.0, [(-1, 1, 0), (1, -2, 0), (-1, -1, 0)]), _one),
    "pad_interior": JaxCall(lambda x: lax.pad(x, 2.0, [(0, 0, 1), (1, 0, 2), (-1, 3, 1)]), _one),
    "pad_value": JaxCall(
        lambda x, v: lax.pad(x, v[0], [(1, 2, 0), (0, 0, 0), (0, 0, 0)]),
        lambda b, t, d: [floats(b, t, d), floats(3)],
    ),
    "pad_modes": JaxCall(
        lambda x: (
            jnp.pad(x, [(1, 2), (2, 1)], mode="reflect"),
            jnp.pad(x, [(1, 2), (2, 1)], mode="wrap"),
            jnp.pad(x, [(1, 2), (2, 1)], mode="edge"),
        ),
        _matrix,
    ),
    "rev": JaxCall(lambda x: lax.rev(x, (0, 2)), _one),
    "roll": JaxCall(
        lambda x, i: (jnp.roll(x, 3, 0), jnp.roll(x, i[0], 1), jnp.roll(x, i[2], 2)), _started
    ),
    "merge": JaxCall(lambda x: (x.reshape(-1, x.shape[2]), x.reshape(x.shape[0], -1)), _one),
    "flatten": JaxCall(lambda x: x.reshape(-1), _one),
    "split_dim": JaxCall(
        lambda x: x.reshape(x.shape[0], 2, 3, -1), lambda b, t, d: [floats(b, 6, d)]
    ),
    "reshape_mixed": JaxCall(
        lambda x: x.reshape(-1, 2 * x.shape[2]), lambda b, t, d: [floats(b, 4, d)]
    ),
    "reshape_transposed": JaxCall(
        lambda x: lax.reshape(x, (x.shape[2], x.shape[0] * x.shape[1]), (2, 0, 1)), _one
    ),
    "transpose": JaxCall(lambda x: jnp.transpose(x, (2, 0, 1)), _one),
    "broadcast": JaxCall(
        lambda x: lax.broadcast_in_dim(x, (3, x.shape[0], 2, x.shape[1]), (1, 3)), _matrix
    ),
    "squeeze": JaxCall(
        lambda x: (x[:, None], jnp.squeeze(x[:, :1], 1), jnp.expand_dims(x, (0, 2))), _matrix
    ),
    "tile": JaxCall(lambda x: (jnp.tile(x, (2, 3)), jnp.repeat(x, 2, 0)), _matrix),
    "iota": JaxCall(
        lambda x: x * lax.broadcasted_iota(np.float64, x.shape, 1) + jnp.arange(x.shape[2]), _one
    ),
    "diagonal": JaxCall(
        lambda x: (jnp.diagonal(x, 1, 1, 2), jnp.trace(x, 0, 0, 2), jnp.tril(x)), _one
    ),
    "diag": JaxCall(lambda x: jnp.diag(x[:, 0]), _matrix),
    "clamp": JaxCall(lambda x, y: lax.clamp(-y, x, y + 1), lambda b, t, d: [floats(b, d)] * 2),
    "select_n": JaxCall(
        lambda i, x, y: lax.select_n(i, x, y, x * y),
        lambda b, t, d: [lambda g: g.integers(0, 3, (b, d)).astype(np.int32), *[floats(b, d)] * 2],
    ),
    "bits": JaxCall(
        lambda i: lax.bitcast_convert_type(lax.bitcast_convert_type(i, np.int16) + 1, np.int64),
        lambda b, t, d: [ints(0, 99, b, d)],
        has_gradient=False,
    ),
    "barrier": JaxCall(lambda x: lax.optimization_barrier(x.cumsum(1)) * x, _one),
    "interp": JaxCall(
        lambda x, y: jnp.interp(x, jnp.sort(y), y), lambda b, t, d: [floats(b, t), floats(d)]
    ),
    "one_hot": JaxCall(
        lambda i, x: jax.nn.one_hot(i, 5) @ x,
        lambda b, t, d: [ints(-2, 7, b, d), floats(5, t)],
    ),
}

LINALG: dict[str, JaxCall] = {
    "cholesky": JaxCall(lambda x: jnp.linalg.cholesky(_definite(x)), _matrices),
    "triangular_solve": JaxCall(
        lambda a, b: lax.linalg.triangular_solve(
            _definite(a), b, left_side=True, lower=True, transpose_a=True
        ),
        lambda b, t, d: [floats(b, t, t), floats(b, t, d)],
    ),
    "lu": JaxCall(lambda x: (lax.linalg.lu(_definite(x))[0], jnp.linalg.det(x)), _matrices),
    "qr": JaxCall(lambda x: jnp.abs(jnp.linalg.qr(x)[1]), _matrices),
    "eigh": JaxCall(lambda x: jnp.linalg.eigh(_definite(x))[0], _matrices),
    "eig": JaxCall(
        lambda x: jnp.sort(jnp.abs(jnp.linalg.eigvals(x)), -1), _matrices, has_gradient=False
    ),
    "svd": JaxCall(lambda x: jnp.linalg.svd(x, compute_uv=False), _matrices),
    "solve": JaxCall(
        lambda a, b: jnp.linalg.solve(_definite(a), b),
        lambda b, t, d: [floats(b, t, t), floats(b, t, d)],
    ),
    "inv": JaxCall(lambda x: jnp.linalg.inv(_definite(x)), _matrices),
    "one_matrix": JaxCall(
        lambda x: (
            jnp.linalg.cholesky(_definite(x)),
            jnp.linalg.inv(_definite(x)),
            jnp.linalg.svd(x, compute_uv=False),
        ),
        lambda b, t, d: [floats(d, d)],
    ),
    "tridiagonal_solve": JaxCall(
        lambda a, b: lax.linalg.tridiagonal_solve(a, jnp.abs(a) + 4, a, b),
        lambda b, t, d: [floats(b, t), floats(b, t, d)],
        has_gradient=False,
    ),
    "custom_linear_solve": JaxCall(_solved, lambda b, t, d: [floats(t, t), floats(t)]),
    "expm": JaxCall(jax.scipy.linalg.expm, lambda b, t, d: [floats(t, t)]),
    "fft": JaxCall(
        lambda x: (jnp.fft.fft(x).real, jnp.fft.fft(x, axis=1).imag, jnp.fft.rfft(x).real), _one
    ),
    "ifft": JaxCall(
        lambda x: (jnp.fft.irfft(x + 2j * x), jnp.fft.ifft2(x * 1j).real, jnp.fft.fftn(x).imag),
        _one,
    ),
    "complex": JaxCall(lambda x: jnp.abs(lax.complex(x, x.sum(1, keepdims=True)).cumsum(2)), _one),
}

RANDOM: dict[str, JaxCall] = {
    "normal": JaxCall(
        _with_key(lambda key, x: x * jax.random.normal(key, x.shape, np.float64)), _keyed
    ),
    "uniform_of_other_shape": JaxCall(
        _with_key(lambda key, x: x[:, 0] * jax.random.uniform(key, x.shape[::2])), _keyed
    ),
    "keys": JaxCall(
        _with_key(
            lambda key, x: (
                x
                * jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, x.shape[1:]))(
                    jax.random.split(key, x.shape[0])
                )
            )
        ),
        _keyed,
    ),
    "permutation": JaxCall(
        _with_key(
            lambda key, x: (
                jax.random.permutation(key, x),
                jax.random.permutation(key, x, 1, independent=True),
            )
        ),
        _keyed,
    ),
    "categorical": JaxCall(
        _with_key(lambda key, x: jax.random.categorical(key, x)), _keyed, has_gradient=False
    ),
    "dropout": JaxCall(
        _with_key(lambda key, x: jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)),
        _keyed,
    ),
    "rng_bit_generator": JaxCall(
        lambda x, seed: lax.rng_bit_generator(seed.astype(np.uint32), x.shape)[1] % 7 * x,
        lambda b, t, d: [floats(b, d), ints(0, 1 << 30, 4)],
    ),
}

CONTROL: dict[str, JaxCall] = {
    "scan": JaxCall(lambda x: lax.scan(lambda c, row: (c * 0.5 + row, c * row), x[0], x), _one),
    "scan_reversed": JaxCall(
        lambda x: lax.scan(lambda c, r: (c + r.sum(), r * c), 0.0, x, reverse=True, unroll=2), _one
    ),
    "scan_decoding": JaxCall(_decoded, lambda b, t, d: [floats(b, t, d), floats(3, b, d)]),
    "scan_shapes": JaxCall(
        lambda x: lax.scan(
            lambda c, r: (jnp.roll(c, 1, 1)[::-1], jnp.pad(r, [(1, 0), (0, 2)])), x[0], x
        ),
        _one,
    ),
    "scan_matmul": JaxCall(
        lambda x, w: lax.scan(
            lambda h, v: (jnp.tanh(h @ w + v),) * 2, x[:, 0] * 0, x.swapaxes(0, 1)
        ),
        lambda b, t, d: [floats(b, t, d), floats(d, d)],
    ),
    "while": JaxCall(_while, lambda b, t, d: [floats(b, t, d), given(3)], has_gradient=False),
    "fori": JaxCall(
        lambda x: lax.fori_loop(0, 3, lambda i, y: y.at[:, i * 4].add(y[:, i - 1], mode="clip"), x),
        _one,
    ),
    "cond": JaxCall(
        lambda x, i: (
            lax.cond(i[0] > 1, lambda y: y[::-1], lambda y: y * 2, x),
            lax.cond(i[0] > 3, _put_at, lambda y, at: y.cumsum(1), x, i[1]),
        ),
        _started,
    ),
    "switch": JaxCall(
        lambda x, i: lax.switch(
            i[0], [jnp.sin, lambda y: y.at[99, 0].set(1, mode="clip"), partial(jnp.sort, axis=0)], x
        ),
        _started,
    ),
    "map": JaxCall(lambda x: lax.map(lambda row: row[::-1].cumsum(0), x), _one),
    "map_batches": JaxCall(lambda x: lax.map(lambda row: row @ row.T, x, batch_size=3), _one),
    "as_is": JaxCall(_starting(_put_at), _started),
    "jit": JaxCall(_starting(jax.jit(_put_at)), _started),
    "remat": JaxCall(_starting(jax.checkpoint(_put_at)), _started),
    "remat_in_scan": JaxCall(
        lambda x, i: lax.scan(jax.checkpoint(lambda y, at: (_put_at(y, at), ())), x, i)[0],
        _started,
    ),
    "custom_jvp": JaxCall(_starting(_with_jvp), _started),
    "custom_vjp": JaxCall(_starting(_with_vjp), _started),
    "vmap": JaxCall(lambda x, i: jax.vmap(_put_at, (None, 0))(x, i), _started),
    "vmap_of_scan": JaxCall(
        lambda x, i: jax.vmap(lambda at: lax.scan(lambda y, k: (_put_at(y, at + k), ()), x, i)[0])(
            i[:2]
        ),
        _started,
    ),
    "gradient_inside": JaxCall(
        lambda x, i: jax.grad(lambda y: (_put_at(y, i[1]) ** 2).sum() + y.max())(x), _started
    ),
    "jvp_inside": JaxCall(
        lambda x, i: jax.jvp(lambda y: jnp.sin(_put_at(y, i[1])), (x,), (x[::-1],)), _started
    ),
    "hessian_inside": JaxCall(
        lambda x, w: jax.hessian(lambda v: jnp.sin(x @ v).sum())(w),
        lambda b, t, d: [floats(b, d), floats(d)],
    ),
    "named_gelu": JaxCall(lambda x: (jax.nn.gelu(x), jax.nn.silu(x), jax.nn.relu6(x)), _one),
}

CALLS: Mapping[str, JaxCall] = {
    name: call
    for table in (
        *(SLICES, GATHERS, SCATTERS, RUNNING, SORTS, REDUCTIONS, WINDOWS),
        *(CONVOLUTIONS, PRODUCTS, SHAPES, LINALG, RANDOM, CONTROL),
    )
    for name, call in table.items()
}
