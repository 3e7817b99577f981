"""Jax functions that slice, gather and scatter."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.partitioner.jax_calls.call import (
    STARTS,
    JaxCall,
    Make,
    floats,
    given,
    ints,
    matrix,
    one,
    order,
    started,
)


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
        STARTS,
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


SLICES: dict[str, JaxCall] = {
    "slice": JaxCall(lambda x: lax.slice(x, (1, 0, 2), (4, 4, 7), (2, 3, 1)), one),
    "slice_one": JaxCall(lambda x: (x[:1], x[:, 3:4], x[..., 4::9], x[:, -1:]), one),
    "dynamic_slice_one": JaxCall(_slices(lambda x: (x.shape[0], 1, x.shape[2]), [1]), started),
    "dynamic_slice_row": JaxCall(_slices(lambda x: (1, *x.shape[1:]), [0]), started),
    "dynamic_slice_element": JaxCall(_slices(lambda x: (1, 1, 1), [0, 1, 2]), started),
    "dynamic_slice_block": JaxCall(_slices(lambda x: (2, 3, x.shape[2]), [0, 1]), started),
    "dynamic_slice_mixed": JaxCall(_slices(lambda x: (1, 2, 3), [0, 1, 2]), started),
    "dynamic_slice_whole": JaxCall(_slices(lambda x: x.shape, [0, 1, 2]), started),
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
        started,
    ),
    "dynamic_update_index": JaxCall(
        lambda x, i: tuple(lax.dynamic_update_index_in_dim(x, x[:, 1], i[k], 1) for k in range(4)),
        started,
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
    "one_row": JaxCall(lambda x, i: tuple(x[i[k]] for k in range(4)), started),
    "one_row_clip": JaxCall(
        lambda x, i: tuple(x.at[:, i[k]].get(mode="clip") for k in range(4)), started
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
    "set_one_row": JaxCall(lambda x, i: tuple(x.at[i[k]].set(x[1] * 2) for k in range(4)), started),
    "set_one_row_clip": JaxCall(
        lambda x, i: tuple(x.at[:, i[k]].set(x[:, 1] * 2, mode="clip") for k in range(4)),
        started,
    ),
    "add_one_element_clip": JaxCall(
        lambda x, i: tuple(x.at[i[k], i[k], 1].add(2.5, mode="clip") for k in range(4)), started
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
        lambda x: jnp.histogram(x, bins=5, range=(-1, 1))[0], matrix, has_gradient=False
    ),
    "nonzero": JaxCall(lambda x: jnp.stack(jnp.nonzero(x > 0, size=9)), matrix, has_gradient=False),
}
