"""Hooks at AccumulateGrad nodes: they run in each call, and no longer than torch keeps them."""

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.errors import CaptureError


def node_of(p):
    return p.view_as(p).grad_fn.next_functions[0][0]


def trained(capture):
    p = nn.Parameter(torch.ones(3).to("xla"))

    def step(x):
        p.grad = None
        (p * x).sum().backward()

    step = spmd.compile(step, capture=capture)
    for _ in range(4):
        step(torch.ones(3).to("xla"))
    return p, step


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_hook_that_is_registered_later(register, is_kept):
    found = []
    for capture in (True, False):
        p, step = trained(capture)
        x = torch.ones(3).to("xla")

        def triple(*args, p=p):
            if register == "register_prehook":
                return (args[0][0] * 3,)
            p.grad.mul_(3)
            return None

        node = node_of(p)
        getattr(node, register)(triple)
        if not is_kept:
            del node  # and its hook
        for _ in range(3):
            step(x)
            found.append(p.grad.tolist())
        node = None
        for _ in range(3):
            step(x)
            found.append(p.grad.tolist())
        assert not capture or step.replayed == (5 if is_kept else 8)
    assert found[:6] == found[6:]
    assert found[0] == [3.0 if is_kept else 1.0] * 3 and found[5] == [1.0] * 3


def test_a_hook_from_the_beginning_is_refused_in_the_end():
    p = nn.Parameter(torch.ones(3).to("xla"))
    node = node_of(p)
    node.register_hook(lambda *args: (p.grad.mul_(3), None)[1])
    x = torch.ones(3).to("xla")

    def step(x):
        p.grad = None
        (p * x).sum().backward()

    call = spmd.compile(step, capture=True)
    for _ in range(8):
        call(x)
        assert p.grad.tolist() == [3.0] * 3
    with pytest.raises(CaptureError, match=r"node of p, .*register_post_accumulate_grad_hook"):
        call(x)
    del node
    p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(3), None)[1])
    call = spmd.compile(step, capture=True)
    for _ in range(4):
        call(x)
        assert p.grad.tolist() == [3.0] * 3
    assert call.replayed == 2


def test_a_graph_that_lives_is_no_hook():
    p, step = trained(True)
    kept = (p * 2).sum()
    for _ in range(3):
        step(torch.ones(3).to("xla"))
    assert step.replayed == 5
    kept.backward()
    assert p.grad.tolist() == [3.0] * 3
