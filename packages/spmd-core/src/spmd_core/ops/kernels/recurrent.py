"""One layer and direction of an LSTM, a GRU or a plain RNN over time, as one scan in plain jax.

Legend: T time, B batch, H hidden size, P size of the output (H, or that of LSTM's projection), G
the gates' sizes together (4·H for an LSTM, 3·H for a GRU, H for an RNN). The formulas are those of
torch.nn.LSTM, GRU and RNN.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from spmd_core.ops.kernels.precision import matmul_precision

State = tuple[jax.Array, ...]  # h (B, P), and for an LSTM c (B, H)


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    product = jnp.matmul(x, weight.T, precision=matmul_precision(x.dtype))
    return product if bias is None else product + bias


def _lstm_step(
    state: State,
    gates: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    projection: jax.Array | None,
) -> State:
    h, c = state
    i, f, g, o = jnp.split(gates + _linear(h, weight, bias), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h if projection is None else _linear(h, projection, None)), c


def _gru_step(
    state: State,
    gates: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    projection: jax.Array | None,
) -> State:
    (h,) = state
    r, z, n = jnp.split(gates, 3, axis=-1)
    hr, hz, hn = jnp.split(_linear(h, weight, bias), 3, axis=-1)
    n = jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn)
    return (n + jax.nn.sigmoid(z + hz) * (h - n),)


def _rnn_step(
    state: State,
    gates: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    projection: jax.Array | None,
    *,
    function: Callable[[jax.Array], jax.Array],
) -> State:
    (h,) = state
    return (function(gates + _linear(h, weight, bias)),)


STEPS: dict[str, Callable[..., State]] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": partial(_rnn_step, function=jnp.tanh),
    "rnn_relu": partial(_rnn_step, function=jax.nn.relu),
}


def recurrent_layer(
    gates: jax.Array,
    state: State,
    weight: jax.Array,
    bias: jax.Array | None,
    projection: jax.Array | None,
    lengths: jax.Array | None,
    *,
    kind: str,
    reverse: bool,
) -> tuple[jax.Array, State]:
    """The outputs (T, B, P) and the last state of one layer in one direction.

    Args:
        gates: (T, B, G), the part of the gates that depends on the layer's input, with its bias.
        state: the first one.
        weight: (G, P), of the hidden state.
        bias: (G,), of the hidden state.
        projection: (P, H), of an LSTM.
        lengths: (B,), integers: a sequence's state stays from this time on. None: all have T.
        kind: a key of `STEPS`.
        reverse: whether time runs backwards.
    """
    step = STEPS[kind]

    def body(state: State, now: tuple[jax.Array, jax.Array]) -> tuple[State, jax.Array]:
        gates, time = now
        new = step(state, gates, weight, bias, projection)
        if lengths is not None:
            runs = (time < lengths)[:, None]
            new = tuple(jnp.where(runs, after, before) for after, before in zip(new, state))
        return new, new[0]

    # jax.vjp goes through the loop, so it is a scan of jax.
    last, outputs = lax.scan(body, state, (gates, jnp.arange(len(gates))), reverse=reverse)
    return outputs, last
