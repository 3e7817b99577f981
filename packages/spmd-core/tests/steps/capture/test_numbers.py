"""The scalar inputs of a captured program are what a recorded call has in their place."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import spmd_core as spmd
from spmd_core.errors import CaptureError


def noisy(x, w):
    """An operation with a seed, between others that have none."""
    return functional.dropout(x * 1.5, 0.5) @ w + 0.25


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + functional.dropout(self.linear(x), 0.25)


def scanned(x, w):
    return spmd.control_flow.scan(lambda h, _: (noisy(h, w), h), x, None, length=3)[0]


def nested(x, w):
    def inner(h, _):
        return spmd.control_flow.scan(lambda h, _: (noisy(h, w), h), h, None, length=2)

    return spmd.control_flow.scan(inner, x, None, length=2)[0]


def branched(x, w):
    is_first = x.sum() > 8.5
    return spmd.control_flow.cond(is_first, lambda h: noisy(h, w), lambda h: noisy(h, w).tanh(), x)


@pytest.mark.slow
@pytest.mark.parametrize("function", [scanned, nested, branched], ids=lambda f: f.__name__)
def test_seeds_inside_of_loops_and_branches(function, mesh_2d):
    runs = []
    for capture in (True, False):
        torch.manual_seed(0)
        w = torch.rand(8, 8).to("xla")
        spmd.mark_sharding(w, mesh_2d, ("a", "b"))
        w.requires_grad_()

        def step(x, w=w):
            w.grad = None
            functional.dropout(function(x, w), 0.125).square().mean().backward()
            return w.grad.clone()

        call = spmd.compile(step, capture=capture)
        runs.append([call(torch.full((5, 8), 1 / (i + 1)).to("xla")).tolist() for i in range(6)])
        assert not capture or call.replayed == 4, call.reason
    assert runs[0] == runs[1]
    assert len({str(run) for run in runs[0]}) == 6


@pytest.mark.slow
def test_dropout_in_layers_that_run_as_a_loop(mesh_2d):
    runs = []
    for capture in (True, False):
        torch.manual_seed(0)
        layers = nn.ModuleList(Block() for _ in range(3)).to("xla")
        for layer in layers:
            spmd.mark_sharding(layer.linear.weight, mesh_2d, (None, "b"))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1, fused=True)

        def step(x, layers=layers, optimizer=optimizer):
            loss = (spmd.scan_layers(layers, x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        call = spmd.compile(step, capture=capture)
        runs.append([call(torch.full((5, 8), float(i)).to("xla")).item() for i in range(5)])
        assert not capture or call.replayed == 3, call.reason
    assert runs[0] == runs[1]


def test_numbers_that_vary_without_an_argument_are_refused(monkeypatch):
    monkeypatch.setattr(torch.nn, "of_a_test", map(float, range(9)), raising=False)
    step = spmd.compile(lambda x: x * next(torch.nn.of_a_test), capture=True)
    x = torch.ones(3).to("xla")
    step(x)
    with pytest.raises(CaptureError, match=r"aten::mul.Tensor, recorded at .*:\d+.* got 0.0 and"):
        step(x)


def test_zeros_have_signs():
    step = spmd.compile(lambda x, by: 1 / (x * by), capture=True)
    for by, expected in ((0.0, torch.inf), (-0.0, -torch.inf)):
        for _ in range(4):
            assert step(torch.ones(3).to("xla"), by).tolist() == [expected] * 3
    assert step.replayed == 4


@pytest.mark.parametrize("order", [lambda lr: 2.0 if lr < 0.2 else 1.0, lambda lr: min(lr, 0.2)])
def test_numbers_of_groups_that_a_step_decides_by(order):
    w = torch.ones(3).to("xla").requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.5)

    @spmd.compile(capture=True)
    def step(x):
        optimizer.zero_grad()
        (w * x).sum().backward()
        optimizer.step()
        return x * order(optimizer.param_groups[0]["lr"])

    x = torch.ones(3).to("xla")

    def loop():
        for _ in range(6):
            rate = optimizer.param_groups[0]["lr"]
            assert step(x)[0].item() == pytest.approx(order(rate))
            optimizer.param_groups[0]["lr"] = rate * 0.7

    with pytest.raises(CaptureError, match="or comes from an optimizer's param_groups"):
        loop()


def test_a_schedule_of_an_own_optimizer():
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.5})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"])

    w = torch.ones(3).to("xla").requires_grad_()
    optimizer = Plain([w])

    @spmd.compile(capture=True)
    def step(x):
        optimizer.zero_grad()
        (w * x).sum().backward()
        optimizer.step()

    expected = torch.ones(3)
    for _ in range(6):
        step(torch.ones(3).to("xla"))
        expected -= optimizer.param_groups[0]["lr"]
        torch.testing.assert_close(w.detach().cpu(), expected)
        optimizer.param_groups[0]["lr"] *= 0.7
    assert step.replayed == 4
