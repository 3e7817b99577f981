"""An exponential moving average of a model's weights, for evaluation."""

import copy

import torch
from torch import nn


class MovingAverage:
    """A copy of a model whose weights follow the model's slowly.

    torch's own `AveragedModel` reads a tensor on the host in every step, to see whether it is the
    first; on a lazy device that would split each step into two programs.

    Args:
        model: on its device, with its shardings, which the copy has too.
        decay: how much of the average stays in a step. In the first steps it is less, so that
            random weights are soon forgotten: (1 + step) / (10 + step).

    Attributes:
        model: the average, in evaluation mode; it takes no gradients.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Moves the average towards the model's weights and running statistics.

        Args:
            model: the model that is trained.
            step: the number of updates done before.
        """
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        averages = [*self.model.parameters(), *self.model.buffers()]
        values = [*model.parameters(), *model.buffers()]
        moving = [(a, v) for a, v in zip(averages, values) if a.is_floating_point()]
        torch._foreach_lerp_([a for a, _ in moving], [v for _, v in moving], share)
