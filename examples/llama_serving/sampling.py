"""Chooses each slot's next token on the device, by options that are tensors: one program for all.

Legend: S slots, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import torch

import spmd_core as spmd

NOT_FINITE = -1  # in place of a token, where the logits had a NaN or an infinity


@dataclass(frozen=True)
class SamplingOptions:
    """How a request's tokens are chosen. The order is transformers': temperature, top-k, top-p.

    Attributes:
        temperature: what logits are divided by; 0 takes the most likely token.
        top_k: how many of the most likely tokens are kept; 0 keeps all.
        top_p: the least likely tokens are dropped while the others have at least this
            probability; 1 keeps all.
        seed: of the request's random numbers, an int64. They depend on the seed and the token's
            position alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def next_tokens(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
) -> torch.Tensor:
    """The next token of each slot: int64 of shape (S,) on device `xla`. Does not wait.

    Args:
        logits_SV: float, of any dtype; computed with in float32.
        temperature_S, top_p_S: float32.
        top_k_S, seed_S, position_S: int64; `position_S` is where the token will stand in its text.

    Returns:
        A token of the vocabulary; `NOT_FINITE` for a slot whose logits are not all finite.
    """
    tokens: torch.Tensor = spmd.call_jax(
        _next_tokens, logits_SV, temperature_S, top_k_S, top_p_S, seed_S, position_S
    )
    return tokens


def _next_tokens(
    logits_SV: jax.Array,
    temperature_S: jax.Array,
    top_k_S: jax.Array,
    top_p_S: jax.Array,
    seed_S: jax.Array,
    position_S: jax.Array,
) -> jax.Array:
    logits_SV = logits_SV.astype(jnp.float32)
    greedy_S = jnp.argmax(logits_SV, axis=-1)

    # A batch that is greedy throughout neither sorts nor draws, in the same program.
    def sampled() -> jax.Array:
        # A temperature of 0 is greedy: the other values of its slot are computed and not used.
        scaled_SV = logits_SV / jnp.where(temperature_S > 0, temperature_S, 1)[:, None]
        kept_SV = kept_logits(scaled_SV, top_k_S, top_p_S)
        noise_SV = _gumbel(seed_S, position_S, logits_SV.shape[-1])
        # The largest of logits with Gumbel noise is a draw from their softmax.
        return jnp.where(temperature_S > 0, jnp.argmax(kept_SV + noise_SV, axis=-1), greedy_S)

    tokens_S = jax.lax.cond(jnp.any(temperature_S > 0), sampled, lambda: greedy_S)
    finite_S = jnp.all(jnp.isfinite(logits_SV), axis=-1)
    return jnp.where(finite_S, tokens_S, NOT_FINITE).astype(jnp.int64)


def kept_logits(logits_SV: jax.Array, top_k_S: jax.Array, top_p_S: jax.Array) -> jax.Array:
    """The logits, with -inf for what top-k and then top-p drop.

    They are `TopKLogitsWarper` and `TopPLogitsWarper` of transformers, with limits for each slot.
    Equal logits are kept or dropped together.
    """
    num = logits_SV.shape[-1]
    ascending_SV = jnp.sort(logits_SV, axis=-1)
    index_S = num - jnp.clip(jnp.where(top_k_S > 0, top_k_S, num), 1, num)
    least_S1 = jnp.take_along_axis(ascending_SV, index_S[:, None], axis=-1)
    kept_SV = jnp.where(ascending_SV >= least_S1, ascending_SV, -jnp.inf)
    up_to_SV = jnp.cumsum(jax.nn.softmax(kept_SV, axis=-1), axis=-1)
    dropped_SV = (up_to_SV <= 1 - top_p_S[:, None]) & (top_p_S[:, None] < 1)
    # The most likely token stays, whatever top-p is.
    first_S = jnp.clip(jnp.sum(dropped_SV, axis=-1), 0, num - 1)
    least_S1 = jnp.maximum(least_S1, jnp.take_along_axis(ascending_SV, first_S[:, None], axis=-1))
    return jnp.where(logits_SV >= least_S1, logits_SV, -jnp.inf)


def _gumbel(seed_S: jax.Array, position_S: jax.Array, num: int) -> jax.Array:
    """Standard Gumbel noise (S, num) in float32, of which a row depends on its own two numbers."""

    def row(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (num,), jnp.float32)

    return jax.vmap(row)(seed_S, position_S)
