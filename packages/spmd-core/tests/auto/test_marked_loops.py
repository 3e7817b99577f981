"""Marks inside of loops' bodies."""

import copy

import pytest
import torch
from auto_steps import losses
from torch import nn

import spmd_core as spmd
from spmd_core.auto import mode
from spmd_core.auto.marked_loops import with_marks
from spmd_core.auto.read_step import is_loop
from spmd_core.graph.recorders import lock
from spmd_core.program import planning
from spmd_core.program.mark_names import MARK_SHARDING
from spmd_core.sharding.sharding import Sharding

LENGTH, BATCH, WIDTH = 8, 512, 64


class Recurrent(nn.Module):
    """A cell that a loop runs on each position of sequences, and classes of the last state."""

    def __init__(self):
        super().__init__()
        self.cell, self.classes = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x):
        def step(state, x):
            return torch.tanh(self.cell(torch.cat((state, x), -1))), None

        state = torch.zeros(x.shape[0], WIDTH, device=x.device)
        if x.device.type == "cpu":
            for row in x.transpose(0, 1):
                state, _ = step(state, row)
        else:
            state, _ = spmd.scan(step, state, x.transpose(0, 1))
        return self.classes(state)


def step_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_values_inside_are_marked_and_all_numbers_follow():
    count = spmd.global_runtime_device_count()
    mesh = spmd.Mesh(range(count), (count,), ("rows",))
    x = torch.randn(3, 8, 4, device="xla")
    _, sums = spmd.scan(lambda s, x: (s + x.exp().sum(), s + x), torch.zeros(8, 4, device="xla"), x)
    with lock:
        graph = planning.plan([sums._handle]).graph()
    (loop,) = [node.entry for node in graph.nodes if is_loop(node.entry)]
    (body,) = loop.subgraphs
    names = [entry.name for entry, _ in body.nodes]
    exp = names.index("aten::exp")
    rows = Sharding.of(mesh, ("rows", None), 2)
    marked = with_marks(loop, [((-2,), rows, False), ((exp,), rows, False)])
    (new,) = marked.subgraphs
    of_new = [entry.name for entry, _ in new.nodes]
    assert [n for n in of_new if n != MARK_SHARDING] == names
    first, second = (i for i, n in enumerate(of_new) if n == MARK_SHARDING)
    assert new.nodes[first][1] == (-2,) and new.nodes[second][1] == (second - 1,)
    # Who read the row and its exponential reads them as they are marked; nobody else changed.
    assert first == 0 and new.nodes[of_new.index("aten::exp")][1] == (0,)
    (following,) = [inputs for entry, inputs in new.nodes if second in inputs]
    assert following
    assert marked.stacks == loop.stacks and marked.steps == 3
    assert with_marks(loop, []) is loop


@pytest.mark.parametrize("shape", [(8,), (4, 2)])
@pytest.mark.parametrize("by", ["auto_shard", "the mode"])
def test_a_recurrent_model(by, shape, monkeypatch):
    if spmd.global_runtime_device_count() < 8:
        pytest.skip("needs several devices")
    monkeypatch.setattr(mode, "_MOST_COMPILED", 1)
    torch.manual_seed(0)
    model, x, y = Recurrent(), torch.randn(BATCH, LENGTH, WIDTH), torch.arange(BATCH) % 5
    expected = losses(step_of(copy.deepcopy(model)), (x, y))
    step, given = step_of(model.to("xla")), (x.to("xla"), y.to("xla"))
    mesh = spmd.Mesh(range(8), shape)
    if by == "auto_shard":
        plan = spmd.auto_shard(step, *given, mesh=mesh, candidates=1)
        # The sequences are split, and not gathered for the loop.
        assert plan.inputs[0].spec[0] is not None
        assert plan.tried[0].program.costs.ici_bytes < 4 * x.numel()
    else:
        mode.start(mesh)
    assert losses(step, given) == pytest.approx(expected, rel=2e-5)
