"""Branches against Python's `if`, with their gradients."""

import pytest
import torch
from control_flow.eager_loops import both, on
from torch.nn import functional

import spmd_core as spmd
from spmd_core.control_flow import cond
from spmd_core.errors import ControlFlowError

X = torch.linspace(-1, 1, 30).reshape(6, 5)


@pytest.mark.parametrize("sign", [1, -1])
def test_both_branches_with_gradients_of_gradients(sign, mesh_2d):
    def compute(device, x, w, b):
        if device == "xla":
            spmd.mark_sharding(x, mesh_2d, ("a", "b"))
            spmd.mark_sharding(w, mesh_2d, ("b", "a"))
            spmd.mark_sharding(b, mesh_2d, ("a",))
        outside = w * 2

        def true_fn(x, more):
            return torch.tanh(x @ outside), more["b"] * 3

        def false_fn(x, more):
            return (x * x) @ w.sin(), more["b"].softmax(0)

        pred = ((x + 2) * sign).sum() > 0
        y, z = on(device)[1](pred, true_fn, false_fn, x, {"b": b})
        first = torch.autograd.grad(
            y.square().sum() + z.square().sum(), (x, w, b), create_graph=True
        )
        second = torch.autograd.grad(
            sum(g.square().sum() for g in first), (x, w, b), allow_unused=True
        )
        second = [torch.zeros_like(t) if g is None else g for g, t in zip(second, (x, w, b))]
        return [y, z, *first, *second]

    both(
        compute,
        X,
        torch.linspace(-1, 1, 15).reshape(5, 3),
        torch.arange(3.0) / 3,
        rtol=1e-3,
        atol=1e-4,
    )


def test_a_branch_runs_alone():
    ones = torch.ones(3, device="xla")
    table = torch.arange(3.0, device="xla")
    far = torch.tensor([0, 7]).to("xla")
    spmd.config.check_indices = True
    for pred in (True, False):
        rows = cond(torch.tensor(pred).to("xla"), lambda i: table[i], lambda i: table[i * 0], far)
        if pred:
            with pytest.raises(IndexError, match="in spmd::cond"):
                rows.cpu()
        else:
            assert rows.tolist() == [0, 0]
    assert cond(True, lambda x: x + 1, lambda x: x, ones).tolist() == [2, 2, 2]
    assert cond(ones.sum() > 0, lambda: None, lambda: None) is None


def test_dropout_in_a_branch():
    x = torch.ones(300, device="xla", requires_grad=True)
    y = cond(x.sum() > 0, lambda x: functional.dropout(x, 0.5), lambda x: x, x)
    (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(grad.cpu(), y.detach().cpu())
    with pytest.raises(ControlFlowError, match="pass them as operands"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_what_cond_refuses():
    x, outside = X.to("xla"), torch.zeros(5, device="xla")
    pred = x.sum() > 0
    for wrong in (x > 0, x.sum(), torch.tensor(True), 1.0):
        with pytest.raises(TypeError, match=r"Write a comparison, with .all\(\) or .any\(\)"):
            cond(wrong, lambda x: x, lambda x: x, x)
    with pytest.raises(TypeError, match="Return the same lists, tuples and dicts"):
        cond(pred, lambda x: (x, x), lambda x: x, x)
    with pytest.raises(TypeError, match="got float64"):
        cond(pred, lambda x: x, lambda x: x.double(), x)
    with pytest.raises(ControlFlowError, match="the false branch of a cond computes new tensors"):
        cond(pred, lambda x: x, lambda x: outside.add_(1) + x, x)
    mapped = spmd.shard_map(
        lambda x: cond(pred, torch.sin, torch.cos, x),
        spmd.Mesh(
            range(spmd.global_runtime_device_count()), (spmd.global_runtime_device_count(),), ("x",)
        ),
        [()],
        (),
    )
    with pytest.raises(ControlFlowError, match="Call shard_map inside of its function"):
        mapped(x)


def test_a_loss_that_lives_on_keeps_nothing_of_its_backward():
    weight = torch.eye(64).to("xla").requires_grad_()
    x = torch.ones(2, 64, device="xla") * 2
    y = cond(x.sum() > 0, lambda x: torch.tanh(x @ weight), lambda x: x @ weight, x)
    loss = y.sum()
    loss.backward()
    with torch.no_grad():
        weight -= weight.grad
    weight.grad = x = y = None
    spmd.sync()
    program = spmd.metrics.programs()[-1]
    assert program.output_bytes - program.alias_bytes < 64  # the loss, and the result of checks
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
