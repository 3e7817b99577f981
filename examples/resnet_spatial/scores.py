"""Scores a model on batches of images: mean loss, and shares of right guesses."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from examples.training.evaluation import evaluating, on_host


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    autocast: torch.autocast,
    *,
    prefix: str = "",
) -> dict[str, float]:
    """Mean loss, and the shares of images whose label is the first, or among the first 5, guesses.

    With the running statistics. Waits for the device.

    Args:
        model: gives logits of shape (N, classes).
        batches: images (N, C, H, W) and labels (N,).
        autocast: the precision of products and convolutions.
        prefix: of the figures' names.
    """
    sums = []
    with evaluating(model):
        for images_NCHW, labels_N in batches:
            with autocast:
                logits = model(images_NCHW).float()
            guesses = logits.topk(min(5, logits.shape[1])).indices
            hits = guesses == labels_N[:, None]
            loss = F.cross_entropy(logits, labels_N)
            sums.append(torch.stack([loss, hits[:, 0].float().mean(), hits.float().sum(1).mean()]))
    loss, top1, top5 = on_host(torch.stack(sums).mean(0))
    return {f"{prefix}loss": loss, f"{prefix}top1": top1, f"{prefix}top5": top5}
