"""A job: a model on the CPU, its batch and how both are sharded, which each system trains."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Spec = tuple[str | None, ...]


@dataclass(frozen=True)
class Job:
    """What one step trains, and how.

    Attributes:
        axes: the mesh: the size of each axis by name, the outermost first.
        model: on the CPU, from a fixed seed, in training mode.
        batch: its tensors, on the CPU.
        batch_specs: for each of them, the axis that splits each dim.
        spec: the axis that splits each dim of a parameter or buffer of this name and value.
        loss: of the model and the batch, a float32 scalar.
        optimizer: of the parameters.
    """

    axes: dict[str, int]
    model: nn.Module
    batch: tuple[torch.Tensor, ...]
    batch_specs: tuple[Spec, ...]
    spec: Callable[[str, torch.Tensor], Spec]
    loss: Callable[..., torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
