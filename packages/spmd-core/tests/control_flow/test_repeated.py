"""Gradients of gradients, for which functions are called again."""

import functools

import pytest
import torch
from control_flow.eager_loops import both, on

import spmd_core as spmd
from spmd_core.control_flow import cond, scan
from spmd_core.errors import ControlFlowError

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def second(loss, inputs):
    """Gradients of a loss, and of their squares."""
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]


def test_what_is_closed_over_and_changes_is_bound():
    def compute(device, w, x):
        loop, choose = on(device)
        weights, h = [w, w.T / 2, w * 2], x[0]
        for k in range(3):  # the advice of the errors below

            def step(h, x, w, k):
                return torch.tanh(h @ w + x * (k / 2 + 1)), None

            bound = functools.partial(step, w=weights[k], k=k)
            h = loop(lambda h, x, bound=bound: (bound(h, x)[0], h), h, x)[0]
            h = choose(h.sum() > 0, lambda h, k=k: h @ weights[k], lambda h, k=k: h / (k + 2), h)
        return [h, *second(h.square().sum(), (w, x))]

    both(compute, torch.randn(4, 4) / 2, X, rtol=1e-3, atol=1e-3)


class Closed:
    """What the functions below close over."""

    w = other = factor = row = None


CHANGED = {
    "tensors from outside": lambda closed: setattr(closed, "w", closed.other),
    "numbers": lambda closed: setattr(closed, "factor", 3.0),
    "constants": lambda closed: setattr(closed, "row", [1.0, 2.0, 3.0, 5.0]),
    "operations": lambda closed: setattr(closed, "w", closed.w.T),
}


@pytest.mark.parametrize("kind", ["scan", "cond"])
@pytest.mark.parametrize("name", CHANGED)
def test_what_is_closed_over_and_has_changed_is_refused(name, kind):
    closed = Closed()
    closed.w = torch.eye(4).to("xla").requires_grad_()
    closed.other = torch.ones(4, 4).to("xla").requires_grad_()
    closed.factor, closed.row = 2.0, [1.0, 2.0, 3.0, 4.0]

    def step(h):
        h = h @ (closed.w if closed.w.is_leaf else closed.w.sin())
        return h * closed.factor * torch.tensor(closed.row, device="xla")

    x = X.to("xla").requires_grad_()
    if kind == "scan":
        result, _ = scan(lambda h, x: (step(h), None), x[0], x)
    else:
        result = cond(x.sum() < 9, step, lambda h: h, x)
    spmd.sync()
    again = torch.autograd.grad(result.sum(), x, create_graph=True, retain_graph=True)
    assert len(again) == 1  # nothing has changed
    CHANGED[name](closed)
    with pytest.raises(ControlFlowError, match=f"other {name} than .* Bind it when the function"):
        torch.autograd.grad(result.sum(), x, create_graph=True)


def test_branches_in_a_loop_that_draw_nothing():
    def compute(device, w, x):
        loop, choose = on(device)

        def step(h, x):
            h = torch.tanh(h @ w + x)
            return h, choose(h.sum() > 0, lambda h: h * w.sum(), lambda h: h.square() / 2, h)

        h, y = loop(step, x[0], x)
        return second(h.square().sum() + y.square().sum(), (w, x))

    both(compute, torch.randn(4, 4) / 2, X, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("specs", [None, ((None, "a"), ("a", None), (("a", "b"), None, None))])
def test_a_weight_of_fewer_bits_under_autocast(specs, mesh_2d):
    """Its gradients are added in bfloat16, then cast; the mark is that of float32."""

    def compute(device, w, h, x):
        if device == "xla" and specs is not None:
            for t, spec in zip((w, h, x), specs):
                spmd.mark_sharding(t, mesh_2d, spec)
        with torch.autocast(device, dtype=torch.bfloat16):
            h_last, _ = on(device)[0](lambda c, x: (torch.tanh(c @ w), c.sum()), h.bfloat16(), x)
        return [h_last.float(), *second(h_last.float().square().mean(), (w, h))]

    tensors = torch.randn(6, 6) / 3, torch.randn(8, 6), torch.randn(8, 8, 6)
    both(compute, *tensors, rtol=0.1, atol=0.01)
