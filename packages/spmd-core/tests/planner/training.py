"""Small models that tests plan and train: with marks, AdamW and clipping, and one weight alone."""

import torch
from torch import nn

import spmd_core as spmd

WIDTH, HIDDEN, BATCH = 32, 64, 16


def train(num_devices: int, *, steps: int = 6, after_step=lambda loss: None) -> nn.Module:
    """Trains an MLP, its parameters split over all devices; returns it."""
    spmd.use_spmd()
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).to("xla")
    for p in model.parameters():
        spmd.mark_sharding(p, mesh, ("fsdp",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    spmd.sync()
    for _ in range(steps):
        x = spmd.mark_sharding(torch.randn(BATCH, WIDTH).to("xla"), mesh, ("fsdp",))
        loss = (model(x) - x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
        after_step(loss)
    return model


NUM_PARAMS = 2 * WIDTH * HIDDEN + WIDTH + HIDDEN


def train_one_weight(num_devices: int, *, steps: int = 6, **options: float) -> None:
    """As few operations as a plan's step has: for what does not depend on the model.

    Args:
        num_devices: that split the weight.
        steps: how many.
        options: of SGD. With dampening, its first step is another program than the others.
    """
    spmd.use_spmd()
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    weight = nn.Parameter(torch.ones(num_devices, 4).to("xla"))
    spmd.mark_sharding(weight, mesh, ("fsdp",))
    optimizer = torch.optim.SGD([weight], lr=0.1, **options)
    for _ in range(steps):
        weight.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
