"""Training steps that automatic sharding is tested on, beside eager torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import spmd_core as spmd
from spmd_core.auto import candidates
from spmd_core.auto.batch import batch_classes
from spmd_core.auto.candidates import Kind
from spmd_core.auto.costs import CostModel
from spmd_core.auto.decide import inputs_of
from spmd_core.auto.groups import Groups, group
from spmd_core.auto.machine import Machine
from spmd_core.auto.marked_graph import Shardings, shardings
from spmd_core.auto.read_step import read_step
from spmd_core.auto.recorded_step import RecordedStep, record
from spmd_core.auto.solve import solve
from spmd_core.graph.recorders import lock
from spmd_core.planner.topology import present
from spmd_core.program import planning


class Block(nn.Module):
    """A residual layer: a norm, and two products with a GELU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """An embedding, blocks, and logits by the embedding's weight."""

    def __init__(self, vocabulary: int, width: int, inner: int, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, inner) for _ in range(depth)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.blocks(self.table(ids)), self.table.weight)


class Pictures(nn.Module):
    """Two convolutions, one with strides, a norm of groups, and classes of what is left."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)
        self.second = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.classes = nn.Linear(2 * channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(F.relu(self.norm(self.first(x))))
        return self.classes(x.mean((2, 3)))


@dataclass
class Training:
    """A model, its optimizer, and the step of a loop.

    Attributes:
        model, optimizer: on one device.
        step: forward, backward, update; the detached loss.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., torch.Tensor]


def training(
    model: nn.Module,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    lr: float = 1e-2,
    is_bf16: bool = False,
    **options: object,
) -> Training:
    """The training of a model to predict classes; with `is_bf16` under autocast to bfloat16."""
    optimizer = make(model.parameters(), lr=lr, **options)

    def step(x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=is_bf16):
            logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, -2).float(), classes.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step)


def words(
    *, vocabulary: int = 32, width: int = 16, inner: int = 32, depth: int = 2, batch: int = 8
) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A small `Words` on the CPU, and a batch: ids and classes of shape (batch, 6)."""
    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (batch, 6))
    return Words(vocabulary, width, inner, depth), (ids, (ids * 5 + 1) % vocabulary)


def pictures(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A small `Pictures` on the CPU, and a batch of 12 x 12 pictures."""
    torch.manual_seed(0)
    return Pictures(8), (torch.randn(batch, 3, 12, 12), torch.arange(batch) % 5)


def losses(step: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]) -> list[float]:
    """The losses of three steps."""
    found = []
    for _ in range(3):
        loss = step(*batch)
        spmd.sync()
        found.append(loss.item())
    return found


def groups_of(*tensors: torch.Tensor) -> Groups:
    """The groups of what was recorded for pending tensors."""
    with lock:
        return group(read_step(planning.plan([x._handle for x in tensors]).graph()))


def chosen(
    kind: Kind,
    mesh: spmd.Mesh,
    read: Callable[[RecordedStep, Groups, Shardings], Any],
    *,
    batch: int = 16,
    depth: int = 2,
    is_recomputed: bool = False,
    in_code: bool = False,
    **options: object,
) -> Any:
    """`read(recorded, groups, shardings)` of the best choice of a kind for tied blocks.

    Args:
        kind, mesh: what is chosen.
        read: its result is returned.
        batch, depth: as for `words`.
        is_recomputed: whether blocks compute again in the backward.
        in_code: whether only what the code of a loop reaches may be marked.
        **options: of the optimizer, and `is_bf16` of `training`.
    """
    model, example = words(vocabulary=512, width=256, inner=1024, depth=depth, batch=batch)
    for block in model.blocks if is_recomputed else ():
        spmd.checkpoint_module(block)
    own = training(model.to("xla"), **options)
    inputs = [x.to("xla") for x in example]

    def found(recorded: RecordedStep) -> Any:
        groups = group(read_step(recorded.graph))
        machine = Machine.of(present().devices)
        # Not by `candidates`, which names the first of several kinds that choose alike.
        batch_of = batch_classes(groups, inputs_of(groups, recorded.names))
        costs = CostModel(groups, mesh.mesh_shape, machine)
        marks = candidates.fixed(groups, len(mesh.mesh_shape))
        solution = solve(costs, allowed=candidates._allowed(costs, marks, kind, batch_of))
        assert solution is not None
        markable = recorded.markable if in_code else None
        return read(recorded, groups, shardings(groups, solution, mesh, markable))

    return record(lambda: own.step(*inputs), found)
