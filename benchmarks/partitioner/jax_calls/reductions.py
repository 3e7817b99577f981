"""Jax functions that sort, and that reduce whole dims, windows and running parts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.partitioner.jax_calls.call import JaxCall, floats, ints, nan, one


def _window(reducer: Any, init: float, shape: Sequence[int], **more: Any) -> Any:
    """A reduction in windows over all dims."""
    strides = more.pop("strides", (1,) * len(shape))
    padding = more.pop("padding", "SAME")
    return lambda x: lax.reduce_window(x, init, reducer, shape, strides, padding, **more)


def _multiplied(a: jax.Array, b: jax.Array) -> jax.Array:
    return a * b + 0 * a  # no monoid that jax knows


RUNNING: dict[str, JaxCall] = {
    **{
        f"{name}_{axis}": JaxCall(partial(getattr(lax, name), axis=axis, reverse=axis == 1), one)
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
        for axis in (0, 1, 2)
    },
    "running_sums_of_all_kinds": JaxCall(
        lambda x: (lax.cumsum(x, 1), lax.cumprod(x, 1), lax.cummax(x, 1), lax.cummin(x, 1)), one
    ),
    "associative_scan": JaxCall(
        lambda x: lax.associative_scan(lambda a, b: a * b + b, x, axis=1), one
    ),
    "cumsum_of_integers": JaxCall(
        lambda i: jnp.cumsum(i, axis=0), lambda b, t, d: [ints(0, 9, d, t)], has_gradient=False
    ),
}


SORTS: dict[str, JaxCall] = {
    "sort": JaxCall(lambda x: lax.sort(x, dimension=1), one),
    "sort_descending": JaxCall(lambda x: jnp.sort(x, axis=0, descending=True), one),
    "argsort": JaxCall(lambda x: jnp.argsort(x, axis=-1), one, has_gradient=False),
    "sort_by_two_keys": JaxCall(
        lambda i, j, x: lax.sort((i, j, x), dimension=1, num_keys=3)[2],
        lambda b, t, d: [ints(0, 3, b, d), ints(0, 2, b, d), floats(b, d)],
    ),
    "sort_stable": JaxCall(
        lambda i, x: lax.sort((i, x), dimension=1, num_keys=1, is_stable=True)[1],
        lambda b, t, d: [ints(0, 3, b, d), floats(b, d)],
    ),
    "top_k": JaxCall(lambda x: lax.top_k(x, 3), one),
    "approx_max_k": JaxCall(lambda x: lax.approx_max_k(x, 3)[0], one),
    "approx_min_k": JaxCall(
        lambda x: lax.approx_min_k(x, 2, reduction_dimension=1)[0], one, has_gradient=False
    ),
    "median": JaxCall(lambda x: jnp.median(x, axis=1), one),
    "quantile": JaxCall(lambda x: jnp.quantile(x, 0.3, axis=-1), one),
    "unique": JaxCall(
        lambda i: jnp.unique(i, size=4), lambda b, t, d: [ints(0, 5, b, t)], has_gradient=False
    ),
    "argmax": JaxCall(
        lambda x: (jnp.argmax(x, 0), jnp.argmin(x, 1), jnp.argmax(x, 2), jnp.argmax(x)),
        nan,
        has_gradient=False,
    ),
    "argmax_of_equals": JaxCall(
        lambda i: (lax.argmax(i, 0, np.int32), lax.argmin(i, 1, np.int64), jnp.argmax(i)),
        lambda b, t, d: [ints(0, 2, b, d)],
        has_gradient=False,
    ),
}


REDUCTIONS: dict[str, JaxCall] = {
    "sum": JaxCall(lambda x: (x.sum(), x.sum(0), x.sum((1, 2)), x.mean(1)), one),
    "prod": JaxCall(lambda x: (x.prod(0), x.prod((1, 2))), one),
    "max": JaxCall(lambda x: (x.max(0), x.max((1, 2)), x.min(1), x.min()), one),
    "max_of_nan": JaxCall(
        lambda x: (x.max(0), x.max((1, 2)), x.min(1), x.min(), jnp.nanmax(x, 1)),
        nan,
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
        lambda x: lax.reduce(x, 1.0, _multiplied, (0, 2)), one, has_gradient=False
    ),
    "logsumexp": JaxCall(lambda x: jax.nn.logsumexp(x, axis=(0, 1)), one),
    "softmax": JaxCall(lambda x: jax.nn.softmax(x, axis=1), one),
    "var": JaxCall(lambda x: (x.var(1), x.std((0, 2))), one),
    "norm": JaxCall(lambda x: jnp.linalg.norm(x, axis=1), one),
    "reduce_precision": JaxCall(lambda x: lax.reduce_precision(x, 8, 7), one, has_gradient=False),
}


WINDOWS: dict[str, JaxCall] = {
    "window_sum": JaxCall(_window(lax.add, 0.0, (1, 2, 3)), one),
    "window_sum_strides": JaxCall(_window(lax.add, 0.0, (1, 2, 3), strides=(1, 2, 2)), one),
    "window_sum_long": JaxCall(_window(lax.add, 0.0, (1, 1, 5)), one),
    "window_sum_batch": JaxCall(
        _window(lax.add, 0.0, (3, 1, 1), padding=[(2, 0), (0, 0), (0, 0)]), one
    ),
    "window_sum_dilated": JaxCall(
        _window(lax.add, 0.0, (1, 1, 2), padding="VALID", window_dilation=(1, 1, 2)), one
    ),
    "window_sum_base_dilated": JaxCall(
        _window(lax.add, 0.0, (1, 1, 2), padding="VALID", base_dilation=(1, 1, 2)), one
    ),
    "window_max": JaxCall(_window(lax.max, -np.inf, (1, 2, 3)), one),
    "window_max_strides": JaxCall(_window(lax.max, -np.inf, (1, 1, 3), strides=(1, 1, 2)), one),
    "window_max_dilated": JaxCall(
        _window(lax.max, -np.inf, (1, 1, 2), padding="VALID", window_dilation=(1, 1, 3)),
        one,
        has_gradient=False,
    ),
    "window_min": JaxCall(_window(lax.min, np.inf, (2, 2, 1)), one),
    "window_other": JaxCall(_window(_multiplied, 1.0, (1, 2, 2)), one, has_gradient=False),
    "window_pairs": JaxCall(
        lambda x: lax.reduce_window(
            (x, -x),
            (0.0, -np.inf),
            lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])),
            (1, 2, 2),
            (1, 1, 1),
            "SAME",
        ),
        one,
        has_gradient=False,
    ),
    "windows_of_all_kinds": JaxCall(
        lambda x: (
            _window(lax.add, 0.0, (1, 1, 3))(x),
            _window(lax.max, -np.inf, (1, 1, 3))(x),
            _window(lax.min, np.inf, (1, 1, 3))(x),
        ),
        one,
    ),
}
