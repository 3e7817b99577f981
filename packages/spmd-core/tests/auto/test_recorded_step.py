"""auto/recorded_step.py: a step is recorded and not run, and what it changed is taken back."""

import copy

import pytest
import torch
from auto_steps import training, words
from tiers import crossed
from torch import nn

import spmd_core as spmd
from spmd_core.auto.recorded_step import record
from spmd_core.errors import AutoShardingError

pytestmark = pytest.mark.one_device


def state_of(own, scheduler):
    """All that a step may change, on the host."""
    return copy.deepcopy(
        (
            {k: v.cpu() for k, v in own.model.state_dict().items()},
            [None if p.grad is None else p.grad.cpu() for p in own.model.parameters()],
            [dict(group, params=None) for group in own.optimizer.param_groups],
            [
                {k: v.cpu() for k, v in own.optimizer.state[p].items()}
                for p in own.model.parameters()
            ],
            {k: v for k, v in vars(scheduler).items() if isinstance(v, (int, float, list))},
            torch.get_rng_state(),
            own.model.calls,
        )
    )


class Counting(nn.Module):
    """A model with dropout, running statistics and an attribute that its forward changes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        )
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


@pytest.mark.parametrize(("fused", "steps_before"), crossed([False, True], [0, 2]))
def test_everything_is_as_before(steps_before, fused):
    own = training(Counting().to("xla"), torch.optim.AdamW, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(own.optimizer, 1, gamma=0.5)
    batch = torch.randn(4, 8).to("xla"), torch.arange(4).to("xla") % 3

    def step():
        loss = own.step(*batch)
        scheduler.step()
        return loss

    for _ in range(steps_before):
        step()
        spmd.sync()
    before = state_of(own, scheduler)
    seen = record(step, lambda recorded: recorded)
    torch.testing.assert_close(state_of(own, scheduler), before, rtol=0, atol=0)
    updated = sum(output.owner is not None for output in seen.graph.outputs)
    assert updated >= len(list(own.model.parameters()))
    (call,) = seen.calls[own.model.layers[0]]
    assert seen.names and call.gradient is not None and call.gradient > call.result
    assert len({leaf for _, leaf in seen.gradients}) == len(list(own.model.parameters()))
    step()  # and it goes on
    spmd.sync()


def test_the_step_ends_at_its_sync_and_masks_may_be_read():
    x = torch.ones(4, 4).to("xla")
    after = []

    def step():
        mask = x > 0
        if mask.all():
            x.mul_(2)
        (x @ x).sum()
        y = x + 1
        spmd.sync()
        after.append(y)

    runs = spmd.metrics.counter("executions")
    record(step, lambda recorded: None)
    assert not after and spmd.metrics.counter("executions") - runs <= 2  # x is uploaded; the mask
    assert x.tolist() == [[1.0] * 4] * 4


def test_a_read_of_a_product_is_refused_by_its_line():
    model, batch = words()
    own = training(model.to("xla"))
    inputs = [x.to("xla") for x in batch]
    before = copy.deepcopy({k: v.cpu() for k, v in model.state_dict().items()})

    def step():
        loss = own.step(*inputs)
        return loss.item()

    with pytest.raises(AutoShardingError, match=r"test_recorded_step.py:\d+ does .*Read after"):
        record(step, lambda recorded: None)
    after = {k: v.cpu() for k, v in model.state_dict().items()}
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_step_without_operations_and_one_that_fails():
    with pytest.raises(AutoShardingError, match=r"must compute something on device 'xla'"):
        record(lambda: torch.ones(3).sum(), lambda recorded: None)
    w = torch.ones(3, device="xla")

    def fails():
        w.add_(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record(fails, lambda recorded: None)
    assert w.tolist() == [1, 1, 1]
