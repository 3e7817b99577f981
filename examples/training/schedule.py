"""What an optimizer does over a run: which weights decay, and the learning rate of each step."""

import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from examples.training.run_config import RunConfig


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices and tables decay; biases and the weights of norms do not.

    The dims are the model's own: a pipeline's parameters have a dim of stages in front.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        num_dims = parameter.ndim - getattr(parameter, "num_stacked_dims", 0)
        (decayed if num_dims >= 2 else others).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def warmup_and_cosine(optimizer: Optimizer, config: RunConfig, *, floor: float = 0.0) -> LambdaLR:
    """A schedule of `lr_factor`, for every group of an optimizer, over the steps of a run."""
    steps, warmup = config.steps, config.warmup
    return LambdaLR(
        optimizer, lambda step: lr_factor(step, steps=steps, warmup=warmup, floor=floor)
    )


def lr_factor(step: int, *, steps: int, warmup: int, floor: float) -> float:
    """The learning rate at a step, counted from 0, as a fraction of the peak.

    It rises linearly over `warmup` steps, then falls along a cosine to `floor`.

    Example:
        >>> [round(lr_factor(step, steps=6, warmup=2, floor=0.1), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.868, 0.55, 0.232]
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
