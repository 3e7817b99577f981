"""An exponential moving average of a model's weights, for evaluation."""

import copy

import torch
from torch import nn


class MovingAverage(nn.Module):
    """A copy of a model whose weights follow the model's slowly.

    torch's own `AveragedModel` reads a tensor on the host in every step, to see whether it is the
    first; on a lazy device that would split each step into two programs. This one counts its
    updates on the device, so that a captured step can have it.

    Args:
        model: on its device, with its shardings, which the copy has too.
        decay: how much of the average stays in an update. In the first ones it is less, so that
            random weights are soon forgotten: (1 + n) / (10 + n) after n of them.

    Attributes:
        model: the average, in evaluation mode; it takes no gradients.
    """

    num_updates: torch.Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay
        device = next(model.parameters()).device
        self.register_buffer("num_updates", torch.zeros((), device=device))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Moves the average towards the weights and running statistics of what is trained."""
        # Of the model, in an update: not 1 - (1 + n) / (10 + n), which would cancel in float32.
        share = (9 / (10 + self.num_updates)).clamp(min=1 - self._decay)
        self.num_updates += 1
        averages = [*self.model.parameters(), *self.model.buffers()]
        values = [*model.parameters(), *model.buffers()]
        moving = [(a, v) for a, v in zip(averages, values) if a.is_floating_point()]
        torch._foreach_lerp_([a for a, _ in moving], [v for _, v in moving], [share] * len(moving))
