"""Loops whose length a value decides, and loops over numbers, against Python's."""

import pytest
import torch
from control_flow.eager_loops import both

import spmd_core as spmd
from spmd_core.control_flow import fori_loop, while_loop

X = torch.linspace(0.5, 1, 12).reshape(3, 4)


@pytest.mark.parametrize("spec", [("a", "b"), (("a", "b"), None), (None, "a")])
def test_a_while_loop_on_split_tensors(spec, mesh_2d):
    w = torch.linspace(0.1, 0.6, 15).reshape(5, 3) / 2
    x = torch.ones(6, 5)
    expected, steps = x, 0
    while expected.norm() > 0.1:
        expected, steps = torch.tanh(expected @ w @ w.T), steps + 1
    mine = spmd.mark_sharding(x.to("xla"), mesh_2d, spec)
    w_xla = spmd.mark_sharding(w.to("xla"), mesh_2d, ("b", "a"))
    result, count = while_loop(
        lambda state: state[0].norm() > 0.1,
        lambda state: (torch.tanh(state[0] @ w_xla @ w_xla.T), state[1] + 1),
        (mine, torch.zeros((), dtype=torch.int64, device="xla")),
    )
    assert count.item() == steps > 2
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_what_while_loops_refuse():
    x = X.to("xla")
    with pytest.raises(TypeError, match=r"Write a comparison, with .all\(\) or .any\(\)"):
        while_loop(lambda x: x < 50, lambda x: x * 2, x)
    with pytest.raises(TypeError, match=r"got float32\[4\] for float32\[3, 4\]"):
        while_loop(lambda x: x.sum() < 50, lambda x: x[0], x)
    with pytest.raises(TypeError, match="Give what its condition depends on"):
        while_loop(lambda x: torch.ones((), device="xla") > 0, lambda x: None, None)


def test_numbers_are_other_ones_in_each_run():
    def step(state):
        i, rows = state
        row = torch.rand(50, device="xla")
        return i + 1, torch.where(torch.arange(4, device="xla")[:, None] == i, row, rows)

    first = (torch.zeros((), dtype=torch.int64, device="xla"), torch.zeros(4, 50, device="xla"))
    torch.manual_seed(0)
    rows = while_loop(lambda state: state[0] < 4, step, first)[1].cpu()
    assert len({tuple(row) for row in rows.tolist()}) == 4
    torch.manual_seed(0)
    assert torch.equal(rows, while_loop(lambda state: state[0] < 4, step, first)[1].cpu())


def test_a_loop_over_numbers_and_its_gradient():
    def compute(device, x):
        def step(i, total):
            return total * x[i] + i

        total = x[0]
        if device == "xla":
            total = fori_loop(1, 3, step, total)
        else:
            for i in range(1, 3):
                total = step(i, total)
        return [total, *torch.autograd.grad(total.square().sum(), x)]

    both(compute, X)
    x = X.to("xla")
    upper = torch.tensor(3).to("xla")
    assert torch.equal(fori_loop(0, upper, lambda i, t: t + x[i], x[0] * 0).cpu(), X.sum(0))
    assert torch.equal(fori_loop(3, 0, lambda i, t: t + x[i], x[0]).cpu(), X[0])
    for bound in (1.5, True, torch.tensor(1.5), torch.tensor([1, 2])):
        with pytest.raises(TypeError, match=r"Write int\(n\), or n.long\(\)"):
            fori_loop(0, bound, lambda i, t: t, x)


def test_indices_are_checked_in_conditions_and_bodies():
    table = torch.arange(10.0, device="xla")
    first = (torch.zeros((), dtype=torch.int64, device="xla"), torch.zeros((), device="xla"))
    spmd.config.check_indices = True
    _, row = while_loop(lambda s: s[0] < 20, lambda s: (s[0] + 5, table[s[0]]), first)
    with pytest.raises(IndexError, match="in spmd::while_loop"):
        row.cpu()
    assert while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 5, table[s[0]]), first)[1].item() == 5


def test_what_a_while_loop_detaches_has_no_gradient():
    w = torch.eye(4).to("xla").requires_grad_()
    x = torch.ones(4).to("xla").requires_grad_()
    halved = while_loop(lambda s: s.sum() > 1, lambda s: s @ w.detach() / 2, x.detach())
    assert not halved.requires_grad and halved.tolist() == [0.25] * 4
    (grad,) = torch.autograd.grad((halved * x).sum(), x)
    assert grad.tolist() == [0.25] * 4
