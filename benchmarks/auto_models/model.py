"""What a model of the list is: sizes, a builder of its train step, and manual shardings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

import spmd_core as spmd

Step: TypeAlias = Callable[..., Tensor]
Built: TypeAlias = tuple[nn.Module, torch.optim.Optimizer, Step, tuple[Tensor, ...]]
Manual: TypeAlias = Callable[[nn.Module, tuple[Tensor, ...], spmd.Mesh], None]


@dataclass(frozen=True)
class Model:
    """A model that automatic sharding is measured against.

    Attributes:
        name: its name in the registry.
        sizes: what `build` takes, from the smallest to the largest.
        build: `build(size, device)` gives the model, its optimizer, its step and example inputs.
        manual: the shardings by hand, by strategy, a key of `manual.AXES`.
    """

    name: str
    sizes: tuple[str, ...]
    build: Callable[[str, str | torch.device], Built]
    manual: Mapping[str, Manual]


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[..., Tensor],
    *,
    is_bf16: bool,
) -> Step:
    """`step(*inputs)`: forward, backward, an update of the weights; the loss, a scalar.

    Args:
        model: the model.
        optimizer: of its parameters.
        loss_of: `loss_of(model, *inputs)`, the mean loss of a batch.
        is_bf16: whether matrix products and convolutions compute in bfloat16.
    """
    device_type = next(model.parameters()).device.type

    def step(*inputs: Tensor) -> Tensor:
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=is_bf16):
            loss = loss_of(model, *inputs)
        loss.backward()
        optimizer.step()
        # Here and not before the backward: gradients that outlive their step would take memory.
        optimizer.zero_grad()
        return loss.detach()

    return step


def adamw(model: nn.Module, *, lr: float) -> torch.optim.Optimizer:
    """AdamW as the recipes use it."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)


def tokens(vocab_size: int, shape: tuple[int, ...], device: str | torch.device) -> Tensor:
    """Random token ids, int64, drawn on the device."""
    return torch.randint(vocab_size, shape, device=device)
