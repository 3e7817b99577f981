"""SGD's momentum buffers on the device: those of eager torch to the last bit, in one program."""

import pytest
import torch

import spmd_core as spmd
from spmd_core.program import compile_cache

GRADIENT = [1.5, -0.0, 0.0, float("inf"), float("nan"), 3e-38]
OPTIONS = {
    "": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "nesterov": {"nesterov": True, "weight_decay": 0.5},
    "maximize": {"maximize": True},
}


def buffers(device, steps, **options):
    """The parameter and its momentum buffer after some steps, and the programs so far."""
    p = torch.arange(6.0).to(device).requires_grad_()
    optimizer, counts = torch.optim.SGD([p], **{"lr": 0.5, "momentum": 0.75, **options}), []
    for _ in range(steps):
        p.grad = torch.tensor(GRADIENT).to(device)
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
        counts.append(len(compile_cache.keys()))
    return p.detach().cpu(), optimizer.state[p]["momentum_buffer"].cpu(), counts


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_first_buffer_is_the_gradient_to_the_last_bit(options):
    compile_cache.clear()
    (p, buffer, _), (mine, ours, counts) = (buffers(d, 1, **options) for d in ("cpu", "xla"))
    for right, found in ((p, mine), (buffer, ours)):
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    # The fused kernel adds a weight decay of 0, which makes 0.0 of -0.0.
    if "fused" not in options:
        assert torch.equal(ours.signbit()[:4], buffer.signbit()[:4])
    assert counts == [1]


@pytest.mark.parametrize(
    ("options", "programs"), [({}, [1, 1, 1]), ({"dampening": 0.25}, [1, 2, 2])], ids=str
)
def test_all_steps_share_a_program_without_dampening(options, programs):
    compile_cache.clear()
    (p, buffer, _), (mine, ours, counts) = (buffers(d, 3, **options) for d in ("cpu", "xla"))
    torch.testing.assert_close(mine, p, equal_nan=True)
    torch.testing.assert_close(ours, buffer, equal_nan=True)
    assert counts == programs


def test_a_gradient_that_comes_later_and_a_closure():
    found = []
    for device in ("cpu", "xla"):
        parameters = [torch.ones(3).to(device).requires_grad_() for _ in range(2)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for number in range(3):

            def loss(number=number, optimizer=optimizer, parameters=parameters):
                optimizer.zero_grad()
                used = parameters[: 1 if number == 0 else 2]
                total = sum(p.square().sum() for p in used)
                total.backward()
                return total

            optimizer.step(loss)
            assert ("momentum_buffer" in optimizer.state[parameters[1]]) == (number > 0)
        found.append([p.detach().cpu() for p in parameters])
    for right, mine in zip(*found):
        torch.testing.assert_close(mine, right)
