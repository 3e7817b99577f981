"""Gradient scalers in captured steps: the scale grows and shrinks as in eager torch."""

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.errors import CaptureError, ProgramError

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True),
}


class Training:
    """A model with a scaler, whose third and sixth batches have infinite gradients."""

    def __init__(self, device, make=OPTIMIZERS["AdamW"], *, clips=False, enabled=True):
        torch.manual_seed(0)
        self.device, self.clips = device, clips
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        self.optimizer = make(self.model.parameters())
        options = {"init_scale": 128.0, "growth_interval": 2, "enabled": enabled}
        self.scaler = torch.amp.GradScaler(device, **options)

    def batch(self, number):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
        if number in (2, 5):
            x[0, 0] = torch.inf
        return x.to(self.device)

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        self.scaler.scale(loss).backward()
        if self.clips:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def run(self, step, numbers):
        """Losses and scales of some steps."""
        return [(step(self.batch(n)).item(), self.scaler.get_scale()) for n in numbers]


def check(eager, mine, *, varies=True):
    assert len({scale for _, scale in eager}) == (2 if varies else 1)  # it grew and shrank
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(eager), equal_nan=True)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("clips", [False, True])
def test_a_scale_that_varies(make, clips):
    eager = Training("cpu", make, clips=clips)
    mine = Training("xla", make, clips=clips)
    step = spmd.compile(mine.step, capture=True)
    check(eager.run(eager.step, range(9)), mine.run(step, range(9)))
    assert step.replayed == 7, step.reason
    for a, b in zip(eager.model.parameters(), mine.model.parameters(), strict=True):
        torch.testing.assert_close(b.detach().cpu(), a.detach())
    assert eager.scaler.state_dict() == mine.scaler.state_dict()


def test_a_scaler_that_is_off():
    eager, mine = Training("cpu", enabled=False), Training("xla", enabled=False)
    step = spmd.compile(mine.step, capture=True)
    check(eager.run(eager.step, (0, 1, 3, 4)), mine.run(step, (0, 1, 3, 4)), varies=False)
    assert step.replayed == 2, step.reason


def test_what_is_changed_between_calls_holds():
    runs = []
    for device in ("cpu", "xla"):
        training = Training(device)
        step = training.step if device == "cpu" else spmd.compile(training.step, capture=True)
        runs.append(found := training.run(step, range(5)))
        training.scaler.set_growth_factor(4.0)
        found += training.run(step, (6,))
        if device == "xla":
            assert step.reason.endswith("scaler._growth_factor is 4.0 in place of 2.0")
        found += training.run(step, (7, 8, 9))
        training.scaler.load_state_dict({**training.scaler.state_dict(), "scale": 3.0})
        found += training.run(step, (10, 11, 12))
    torch.testing.assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]), equal_nan=True)


def test_states_of_optimizers_end_with_the_call():
    training = Training("xla")
    step = spmd.compile(training.step, capture=True)
    training.run(step, (0, 1, 3, 4))
    assert step.replayed
    training.scaler.unscale_(training.optimizer)
    training.clips = True  # eager torch refuses a second unscale_(), and so does a recorded call
    with pytest.raises(RuntimeError, match="already been called"):
        step(training.batch(6))
    training = Training("xla")

    def without_update(x):
        training.scaler.scale(training.model(x).square().mean()).backward()
        training.scaler.step(training.optimizer)

    with pytest.raises(CaptureError, match="something keeps"):
        spmd.compile(without_update, capture=True)(training.batch(0))


@pytest.mark.parametrize("capture", [False, True])
def test_an_optimizer_that_does_not_look_at_gradients(capture):
    training = Training("xla", lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    step = spmd.compile(training.step, full_graph=not capture, capture=capture)
    with pytest.raises(ProgramError, match=r"reads whether all gradients are finite.*fused=True"):
        step(training.batch(0))
    eager = Training("cpu", OPTIMIZERS["AdamW"])
    training = Training("xla")  # the advice
    step = spmd.compile(training.step, full_graph=not capture, capture=capture)
    check(eager.run(eager.step, range(9)), training.run(step, range(9)))
