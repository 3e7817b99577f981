"""Connectionist temporal classification: the loss of log-probabilities and targets; its gradient.

Graves et al., 2006, "Connectionist Temporal Classification", section 4. The log-probabilities are
(time, batch, class), the losses (batch,). The target is extended by a blank before, between and
after its labels, which gives the states s. alpha(t, s) is the log-probability of all paths that
emit the first t frames and end in state s; beta(t, s) is that of the remaining frames. Both are
scans over time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from spmd_core.ops.kernels import loops
from spmd_core.ops.kernels.precision import opmath
from spmd_core.ops.registry import Context, lowering

_INT64 = np.dtype(np.int64)


def _width(log_probs: torch.Tensor, targets: torch.Tensor) -> int:
    """An upper bound of the target lengths that depends on shapes only.

    A target with more labels than there are frames has no path anyway.
    """
    return min(targets.shape[-1], log_probs.shape[0])


def _meta(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    if not log_probs.is_floating_point():
        raise NotImplementedError(
            f"ctc_loss takes log-probabilities of a floating-point dtype; got {log_probs.dtype}. "
            "Give the result of log_softmax."
        )
    frames, batch, _ = log_probs.shape
    counts = [
        x.numel() if isinstance(x, torch.Tensor) else len(x)
        for x in (input_lengths, target_lengths)
    ]
    if counts != [batch, batch]:
        raise RuntimeError(
            "ctc_loss takes one input length and one target length for each of the batch's "
            f"sequences; got {counts[0]} and {counts[1]} for {batch}. "
            "Give lists or tensors with one length a sequence."
        )
    return log_probs.new_empty(batch), log_probs.new_empty(
        batch, frames, 2 * _width(log_probs, targets) + 1
    )


class _Problem(NamedTuple):
    labels: jax.Array  # (batch, states): the extended target
    may_skip: jax.Array  # (batch, states): whether a path may come from two states before
    emitted: jax.Array  # (time, batch, states): the log-probability of each state's label
    input_lengths: jax.Array
    target_lengths: jax.Array


def _problem(
    log_probs: jax.Array, targets: jax.Array, input_lengths: Any, target_lengths: Any, blank: int
) -> _Problem:
    frames, batch, classes = log_probs.shape
    inputs, lengths = (
        jnp.asarray(x).astype(_INT64).reshape(-1) for x in (input_lengths, target_lengths)
    )
    width = min(targets.shape[-1], frames)
    if targets.ndim == 1:
        at = (jnp.cumsum(lengths) - lengths)[:, None] + jnp.arange(width)
        targets = (
            jnp.take(targets, at, mode="clip")
            if targets.shape[0]
            else jnp.zeros((batch, 0), targets.dtype)
        )
    targets = jnp.clip(targets[:, :width].astype(_INT64), 0, classes - 1)
    labels = jnp.full((batch, 2 * width + 1), blank, _INT64).at[:, 1::2].set(targets)
    before = jnp.pad(labels, ((0, 0), (2, 0)), constant_values=blank)[:, :-2]
    emitted = jnp.take_along_axis(
        log_probs, jnp.broadcast_to(labels, (frames, *labels.shape)), axis=2
    )
    return _Problem(labels, (labels != blank) & (labels != before), emitted, inputs, lengths)


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """The states moved up by `by` (down if negative); log-probability -inf fills the gaps."""
    fill = jnp.full((x.shape[0], abs(by)), -jnp.inf, x.dtype)
    both = jnp.concatenate([fill, x] if by > 0 else [x, fill], axis=1)
    return both[:, : x.shape[1]] if by > 0 else both[:, abs(by) :]


def _log_sum(*terms: jax.Array) -> jax.Array:
    largest = terms[0]
    for term in terms[1:]:
        largest = jnp.maximum(largest, term)
    safe = jnp.where(jnp.isneginf(largest), jnp.zeros_like(largest), largest)
    total = jnp.exp(terms[0] - safe)
    for term in terms[1:]:
        total += jnp.exp(term - safe)
    return jnp.log(total) + safe


def _alphas(p: _Problem) -> jax.Array:
    """(time, batch, states)."""
    impossible = jnp.full(p.labels.shape, -jnp.inf, p.emitted.dtype)

    def step(alpha: jax.Array, emitted: jax.Array) -> tuple[jax.Array, jax.Array]:
        alpha = (
            _log_sum(
                alpha, _shifted(alpha, 1), jnp.where(p.may_skip, _shifted(alpha, 2), impossible)
            )
            + emitted
        )
        return alpha, alpha

    state = jnp.arange(p.labels.shape[1])
    first = jnp.where(
        (state == 0) | ((state == 1) & (p.target_lengths[:, None] > 0)), p.emitted[0], impossible
    )
    _, rest = loops.scan(step, first, p.emitted[1:])
    return jnp.concatenate([first[None], rest])


def _betas(p: _Problem) -> jax.Array:
    """(time, batch, states); the scan runs backward, and each sequence starts at its last frame."""
    impossible = jnp.full(p.labels.shape, -jnp.inf, p.emitted.dtype)
    last_states = jnp.arange(p.labels.shape[1]) - 2 * p.target_lengths[:, None]
    may_end = (last_states == 0) | (last_states == -1)
    may_be_skipped = jnp.pad(p.may_skip, ((0, 0), (0, 2)))[:, 2:]

    def step(beta: jax.Array, frame: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        t, emitted = frame
        beta = (
            _log_sum(
                beta, _shifted(beta, -1), jnp.where(may_be_skipped, _shifted(beta, -2), impossible)
            )
            + emitted
        )
        beta = jnp.where(
            (t == p.input_lengths - 1)[:, None], jnp.where(may_end, emitted, impossible), beta
        )
        return beta, beta

    _, betas = loops.scan(
        step, impossible, (jnp.arange(p.emitted.shape[0]), p.emitted), reverse=True
    )
    return betas


def _losses(p: _Problem, alphas: jax.Array) -> jax.Array:
    """Minus the log-probability of each sequence's paths.

    It is read at the sequence's last frame, from the two states in which a path may end.
    """
    last_frame = jnp.clip(p.input_lengths - 1, 0)
    final = jnp.take_along_axis(alphas, last_frame[None, :, None], axis=0, mode="clip")[0]

    def at(state: jax.Array) -> jax.Array:
        exists = (state >= 0) & (state < final.shape[1])
        value = jnp.take_along_axis(final, state[:, None], axis=1, mode="clip")[:, 0]
        return jnp.where(exists, value, -jnp.inf)

    losses = -_log_sum(at(2 * p.target_lengths), at(2 * p.target_lengths - 1))
    without_frames = jnp.where(
        p.target_lengths == 0, jnp.zeros_like(losses), jnp.full_like(losses, jnp.inf)
    )
    return jnp.where(p.input_lengths == 0, without_frames, losses)


@lowering("aten._ctc_loss.default", "aten._ctc_loss.Tensor", meta=_meta)
def _ctc_loss(
    ctx: Context,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[jax.Array, jax.Array]:
    p = _problem(
        log_probs.astype(opmath(log_probs.dtype)), targets, input_lengths, target_lengths, blank
    )
    alphas = _alphas(p)
    return _losses(p, alphas).astype(ctx.dtype), jnp.swapaxes(alphas, 0, 1).astype(ctx.dtype)


def _backward_meta(
    grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


@lowering("aten._ctc_loss_backward.default", "aten._ctc_loss_backward.Tensor", meta=_backward_meta)
def _ctc_loss_backward(
    ctx: Context,
    grad: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    losses: Any,
    log_alpha: Any,
    blank: int,
    zero_infinity: bool = False,
) -> jax.Array:
    """Graves's equation 15: a class's probability less the share of the paths through it.

    Like torch's gradient, it is only right for log-probabilities from a log_softmax.
    """
    wide = opmath(log_probs.dtype)
    log_probs, losses = log_probs.astype(wide), losses.astype(wide)
    p = _problem(log_probs, targets, input_lengths, target_lengths, blank)
    paths = jnp.swapaxes(log_alpha.astype(wide), 0, 1) + _betas(p)
    impossible = jnp.isneginf(paths)
    occupied = jnp.exp(
        jnp.where(impossible, jnp.zeros_like(paths), paths - p.emitted + losses[:, None])
    )
    occupied = jnp.where(impossible, jnp.zeros_like(paths), occupied)

    def by_class(labels: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.zeros((log_probs.shape[2], values.shape[0]), wide).at[labels].add(values.T).T

    # A sequence with an infinite loss has no path; in torch the gradient is a difference of
    # infinities, and so NaN.
    shares = (
        jax.vmap(by_class, in_axes=(0, 1), out_axes=1)(p.labels, occupied)
        + jnp.where(jnp.isinf(losses), jnp.nan, 0)[None, :, None]
    )
    result = (jnp.exp(log_probs) - shares) * grad.astype(wide)[None, :, None]
    inside = jnp.arange(log_probs.shape[0])[:, None] < p.input_lengths
    if zero_infinity:
        inside &= ~jnp.isinf(losses)
    return jnp.where(inside[:, :, None], result, jnp.zeros((), wide)).astype(ctx.dtype)
