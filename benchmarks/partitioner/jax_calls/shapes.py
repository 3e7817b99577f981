"""Jax functions that join, pad and rearrange."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.partitioner.jax_calls.call import JaxCall, floats, ints, matrix, one, started

SHAPES: dict[str, JaxCall] = {
    "concatenate": JaxCall(
        lambda a, b: jnp.concatenate([a, b, a * 2], 1),
        lambda b, t, d: [floats(b, d), floats(b, 3)],
    ),
    "concatenate_rows": JaxCall(
        lambda a, b: jnp.concatenate([a, b], 0), lambda b, t, d: [floats(b, d), floats(1, d)]
    ),
    "stack": JaxCall(lambda x: jnp.stack([x, x * 2, -x], 1), matrix),
    "split": JaxCall(lambda x: lax.split(x, (1, x.shape[2] - 1), 2), one),
    "pad": JaxCall(lambda x: lax.pad(x, 2.0, [(1, 0, 0), (0, 3, 0), (2, 1, 0)]), one),
    "pad_negative": JaxCall(lambda x: lax.pad(x, 2.0, [(-1, 1, 0), (1, -2, 0), (-1, -1, 0)]), one),
    "pad_interior": JaxCall(lambda x: lax.pad(x, 2.0, [(0, 0, 1), (1, 0, 2), (-1, 3, 1)]), one),
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
        matrix,
    ),
    "rev": JaxCall(lambda x: lax.rev(x, (0, 2)), one),
    "roll": JaxCall(
        lambda x, i: (jnp.roll(x, 3, 0), jnp.roll(x, i[0], 1), jnp.roll(x, i[2], 2)), started
    ),
    "merge": JaxCall(lambda x: (x.reshape(-1, x.shape[2]), x.reshape(x.shape[0], -1)), one),
    "flatten": JaxCall(lambda x: x.reshape(-1), one),
    "split_dim": JaxCall(
        lambda x: x.reshape(x.shape[0], 2, 3, -1), lambda b, t, d: [floats(b, 6, d)]
    ),
    "reshape_mixed": JaxCall(
        lambda x: x.reshape(-1, 2 * x.shape[2]), lambda b, t, d: [floats(b, 4, d)]
    ),
    "reshape_transposed": JaxCall(
        lambda x: lax.reshape(x, (x.shape[2], x.shape[0] * x.shape[1]), (2, 0, 1)), one
    ),
    "transpose": JaxCall(lambda x: jnp.transpose(x, (2, 0, 1)), one),
    "broadcast": JaxCall(
        lambda x: lax.broadcast_in_dim(x, (3, x.shape[0], 2, x.shape[1]), (1, 3)), matrix
    ),
    "squeeze": JaxCall(
        lambda x: (x[:, None], jnp.squeeze(x[:, :1], 1), jnp.expand_dims(x, (0, 2))), matrix
    ),
    "tile": JaxCall(lambda x: (jnp.tile(x, (2, 3)), jnp.repeat(x, 2, 0)), matrix),
    "iota": JaxCall(
        lambda x: x * lax.broadcasted_iota(np.float64, x.shape, 1) + jnp.arange(x.shape[2]), one
    ),
    "diagonal": JaxCall(
        lambda x: (jnp.diagonal(x, 1, 1, 2), jnp.trace(x, 0, 0, 2), jnp.tril(x)), one
    ),
    "diag": JaxCall(lambda x: jnp.diag(x[:, 0]), matrix),
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
    "barrier": JaxCall(lambda x: lax.optimization_barrier(x.cumsum(1)) * x, one),
    "interp": JaxCall(
        lambda x, y: jnp.interp(x, jnp.sort(y), y), lambda b, t, d: [floats(b, t), floats(d)]
    ),
    "one_hot": JaxCall(
        lambda i, x: jax.nn.one_hot(i, 5) @ x,
        lambda b, t, d: [ints(-2, 7, b, d), floats(5, t)],
    ),
}
