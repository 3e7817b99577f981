"""The moving average of weights: its formula, and one program for all steps."""

import copy

import pytest
import torch
from torch import nn

import spmd_core as spmd
from examples.training.average import MovingAverage


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_the_average_follows_the_weights(device: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    average = MovingAverage(model, 0.5)
    expected = copy.deepcopy(model[0].weight.detach()).cpu()
    for step in range(4):
        with torch.no_grad():
            model[0].weight.add_(1.0)
        average.update(model, step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model[0].weight.detach().cpu()
    torch.testing.assert_close(average.model[0].weight.cpu(), expected)
    assert not average.model.training and not average.model[0].weight.requires_grad


def test_steps_compile_nothing_new_and_read_nothing() -> None:
    model = nn.Linear(3, 3).to("xla")
    average = MovingAverage(model, 0.9)
    spmd.sync()
    before = None
    for step in range(4):
        average.update(model, step)
        spmd.sync()
        if step == 1:
            before = spmd.metrics.counters()
    assert before is not None
    after = spmd.metrics.counters()
    assert after["compiles"] == before["compiles"]
    assert after["host_reads"] == before["host_reads"]
