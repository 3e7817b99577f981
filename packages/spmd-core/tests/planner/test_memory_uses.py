"""planner/memory_uses.py: which torch operation a buffer is of, and what leaves are in training."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.planner.buffer_text import HloValue
from spmd_core.planner.memory_uses import Buffer, MemoryUse, Roles, _Operations

NAMED = 'metadata={op_name="jit(step)/Linear/aten::mm#0/nn.py:1/reduce_scatter"}'


def buffer_behind(num_unnamed: int) -> Buffer:
    """The buffer of the last of some copies, the first of which is of a named instruction."""
    lines = [f"  %c0 = f32[4]{{0}} parameter(0), {NAMED}"]
    lines += [f"  %c{i + 1} = f32[4]{{0}} copy(%c{i})" for i in range(num_unnamed)]
    hlo = "\n".join(["HloModule step", "", "ENTRY %main (c0: f32[4]) -> f32[4] {", *lines, "}"])
    graph: Any = SimpleNamespace(nodes=[SimpleNamespace(origin=None)])
    operations = _Operations(graph, Roles((), 1, frozenset({0})), hlo)
    value = HloValue(f"c{num_unnamed}", 16, 0, "f32[4]")
    return operations.buffer(value, 16)


@pytest.mark.parametrize("num_unnamed", [0, 1, 6, 7])
def test_what_moves_a_result_has_the_name_of_its_operation(num_unnamed: int) -> None:
    found = buffer_behind(num_unnamed)
    assert (found.part, found.op) == (MemoryUse.GRADIENTS, "aten::mm")


def test_a_name_is_not_sought_through_the_whole_program() -> None:
    found = buffer_behind(40)
    assert (found.part, found.op) == (MemoryUse.TEMPORARIES, "")


def test_stacks_of_optimizer_state_are_optimizer_state(num_devices: int) -> None:
    """The rows of all stacks are taken at the beginning of a step, not only parameters'."""

    def train() -> None:
        layers = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(3)]
        model = spmd.scan_model(nn.Sequential(*layers).to("xla"))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 8, device="xla")).square().mean().backward()
            optimizer.step()
            spmd.sync()

    parts = spmd.plan(train, topology=f"cpu-{num_devices}").step.parts
    assert parts[MemoryUse.PARAMETERS] == 3 * 8 * 8 * 4
    # And a step count of each tensor, on the host or the device.
    assert 0 <= parts[MemoryUse.OPTIMIZER] - 2 * parts[MemoryUse.PARAMETERS] <= 64
