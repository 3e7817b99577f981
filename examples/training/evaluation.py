"""Evaluates a model on batches that it is not trained on, also in a plan, which has no values."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import spmd_core as spmd


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode, and nothing is kept for gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def mean_loss(
    model: nn.Module,
    batches: Iterable[Sequence[torch.Tensor]],
    loss_of: Callable[..., torch.Tensor],
    autocast: torch.autocast,
) -> float:
    """The mean of `loss_of(model, *batch)` over batches of one part each. Waits for the device.

    Args:
        model: the model.
        batches: tensors of shape (1, ...), as (A, B, T) with A parts of a batch.
        loss_of: returns a scalar.
        autocast: the precision of the products.
    """
    losses = []
    with evaluating(model):
        for batch in batches:
            with autocast:
                losses.append(loss_of(model, *(part[0] for part in batch)))
    return float(sum(map(on_host, losses)) / len(losses))


def perplexity(loss: float) -> float:
    """`exp(loss)`, or infinity where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def on_host(tensor: torch.Tensor) -> Any:
    """A float for a scalar, a list for a vector. Waits for the device.

    A plan computes no values. There the step ends, as a read would end it, and each value is NaN.
    """
    if spmd.debugging.is_planning():
        spmd.sync()
        return torch.full(tensor.shape, math.nan).tolist()
    return tensor.tolist()
