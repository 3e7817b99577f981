"""Arguments, state and constants of captured steps: each call has its own values."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.errors import CaptureError


def test_tensors_of_the_cpu_are_arguments_too():
    @spmd.compile(capture=True)
    def double(x):
        return x.to("xla") * 2

    for i in range(5):
        assert double(torch.full((3,), float(i))).tolist() == [2.0 * i] * 3
    assert double.replayed == 3


def test_arguments_that_are_written_and_returned():
    @spmd.compile(capture=True)
    def add(total, x):
        total += x
        return total, total[1:], x.sum()

    total = torch.zeros(3).to("xla")
    for i in range(1, 6):
        same_total, part, added = add(total, torch.full((3,), float(i)).to("xla"))
        assert same_total is total and added.item() == 3 * i
        part.mul_(1)
        assert total.tolist() == [sum(range(i + 1))] * 3
    assert add.replayed >= 2


def test_an_argument_that_is_state_as_well():
    first, second = (torch.full((3,), v).to("xla") for v in (1.0, 10.0))
    held = [first, second]

    @spmd.compile(capture=True)
    def grow(x):
        held[0].mul_(2)
        return x.sum()

    expected = [6.0, 12.0, 24.0, 48.0]
    assert [grow(first).item() for _ in range(4)] == expected
    assert [grow(second).item() for _ in range(4)] == [30.0] * 4
    third = torch.zeros(3).to("xla")
    assert [grow(third).item() for _ in range(4)] == [0.0] * 4
    assert held[0].tolist() == [2.0**12] * 3


def test_constants_of_a_step_are_kept():
    @spmd.compile(capture=True)
    def step(x):
        return x * torch.tensor([1.0, 2.0, 3.0], device="xla")

    for i in range(5):
        assert step(torch.full((3,), float(i)).to("xla")).tolist() == [i, 2.0 * i, 3.0 * i]
    assert step.replayed == 3


def test_a_gradient_as_an_argument():
    w = torch.ones(3).to("xla").requires_grad_()
    w.grad = torch.full((3,), 2.0).to("xla")
    step = spmd.compile(lambda given: given.sum() + w.sum(), capture=True)
    for _ in range(4):
        assert step(w.grad).item() == 9.0
    for _ in range(3):
        assert step(torch.full((3,), 5.0).to("xla")).item() == 18.0


def test_new_objects_as_arguments_are_refused():
    step = spmd.compile(lambda batch: batch.x * 2, capture=True)
    batches = [SimpleNamespace(x=torch.ones(3).to("xla")) for _ in range(9)]
    for batch in batches[:8]:
        step(batch)
    with pytest.raises(CaptureError, match=r"got new ones, of SimpleNamespace, in 9 calls\. Pass"):
        step(batches[8])
    passed = spmd.compile(lambda batch: batch["x"] * 2, capture=True)
    for _ in range(12):
        assert passed({"x": torch.ones(3).to("xla")}).tolist() == [2.0] * 3
    assert passed.replayed == 10


def test_tensors_that_something_keeps_are_refused():
    @functools.lru_cache
    def scale():
        return torch.full((3,), 2.0).to("xla")

    scale()
    step = spmd.compile(lambda x: x * scale(), capture=True)
    with pytest.raises(CaptureError, match=r"got one that something keeps, float32\[3\].*Pass it"):
        step(torch.ones(3).to("xla"))
    passed = spmd.compile(lambda x, by: x * by, capture=True)
    for _ in range(4):
        assert passed(torch.ones(3).to("xla"), scale()).tolist() == [2.0] * 3
        scale().mul_(1)


def test_a_write_after_another_program_moved_the_state(mesh_2d):
    w = torch.zeros(8, 8).to("xla")

    @spmd.compile(capture=True)
    def step(x):
        w.copy_(x * 2)

    split = torch.ones(8, 8).to("xla")
    spmd.mark_sharding(split, mesh_2d, ("a", "b"))
    for i in range(6):
        step(torch.full((8, 8), float(i)).to("xla"))
        assert (w + split).tolist() == [[2.0 * i + 1] * 8] * 8
        assert w.tolist() == [[2.0 * i] * 8] * 8
    assert step.replayed == 4


def test_scalars_of_the_cpu_that_a_step_reaches():
    by = torch.tensor(2.0)
    step = spmd.compile(lambda x: x * by, capture=True)
    for factor in (2.0, 5.0):
        by.fill_(factor)
        for _ in range(4):
            assert step(torch.ones(3).to("xla")).tolist() == [factor] * 3
    assert step.replayed == 4


def test_a_backward_into_the_graph_of_an_argument_is_refused_in_the_end():
    outer, w = (torch.ones(3).to("xla").requires_grad_() for _ in range(2))

    def step(x):
        w.grad = outer.grad = None
        (w * x).sum().backward()

    call = spmd.compile(step, capture=True)

    def loop(detached):
        for i in range(10):
            factor = 2.0 if i < 6 else 3.0
            x = outer * factor
            call(x.detach() if detached else x)
            assert w.grad.tolist() == [factor] * 3
            assert outer.grad is None if detached else outer.grad.tolist() == [factor] * 3

    with pytest.raises(CaptureError, match=r"that made tensor 0 of its arguments.*detach\(\)"):
        loop(False)
    loop(True)
    assert call.replayed >= 6


def test_hooks_of_an_argument():
    w = torch.full((3,), 2.0).to("xla").requires_grad_()
    step = spmd.compile(lambda x: torch.autograd.grad((w * x * x).sum(), x)[0], capture=True)
    for i in range(8):
        x = torch.ones(3).to("xla").requires_grad_()
        if i > 4:
            x.register_hook(lambda gradient: gradient * 10)
        assert step(x).tolist() == [40.0 if i > 4 else 4.0] * 3
    assert step.replayed == 3


def test_an_argument_of_inference_mode():
    step = spmd.compile(lambda x: x.add_(1), capture=True)
    for _ in range(4):
        assert step(torch.ones(3).to("xla")).tolist() == [2.0] * 3
    with torch.inference_mode():
        x = torch.ones(3).to("xla")
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        step(x)


def test_parameters_and_other_leaves_are_told_apart():
    step = spmd.compile(lambda x: x * (2 if isinstance(x, nn.Parameter) else 3), capture=True)
    for _ in range(4):
        x = torch.ones(3).to("xla").requires_grad_()
        assert step(x).tolist() == [3.0] * 3
        assert step(nn.Parameter(x.detach())).tolist() == [2.0] * 3
    assert step.replayed == 4
