"""Jax functions of random bits, loops, calls and transformations."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.partitioner.jax_calls.call import JaxCall, Make, floats, given, ints, one, started


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
    "scan": JaxCall(lambda x: lax.scan(lambda c, row: (c * 0.5 + row, c * row), x[0], x), one),
    "scan_reversed": JaxCall(
        lambda x: lax.scan(lambda c, r: (c + r.sum(), r * c), 0.0, x, reverse=True, unroll=2), one
    ),
    "scan_decoding": JaxCall(_decoded, lambda b, t, d: [floats(b, t, d), floats(3, b, d)]),
    "scan_shapes": JaxCall(
        lambda x: lax.scan(
            lambda c, r: (jnp.roll(c, 1, 1)[::-1], jnp.pad(r, [(1, 0), (0, 2)])), x[0], x
        ),
        one,
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
        one,
    ),
    "cond": JaxCall(
        lambda x, i: (
            lax.cond(i[0] > 1, lambda y: y[::-1], lambda y: y * 2, x),
            lax.cond(i[0] > 3, _put_at, lambda y, at: y.cumsum(1), x, i[1]),
        ),
        started,
    ),
    "switch": JaxCall(
        lambda x, i: lax.switch(
            i[0], [jnp.sin, lambda y: y.at[99, 0].set(1, mode="clip"), partial(jnp.sort, axis=0)], x
        ),
        started,
    ),
    "map": JaxCall(lambda x: lax.map(lambda row: row[::-1].cumsum(0), x), one),
    "map_batches": JaxCall(lambda x: lax.map(lambda row: row @ row.T, x, batch_size=3), one),
    "as_is": JaxCall(_starting(_put_at), started),
    "jit": JaxCall(_starting(jax.jit(_put_at)), started),
    "remat": JaxCall(_starting(jax.checkpoint(_put_at)), started),
    "remat_in_scan": JaxCall(
        lambda x, i: lax.scan(jax.checkpoint(lambda y, at: (_put_at(y, at), ())), x, i)[0],
        started,
    ),
    "custom_jvp": JaxCall(_starting(_with_jvp), started),
    "custom_vjp": JaxCall(_starting(_with_vjp), started),
    "vmap": JaxCall(lambda x, i: jax.vmap(_put_at, (None, 0))(x, i), started),
    "vmap_of_scan": JaxCall(
        lambda x, i: jax.vmap(lambda at: lax.scan(lambda y, k: (_put_at(y, at + k), ()), x, i)[0])(
            i[:2]
        ),
        started,
    ),
    "gradient_inside": JaxCall(
        lambda x, i: jax.grad(lambda y: (_put_at(y, i[1]) ** 2).sum() + y.max())(x), started
    ),
    "jvp_inside": JaxCall(
        lambda x, i: jax.jvp(lambda y: jnp.sin(_put_at(y, i[1])), (x,), (x[::-1],)), started
    ),
    "hessian_inside": JaxCall(
        lambda x, w: jax.hessian(lambda v: jnp.sin(x @ v).sum())(w),
        lambda b, t, d: [floats(b, d), floats(d)],
    ),
    "named_gelu": JaxCall(lambda x: (jax.nn.gelu(x), jax.nn.silu(x), jax.nn.relu6(x)), one),
}
