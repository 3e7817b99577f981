"""A small run: a model with a tied weight and an optimizer, on any mesh or on the CPU."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import spmd_core as spmd


class Tied(nn.Module):
    """Seven words; sizes that no mesh divides, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


@dataclass
class Run:
    """A run.

    Attributes:
        model, optimizer, scheduler: its objects.
        device: where they are.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    device: str

    def state(self, **more: Any) -> dict[str, Any]:
        """What is saved."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return parts | more

    def train(self, steps: int) -> list[float]:
        """The losses of so many steps, each of random words."""
        losses = []
        for _ in range(steps):
            words = torch.randint(7, (8,)).to(self.device)
            loss = nn.functional.cross_entropy(self.model(words), words)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                self.model.count += 1
            losses.append(loss.detach())
            spmd.sync()
        return [loss.item() for loss in losses]

    def values(self) -> dict[str, torch.Tensor]:
        """All tensors by name, on the CPU."""
        found = {name: t.cpu() for name, t in self.model.state_dict().items()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for p, state in self.optimizer.state.items():
            for slot, value in state.items():
                found[f"{names[id(p)]}.{slot}"] = torch.as_tensor(value).cpu()
        return {name: t.detach().clone() for name, t in found.items()}


def make(mesh: spmd.Mesh | None, *specs: Any, device: str = "xla", seed: int = 0) -> Run:
    """A run whose weights are marked: those of the embedding, and of the first and last layer."""
    torch.manual_seed(seed)
    model = Tied().to(device)
    for weight, spec in zip(
        (model.embed.weight, model.body[0].weight, model.body[2].weight), specs
    ):
        spmd.mark_sharding(weight, mesh, spec)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return Run(model, optimizer, scheduler, device)


def same(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Asserts that all tensors are equal to the last bit."""
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
