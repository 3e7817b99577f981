"""Losses are compared exactly, and what a run leaves out is left out."""

import pytest
import torch
from torch import nn

import spmd_core as spmd
from benchmarks.same_losses import CHANGES, difference, leave_out
from spmd_core.program import initial_state, pipeline


def test_losses_are_compared_exactly() -> None:
    assert difference([2.0, 1.0], [2.0, 1.0]) == "same"
    assert difference([2.0, 1.0 + 2**-52], [2.0, 1.0]) == "from step 2: 2.2e-16"
    assert difference([4.0, 1.5, 0.9], [2.0, 1.0, 1.0]) == "from step 1: 1.0e+00"
    with pytest.raises(ValueError, match="the same number of steps; got 1 and 2"):
        difference([1.0], [1.0, 2.0])


def test_what_is_left_out_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def programs(width: int) -> int:
        layer = nn.Linear(width, 3, device="xla")
        optimizer = torch.optim.AdamW(layer.parameters())
        spmd.sync()  # which draws the weights
        before = spmd.metrics.counter("compiles")
        for _ in range(2):
            layer(torch.ones(1, width, device="xla")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            spmd.sync()
        return spmd.metrics.counter("compiles") - before

    monkeypatch.setattr(pipeline, "PASSES", pipeline.PASSES)
    monkeypatch.setattr(initial_state, "find_state", initial_state.find_state)
    names = [x.__name__ for x in pipeline.PASSES]
    assert programs(3) == 1
    leave_out(CHANGES)
    assert [x.__name__ for x in pipeline.PASSES] == [x for x in names if x != "fused_projections"]
    assert programs(5) == 2
