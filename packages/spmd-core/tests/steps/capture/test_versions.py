"""Captured steps give what they write a new version where autograd may have saved it."""

import threading

import pytest
import torch
from torch import nn

import spmd_core as spmd


class Scaled(torch.autograd.Function):
    """Doubles, and saves another tensor for the gradient without reading it."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.save_for_backward(by)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (by,) = ctx.saved_tensors
        return gradient * by, None


class OnTheHost(torch.autograd.Function):
    """Records nothing in forward, and saves a tensor of the device."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.save_for_backward(by)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (by,) = ctx.saved_tensors
        return gradient * by.cpu(), None


class Attribute(torch.autograd.Function):
    """Keeps another tensor as an attribute, whose versions torch does not compare."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.by, None


def trained(capture):
    p = nn.Parameter(torch.ones(3).to("xla"))
    # torch's fused kernels give an optimizer's state no new version, not even in eager mode.
    own = torch.optim.AdamW([p], lr=0.1, foreach=False, capturable=True)

    def step(x):
        own.zero_grad()
        (p * x).sum().backward()
        own.step()

    step = spmd.compile(step, capture=capture)
    x = torch.ones(3).to("xla")
    step(x)
    step(x)
    return own.state[p]["exp_avg"], step, x


SHARED = {
    "itself": (lambda m: None, lambda m, _: m),
    "its detach()": (lambda m: None, lambda m, _: m.detach()),
    "a view": (lambda m: None, lambda m, _: m.view(3)),
    "a part": (lambda m: None, lambda m, _: m[:1]),
    "an older detach()": (lambda m: m.detach(), lambda m, kept: kept),
    "an older view": (lambda m: m[1:2], lambda m, kept: kept),
    "its data": (lambda m: None, lambda m, _: m.data),
}


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("reads", [False, True])
def test_what_a_function_saves_of_an_optimizer_s_state(shared, reads):
    found = []
    before, saved = SHARED[shared]
    for capture in (True, False):
        moment, step, x = trained(capture)
        kept = before(moment)
        for _ in range(3):
            step(x)
        v = torch.ones(3).to("xla").requires_grad_()
        if reads:
            moment.sum().item()
        product = Scaled.apply(v, saved(moment, kept))
        for _ in range(2):
            step(x)
        assert not capture or step.replayed == 5
        try:
            product.sum().backward()
            found.append(v.grad.tolist())
        except RuntimeError as error:
            found.append("modified by an inplace operation" in str(error))
        # What is saved later has the newest version.
        Scaled.apply(v, saved(moment, kept)).sum().backward()
        step(x)
        found.append(v.grad.cpu().tolist())
    assert found[:2] == found[2:] and (found[0] is True or shared == "its data")


def test_an_attribute_of_a_function_is_what_it_is_in_backward():
    found = []
    for capture in (True, False):
        moment, step, x = trained(capture)
        step(x)
        v = torch.ones(3).to("xla").requires_grad_()
        product = Attribute.apply(v, moment)
        step(x)
        product.sum().backward()
        found.append((v.grad.tolist(), moment.tolist()))
    assert found[0] == found[1]


def test_what_nothing_shares_gets_no_version():
    moment, step, x = trained(True)
    for _ in range(3):
        step(x)
    (version,) = {moment._version for _ in range(3)}
    step(x)
    assert moment._version == version
    moment.detach()
    step(x)
    assert moment._version > version and step.replayed == 5


@pytest.mark.parametrize(("function", "device"), [(Scaled, "xla"), (OnTheHost, "cpu")])
def test_what_another_thread_saves(function, device):
    """The second one's thread never records anything."""
    moment, step, x = trained(True)
    for _ in range(3):
        step(x)
    v = torch.ones(3).to(device).requires_grad_()
    made = []
    thread = threading.Thread(target=lambda: made.append(function.apply(v, moment)))
    thread.start()
    thread.join()
    step(x)
    assert step.replayed == 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made[0].sum().backward()
