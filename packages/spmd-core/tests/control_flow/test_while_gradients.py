"""Gradients of loops whose length a value decides, against Python's loops in eager torch."""

import pytest
import torch
from control_flow.eager_loops import both, on
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core.control_flow import fori_loop, while_gradients, while_loop
from spmd_core.errors import ControlFlowError

X = torch.linspace(-1, 1, 12).reshape(3, 4)
W = torch.linspace(-0.5, 0.6, 16).reshape(4, 4)


def loop_on(device):
    if device == "xla":
        return while_loop

    def loop(cond_fn, body_fn, state):
        while cond_fn(state):
            state = body_fn(state)
        return state

    return loop


def rotation(x, angle):
    """It keeps the norm, so that gradients of long loops do not vanish."""
    first, second = x.unbind()
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.stack([cos * first - sin * second, sin * first + cos * second])


@pytest.mark.parametrize("kept", [2, 4])
def test_loops_of_any_length(kept, monkeypatch):
    monkeypatch.setattr(while_gradients, "_KEPT", kept)

    def compute(device, x, angle):
        found = []
        for count in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 40):
            last = torch.tensor(count).to(device)

            def step(state):
                i, x = state
                return i + 1, rotation(x * (1 + 0.01 * torch.sin(x * i)), angle)

            start = (torch.zeros((), dtype=torch.int64).to(device), x)
            i, y = loop_on(device)(lambda state, last=last: state[0] < last, step, start)
            loss = y[0] * 2 + y[1].square() + angle * 0
            found += [i, y, *torch.autograd.grad(loss, (x, angle))]
        return found

    both(compute, torch.tensor([0.3, -0.2]), torch.tensor(0.1), rtol=1e-4)


def test_a_program_is_the_same_for_each_length():
    angle = torch.tensor(0.1).to("xla").requires_grad_()
    x = torch.tensor([0.3, -0.2])

    def gradient(count):
        last = torch.tensor(count).to("xla")
        start = (torch.zeros((), dtype=torch.int64, device="xla"), x.to("xla"))
        step = lambda state: (state[0] + 1, rotation(state[1], angle))  # noqa: E731
        _, y = while_loop(lambda state: state[0] < last, step, start)
        return torch.autograd.grad(y[0], angle)[0].item()

    gradient(3)
    programs = spmd.metrics.counter("compiles")
    for count in (70, 1100):  # further than states are kept, and further than those twice
        right = angle.detach().cpu().double().requires_grad_()
        y = rotation(x.double(), right * count)
        (expected,) = torch.autograd.grad(y[0], right)
        assert gradient(count) == pytest.approx(expected.item(), rel=1e-3)
    assert spmd.metrics.counter("compiles") == programs


def test_what_a_condition_reads_and_modules_that_a_body_calls():
    def compute(device, x, w, b):
        layer = torch.nn.Linear(4, 4).to(device)
        with torch.no_grad():
            layer.weight.copy_(w)
            layer.bias.copy_(b)
        start = {"x": torch.zeros(3, 4).to(device), "n": torch.zeros(()).to(device)}

        def step(state):  # the state has gradients from its second iteration on
            return {"x": torch.tanh(layer(state["x"]) + x), "n": state["n"] + 1}

        found = loop_on(device)(lambda state: state["n"] + state["x"].norm() < 6, step, start)
        inputs = (x, layer.weight, layer.bias)
        return [*found.values(), *torch.autograd.grad(found["x"].square().sum(), inputs)]

    both(compute, X, W, W[0])


@pytest.mark.parametrize("spec", [("a", "b"), (("a", "b"), None)])
def test_split_tensors(spec, mesh_2d):
    def compute(device, x, w):
        if device == "xla":
            x = spmd.mark_sharding(x.detach(), mesh_2d, spec).requires_grad_()
            w = spmd.mark_sharding(w.detach(), mesh_2d, ("b", "a")).requires_grad_()
        y = loop_on(device)(lambda y: y.norm() > 0.1, lambda y: torch.tanh(y @ w), x)
        grads = torch.autograd.grad(y.square().sum(), (x, w))
        if device == "xla":
            assert grads[0].sharding_spec == x.sharding_spec
        return [y, *grads]

    both(compute, torch.linspace(-1, 1, 30).reshape(6, 5), torch.eye(5) * 0.7 + 0.02)


def test_loops_in_loops():
    def compute(device, x, w):
        scan, _ = on(device)
        loop = loop_on(device)

        def outer(state):
            i, x = state
            _, x = loop(lambda s: s[0] < i, lambda s: (s[0] + 1, torch.tanh(s[1] @ w)), (i * 0, x))
            return i + 1, x + 1

        start = torch.zeros((), dtype=torch.int64).to(device)
        _, y = loop(lambda state: state[0] < 4, outer, (start, x))
        found = [y, *torch.autograd.grad(y.square().sum(), (x, w))]

        def of_a_scan(carry, row):
            y = loop(lambda y: y.norm() > 0.5, lambda y: torch.tanh(y @ w), carry + row)
            return y, y

        y, ys = scan(of_a_scan, x[0], x)
        return [*found, y, ys, *torch.autograd.grad(ys.square().sum() + y.sum(), (x, w))]

    both(compute, X, W)


def test_bounds_that_are_tensors():
    def compute(device, x, w):
        upper = torch.tensor(3).to(device)
        if device == "xla":
            y = fori_loop(0, upper, lambda i, y: torch.tanh(y @ w) + i, x)
        else:
            y = x
            for i in range(3):
                y = torch.tanh(y @ w) + i
        return [y, *torch.autograd.grad(y.square().sum(), (x, w))]

    both(compute, X, W)


def test_recomputation_autocast_and_captured_steps():
    def compute(device, x, w):
        def function(x):
            with torch.autocast(x.device.type, torch.bfloat16):
                body = lambda y: torch.tanh(y @ w).float()  # noqa: E731
                return loop_on(device)(lambda y: y.norm() > 0.5, body, x)

        y = checkpoint(function, x, use_reentrant=False)
        return [y, *torch.autograd.grad(y.square().sum(), (x, w))]

    both(compute, X, W, rtol=2e-2, atol=1e-2)
    w = W.to("xla").requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = while_loop(lambda y: y.norm() > 0.5, lambda y: torch.tanh(y @ w), x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    losses = []
    captured = spmd.compile(step, capture=True)
    for call in (step, captured):
        with torch.no_grad():
            w.copy_(W)
        losses.append([call((X + i).to("xla")).item() for i in range(5)])
    assert losses[0] == losses[1] and captured.replayed == 3


def test_what_has_no_gradient():
    x, w = X.to("xla").requires_grad_(), W.to("xla").requires_grad_()
    y = while_loop(lambda y: y.norm() > 0.5, lambda y: torch.tanh(y @ w), x)
    with pytest.raises(ControlFlowError, match=r"no gradients of gradients.*Write fori_loop"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    y = while_loop(lambda y: y.sum() < 9, lambda y: y + torch.rand(3, 4, device="xla"), x)
    assert y.sum().item() >= 9
    with pytest.raises(ControlFlowError, match=r"draw random numbers.*or detach\(\)"):
        y.sum().backward()
    assert not y.detach().requires_grad
    count, y = while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (x.long()[0, 0], x))
    assert y.requires_grad and not count.requires_grad
    scale = torch.full((), 2.0, device="xla")
    y = while_loop(lambda y: y.norm() < 9, lambda y: y * scale, x)
    scale = torch.full((), 3.0, device="xla")
    with pytest.raises(
        ControlFlowError, match=r"^gradients call the body of a while_loop.* Bind it"
    ):
        y.sum().backward()
    y = while_loop(lambda y: y.norm() < 9, lambda y, scale=scale: y * scale, x)
    y.sum().backward()
    assert x.grad.cpu().unique().numel() == 1
