"""Every way to distribute a small transformer gives the losses and parameters of eager torch.

Four steps of AdamW on four batches, with one seed. A way marks the model from outside, or replaces
its feed-forward or its step by a manual region. The numbers must not depend on the number of
devices. A mesh that is smaller than the number of devices is over the first of them.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from tiers import exhaustive
from torch import nn
from torch.nn import functional

import spmd_core as spmd
from spmd_core import metrics

VOCABULARY, WIDTH, HEADS, BATCH, SEQUENCE, STEPS = 48, 32, 8, 8, 16, 4
Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without biases: the bias of the keys has no effect on the loss, and AdamW would turn the
        # rounding errors in its gradient into steps.
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return self.out(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2, self.feed_forward = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
            FeedForward(),
        )

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Transformer(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.position = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(SEQUENCE, WIDTH),
        )
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def backward(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, ids, targets)
    loss.backward()
    return loss


@dataclass
class Run:
    losses: list[torch.Tensor] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    compiles: list[int] = field(default_factory=list)


def train(model: nn.Module, batches: list[Batch], step: Step = backward) -> Run:
    run = Run()
    # Adam divides a gradient by its own size. With the usual eps of 1e-8, a rounding error in a
    # gradient near 0 becomes a step of the full learning rate.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for ids, targets in batches:
        loss = step(model, ids, targets)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.detach())
        spmd.sync()
        run.compiles.append(metrics.counter("compiles"))
    run.losses = [loss.cpu() for loss in run.losses]
    run.parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return run


@cache
def start(tied: bool) -> tuple[nn.Module, list[Batch], Run]:
    """The model before training, the batches, and the run of eager torch on the CPU."""
    torch.manual_seed(7)
    model = Transformer(tied)
    tokens = [torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1)) for _ in range(STEPS)]
    batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
    return model, batches, train(copy.deepcopy(model), batches)


def mesh_of(size: int, *names: str) -> spmd.Mesh:
    """The first `size` devices on one axis, or on two axes of which the second has size 2."""
    shape = (size,) if len(names) == 1 else (size // 2, 2) if size % 2 == 0 else (size, 1)
    return spmd.Mesh(range(size), shape, names)


# The ways. Each takes the model on the device and a number of devices, and returns the mesh, the
# batch's spec and the step.

Parallelism = tuple[spmd.Mesh, Any, Step]


def data(model: nn.Module, size: int) -> Parallelism:
    mesh = mesh_of(size, "data")
    for p in model.parameters():
        spmd.mark_sharding(p, mesh, ())
    return mesh, ("data",), backward


def fsdp_by_marks(model: nn.Module, size: int) -> Parallelism:
    mesh = mesh_of(size, "fsdp")
    for p in model.parameters():
        spmd.mark_sharding(p, mesh, ("fsdp",))
    return mesh, ("fsdp",), backward


def fsdp_in_units(model: nn.Module, size: int) -> Parallelism:
    mesh = mesh_of(size, "fsdp")
    for block in model.blocks:
        spmd.fully_shard(block, mesh)
    spmd.fully_shard(model, mesh)
    return mesh, ("fsdp",), backward


# Megatron-LM, sections 3 and 4 (arXiv 1909.08053): columns, then rows, and a split vocabulary.
COLUMNS = (
    "query.weight",
    "key.weight",
    "value.weight",
    "up.weight",
    "up.bias",
    "embedding.weight",
    "head.weight",
)
ROWS = ("out.weight", "down.weight")


def mark_tensor(model: nn.Module, mesh: spmd.Mesh, other: str | None) -> None:
    """Splits columns and rows over axis "tensor", and the other dim over axis `other`."""
    for name, p in model.named_parameters():
        if name.endswith(COLUMNS):
            spmd.mark_sharding(p, mesh, ("tensor", other)[: p.dim()])
        elif name.endswith(ROWS):
            spmd.mark_sharding(p, mesh, (other, "tensor"))
        else:
            spmd.mark_sharding(p, mesh, (other,))


def tensor(model: nn.Module, size: int) -> Parallelism:
    mesh = mesh_of(size, "tensor")
    mark_tensor(model, mesh, None)
    return mesh, (), backward


def fsdp_and_tensor(model: nn.Module, size: int) -> Parallelism:
    mesh = mesh_of(size, "fsdp", "tensor")
    mark_tensor(model, mesh, "fsdp")
    return mesh, ("fsdp",), backward


def hybrid(model: nn.Module, size: int) -> Parallelism:
    if size != spmd.global_runtime_device_count():
        pytest.skip("a hybrid mesh is over all devices")
    slices = 2 if size % 2 == 0 else 1
    mesh = spmd.HybridMesh((1, size // slices), (slices, 1), ("replica", "fsdp"))
    for block in model.blocks:
        spmd.fully_shard(block, mesh, extra_data_axis="replica")
    spmd.fully_shard(model, mesh, extra_data_axis="replica")
    return mesh, (("replica", "fsdp"),), backward


def sequence(model: nn.Module, size: int) -> Parallelism:
    mesh = mesh_of(size, "data", "sequence") if size > 2 else mesh_of(size, "sequence")
    batch = "data" if size > 2 else None
    for p in model.parameters():
        spmd.mark_sharding(p, mesh, ())
    for block in model.blocks:
        block.register_forward_hook(
            lambda _, __, out: spmd.mark_sharding(out, mesh, (batch, "sequence"), inplace=False)
        )
    return mesh, (batch, "sequence"), backward


def manual_feed_forward(model: nn.Module, size: int) -> Parallelism:
    """A manual feed-forward, in columns and rows, with an explicit sum over devices.

    The partitioner splits the rest of the model by batch.
    """
    mesh = mesh_of(size, "data", "tensor")

    def local(x, up, up_bias, down):
        return spmd.manual.all_reduce(
            functional.gelu(functional.linear(x, up, up_bias)) @ down.t(), "tensor"
        )

    mapped = spmd.shard_map(
        local, mesh, [("data",), ("tensor",), ("tensor",), (None, "tensor")], ("data",)
    )
    for block in model.blocks:
        part = block.feed_forward
        part.forward = lambda x, part=part: (
            mapped(x, part.up.weight, part.up.bias, part.down.weight) + part.down.bias
        )
    return mesh, ("data",), backward


def manual_data_parallel(model: nn.Module, size: int) -> Parallelism:
    """Each device runs forward and backward on its part of the batch.

    One collective each averages the loss and every gradient.
    """
    mesh = mesh_of(size, "data")
    names = [name for name, _ in model.named_parameters()]

    def local(ids, targets, *parameters):
        output = torch.func.functional_call(model, dict(zip(names, parameters)), (ids,))
        loss = functional.cross_entropy(output.flatten(0, 1), targets.flatten())
        return [
            spmd.manual.all_reduce(part, "data", "mean")
            for part in (loss.detach(), *torch.autograd.grad(loss, parameters))
        ]

    mapped = spmd.shard_map(
        local, mesh, [("data",), ("data",), *[()] * len(names)], [()] * (1 + len(names))
    )

    def step(model, ids, targets):
        loss, *gradients = mapped(ids, targets, *model.parameters())
        for p, gradient in zip(model.parameters(), gradients):
            p.grad = gradient.detach()
        return loss

    for p in model.parameters():
        spmd.mark_sharding(p, mesh, ())
    return mesh, ("data",), step


WAYS = [
    data,
    fsdp_by_marks,
    fsdp_in_units,
    tensor,
    fsdp_and_tensor,
    hybrid,
    sequence,
    manual_feed_forward,
    manual_data_parallel,
]
TIED = [fsdp_by_marks, tensor, hybrid, manual_data_parallel]
TYPICAL = [fsdp_in_units, fsdp_and_tensor, hybrid, sequence, manual_feed_forward]
NUM_DEVICES = spmd.global_runtime_device_count()
# Each way runs over all devices; two of them also over fewer, as each compiles a program.
CASES = [(way, NUM_DEVICES) if way in TYPICAL else exhaustive(way, NUM_DEVICES) for way in WAYS] + [
    exhaustive(way, n) for way, n in ((tensor, 2), (fsdp_in_units, 1)) if n < NUM_DEVICES
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "size"), CASES, ids=lambda x: getattr(x, "__name__", None))
def test_losses_and_parameters_are_those_of_one_device(way, size):
    model, batches, right = start(way in TIED)
    ours = copy.deepcopy(model).to("xla")
    mesh, spec, step = way(ours, size)
    on_devices = [
        tuple(spmd.mark_sharding(t.to("xla"), mesh, spec) for t in batch) for batch in batches
    ]
    got = train(ours, on_devices, step)
    assert got.compiles == got.compiles[:1] * STEPS, f"compiled again: {got.compiles}"
    # float32 has a relative rounding error of 6e-8. Sums over devices run in another order than on
    # the CPU, each layer adds a few units in the last place, and four steps accumulate them: about
    # 3e-7 was measured. A gradient that is wrong in one shard or counted twice changes the third
    # digit in the second step.
    torch.testing.assert_close(got.losses, right.losses, rtol=1e-5, atol=0)
    assert got.parameters.keys() == right.parameters.keys()
    # A rounding error e in a gradient near 0 changes a parameter by up to lr / eps * e = 100 e in
    # each step.
    for name, parameter in right.parameters.items():
        torch.testing.assert_close(
            got.parameters[name],
            parameter,
            rtol=1e-5,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )
