"""A model of equal blocks, and a check that its pipeline computes what eager torch does."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd

VOCABULARY, WIDTH, LENGTH = 32, 16, 5
# The mesh axes of each parameter's dims, without those that a mesh lacks.
SPECS = {
    "up.weight": ("tensor", "fsdp"),
    "up.bias": ("tensor",),
    "down.weight": ("fsdp", "tensor"),
    "table.weight": (("fsdp", "tensor"), None),
}


class Block(nn.Module):
    def __init__(self, dropout=0.0, width=WIDTH):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down, self.drop = nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    """Embedding, blocks, norm, and an output layer tied to the embedding."""

    def __init__(self, num_blocks=4, dropout=0.0, width=WIDTH, vocabulary=VOCABULARY):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(dropout, width) for _ in range(num_blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, ids, labels):
    return F.cross_entropy(model(ids).float().flatten(0, 1), labels.flatten())


def mark(model, mesh):
    """Marks the parameters of a plain model as a recipe does."""
    axes = mesh.shape()
    for name, parameter in model.named_parameters():
        for end, spec in SPECS.items():
            if name.endswith(end):
                each = [(a,) if isinstance(a, str) else a or () for a in spec]
                spmd.mark_sharding(
                    parameter, mesh, tuple(tuple(a for a in by if a in axes) for by in each)
                )


def batch_axes(mesh):
    return tuple(name for name in mesh.axis_names if name in ("data", "fsdp"))


def made(model, mesh, **options):
    """A copy of the model on the device, with its blocks in a pipeline."""
    ours = copy.deepcopy(model).to("xla")
    mark(ours, mesh)
    spmd.pipeline(ours.blocks, mesh, batch_axes=batch_axes(mesh), **options)
    return ours


def to_device(batch, mesh):
    return [spmd.mark_sharding(t.to("xla"), mesh, (batch_axes(mesh),)) for t in batch]


def plain_gradients(model):
    """The gradients of a pipelined model on the CPU, by the plain model's names."""
    pipe, found = model.blocks[0], {}
    for name, parameter in model.named_parameters():
        gradient = None if parameter.grad is None else parameter.grad.cpu()
        if not name.startswith("blocks.0.slots."):
            found[name] = gradient
            continue
        slot, name = name.removeprefix("blocks.0.slots.").split(".", 1)
        for stage in range(pipe.plan.num_stages):
            index = pipe.stacking.block_index(int(slot), stage)
            found[f"blocks.{index}.{name}"] = None if gradient is None else gradient[stage]
    return found


def check(model, batch, mesh, *, tolerance=1e-5, **options):
    """Compares loss and gradients with eager torch's; returns the pipelined model."""
    ours = made(model, mesh, **options)
    right = loss_of(model, *batch)
    right.backward()
    loss = spmd.pipeline_loss(loss_of, ours, *to_device(batch, mesh))
    loss.backward()
    spmd.sync()
    torch.testing.assert_close(loss.detach().cpu(), right.detach(), rtol=0, atol=tolerance)
    gradients = plain_gradients(ours)
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name],
            gradient,
            rtol=0,
            atol=tolerance,
            msg=lambda m, name=name: f"{name}: {m}",
        )
    return ours
