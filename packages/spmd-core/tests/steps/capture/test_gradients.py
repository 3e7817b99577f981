"""Captured steps find and leave gradients as recorded ones do, also in loops that accumulate."""

import gc

import jax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import by_tier
from torch import nn

import spmd_core as spmd


class Loop:
    """A loop that accumulates gradients over some calls of a step."""

    def __init__(self, capture, mesh=None, set_to_none=True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to("xla")
        if mesh is not None:
            spmd.mark_sharding(self.model[0].weight, mesh, ("a", "b"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, fused=True)
        self.kept, self.calls = [], 0
        model, optimizer = self.model, self.optimizer

        def step(x):
            model(x).square().mean().backward()

        def update(x):
            step(x)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

        wrap = (lambda f: spmd.compile(f, capture=True)) if capture else (lambda f: f)
        self.step, self.update = wrap(step), wrap(update)

    def call(self, updates):
        data = torch.Generator().manual_seed(self.calls)
        self.calls += 1
        (self.update if updates else self.step)(torch.randn(3, 4, generator=data).to("xla"))
        spmd.sync()

    def values(self):
        tensors = [*self.model.parameters(), *self.kept]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        return [t.detach().cpu() for t in tensors]


def same(ours, theirs):
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("over", [2, 3])
def test_accumulation(mesh_2d, over, set_to_none):
    loops = [Loop(capture, mesh_2d, set_to_none) for capture in (True, False)]
    for loop in loops:
        for i in range(4 * over + 2 * over):
            loop.call(i % over == over - 1)
    same(*loops)
    first, last = loops[0].step, loops[0].update
    # A gradient that is there, and one that is not, are two programs, each recorded twice.
    assert first.replayed >= 6 * (over - 1) - 4 and last.replayed >= 3


def test_one_step_that_does_two_things_in_turns():
    losses = []
    for capture in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        step = lambda x, model=model: model(x).square().mean().backward()  # noqa: E731
        call = spmd.compile(step, capture=capture)
        for i in range(12):
            call(torch.full((3, 4), float(i)).to("xla"))
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        losses.append([p.detach().cpu() for p in model.parameters()])
        assert not capture or (call.recorded, call.replayed) == (4, 8)
    for a, b in zip(*losses, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def drop(loop):
    loop.optimizer.zero_grad()


def zero(loop):
    loop.optimizer.zero_grad(set_to_none=False)


def keep(loop):
    loop.kept += [p.grad for p in loop.model.parameters() if p.grad is not None]


def keep_view(loop):
    loop.kept += [p.grad[0] for p in loop.model.parameters() if p.grad is not None]


def drop_one(loop):
    loop.model[0].weight.grad = None


def give_one(loop):
    loop.model[0].bias.grad = torch.full((8,), 0.5).to("xla")


def scale(loop):
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def freeze(loop):
    loop.model[2].bias.requires_grad_(not loop.model[2].bias.requires_grad)


def read(loop):
    loop.kept += [p.grad.clone() for p in loop.model.parameters() if p.grad is not None][:1]


def backward(loop):
    loop.model(torch.ones(2, 4).to("xla")).sum().backward()


CHANGES = (drop, zero, keep, keep_view, drop_one, give_one, scale, freeze, read, backward)


@settings(max_examples=by_tier(6, in_all=24), deadline=None)
@given(st.lists(st.one_of(st.booleans(), st.sampled_from(CHANGES)), min_size=6, max_size=16))
def test_any_loop(actions):
    loops = [Loop(capture) for capture in (True, False)]
    for loop in loops:
        for updates in (False, True, False, True, False, True):
            loop.call(updates)
        for action in actions:
            if isinstance(action, bool):
                loop.call(action)
            else:
                action(loop)
    same(*loops)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_calls(change):
    loops = [Loop(capture) for capture in (True, False)]
    for loop in loops:
        for i in range(9):
            loop.call(i % 2 == 1)  # ends with a gradient
        change(loop)
        for i in range(5):
            loop.call(i % 2 == 0)
            change(loop)
    same(*loops)


def test_a_gradient_that_only_autograd_has():
    found = []
    for capture in (True, False):
        w, v = (torch.ones(3).to("xla").requires_grad_() for _ in range(2))

        def step(x, w=w):
            w.grad = None
            (w * x).sum().backward()

        call = spmd.compile(step, capture=capture)
        for i in range(5):
            call(torch.full((3,), float(i)).to("xla"))
        product = (v * w.grad).sum()
        call(torch.full((3,), 100.0).to("xla"))
        product.backward()
        found.append((v.grad.tolist(), w.grad.tolist()))
    assert found[0] == found[1] == ([4.0] * 3, [100.0] * 3)


def test_a_gradient_that_a_step_sets_to_none():
    w = torch.ones(3).to("xla").requires_grad_()
    given_one = torch.ones(3).to("xla")

    @spmd.compile(capture=True)
    def step(x):
        (w * x).sum().backward()
        w.data.sub_(w.grad)
        w.grad = None

    for i in range(1, 6):
        w.grad = given_one.clone()
        step(torch.ones(3).to("xla"))
        assert w.grad is None and w.tolist() == [1.0 - 2 * i] * 3
    assert step.replayed == 3


def test_a_gradient_that_is_returned_and_dropped_is_refused():
    w = torch.ones(3).to("xla").requires_grad_()

    @spmd.compile(capture=True)
    def step(x):
        grad, w.grad = w.grad, None
        return grad, x * 2

    def loop():
        for i in range(12):
            w.grad = torch.full((3,), float(i)).to("xla")
            grad, _ = step(torch.ones(3).to("xla"))
            assert grad.tolist() == [float(i)] * 3

    with pytest.raises(spmd.errors.CaptureError, match=r"takes from a parameter; return its clone"):
        loop()


def test_two_parameters_with_one_gradient_are_refused():
    w, v = (torch.ones(3).to("xla").requires_grad_() for _ in range(2))

    @spmd.compile(capture=True)
    def step(x):
        w.grad = None
        (w * x).sum().backward()
        v.grad = w.grad

    def loop():
        for _ in range(12):
            step(torch.ones(3).to("xla"))
            assert v.grad is w.grad

    with pytest.raises(spmd.errors.CaptureError, match="belongs to another tensor, too"):
        loop()


def test_dropped_gradients_take_no_memory():
    loop = Loop(True)
    counts = []
    for i in range(24):
        loop.call(i % 2 == 1)
        if i in (15, 23):
            gc.collect()
            spmd.sync(wait=True)
            counts.append(sum(a.nbytes for a in jax.live_arrays() if not a.is_deleted()))
    grads = sum(p.numel() * 4 for p in loop.model.parameters())
    loop.call(False)
    spmd.sync(wait=True)
    now = sum(a.nbytes for a in jax.live_arrays() if not a.is_deleted())
    assert counts[0] == counts[1] and now - counts[1] >= grads
