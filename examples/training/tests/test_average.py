"""The moving average of weights: its formula, and one program for all steps."""

import copy

import pytest
import torch
from torch import nn

import spmd_core as spmd
from examples.training.average import MovingAverage


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_the_average_follows_the_weights(device: str) -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.BatchNorm1d(3)).to(device)
    average = MovingAverage(model, 0.5)
    expected = copy.deepcopy(layer.weight.detach()).cpu()
    for step in range(4):
        if step == 2:  # a run that is resumed
            state = average.state_dict()
            average = MovingAverage(model, 0.5)
            average.load_state_dict(state)
        with torch.no_grad():
            layer.weight.add_(1.0)
        average.update(model)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * layer.weight.detach().cpu()
    averaged = next(average.model.parameters())
    torch.testing.assert_close(averaged.cpu(), expected)
    assert not average.model.training and not averaged.requires_grad


def test_steps_compile_nothing_new_and_read_nothing() -> None:
    model = nn.Linear(3, 3).to("xla")
    average = MovingAverage(model, 0.9)
    spmd.sync()
    before = None
    for step in range(4):
        average.update(model)
        spmd.sync()
        if step == 1:
            before = spmd.metrics.counters()
    assert before is not None
    after = spmd.metrics.counters()
    assert after["compiles"] == before["compiles"]
    assert after["host_reads"] == before["host_reads"]
