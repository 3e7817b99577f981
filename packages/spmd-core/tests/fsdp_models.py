"""Models to shard, and a check that a sharded model trains as in eager torch."""

import copy

import torch
from torch import nn
from torch.nn import functional

import spmd_core as spmd
from spmd_core import metrics
from spmd_core.modules.fully_shard import fully_shard

D = 32


class Block(nn.Module):
    def __init__(self, d=D):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tied(nn.Module):
    """An embedding, blocks, and an output layer that shares the embedding's weight."""

    def __init__(self, vocabulary=40, blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, D)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(D, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mixed(nn.Module):
    """Several kinds of layers, uneven sizes, an updated buffer, and parameters without a layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.pool = (
            nn.Conv2d(3, 10, 3, padding=1),
            nn.BatchNorm2d(10),
            nn.AdaptiveAvgPool2d(2),
        )
        self.recurrent = nn.LSTM(10, 6, batch_first=True)
        self.scale, self.matrix = (
            nn.Parameter(torch.tensor(1.5)),
            nn.Parameter(torch.randn(6, 7) / 3),
        )
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x):
        x = self.pool(torch.relu(self.norm(self.conv(x)))).flatten(2).transpose(1, 2)
        x, _ = self.recurrent(x)
        return (x * self.scale) @ self.matrix + self.frozen


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(D, D), make

    def forward(self, x):
        return self.make(self.linear(x))


def squares(output, _):
    return output.square().mean()


def cross_entropy(output, ids):
    return functional.cross_entropy(output.flatten(0, -2), ids.flatten().roll(-1))


def train(model, x, loss_of, steps=3):
    """The losses and the first gradients of a few steps of AdamW.

    Asserts that nothing is compiled after the first step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients, compiles = [], [], []
    for _ in range(steps):
        loss = loss_of(model(x), x)
        loss.backward()
        gradients.append(
            {
                name.replace("module.", ""): p.grad
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        spmd.sync()
        compiles.append(metrics.counter("compiles"))
    assert compiles == compiles[:1] * steps, compiles
    return losses, gradients[0]


def check(
    model, x, mesh, shard, *, loss_of=squares, batch=("fsdp",), rtol=1e-4, exact_gradients=True
):
    """Asserts that a sharded copy of `model` trains as in eager torch; returns the copy.

    Also asserts that each gradient has the sharding of its parameter.
    """
    ours = shard(copy.deepcopy(model))
    right, right_gradients = train(model, x, loss_of)
    on_device = spmd.mark_sharding(x.to("xla"), mesh, (batch,))
    got, gradients = train(ours, on_device, loss_of)
    torch.testing.assert_close([loss.cpu() for loss in got], right, rtol=rtol, atol=1e-6)
    assert gradients.keys() == right_gradients.keys()
    for name, p in ours.named_parameters():
        if p.grad is not None:
            assert p.grad.sharding == p.sharding, name
    if exact_gradients:
        largest = max(float(g.abs().max()) for g in right_gradients.values())
        for name, g in right_gradients.items():
            torch.testing.assert_close(
                gradients[name].cpu(),
                g,
                rtol=1e-3,
                atol=1e-4 * largest,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    return ours


def in_blocks(mesh, **options):
    """A function that shards each `Block` and then the whole model."""

    def shard(model):
        for module in model.modules():
            if isinstance(module, Block):
                fully_shard(module, mesh, **options)
        return fully_shard(model, mesh, **options)

    return shard
