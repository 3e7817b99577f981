"""Tests torch_xla.experimental.scan and torch_xla.experimental.fori_loop."""

import inspect

import pytest
import torch

import torch_xla
from torch_xla.experimental.fori_loop import fori_loop, while_loop
from torch_xla.experimental.scan import scan, tree_flatten_none, tree_unflatten_none

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_scan_and_its_gradients():
    x = X.to("xla").requires_grad_()
    last, sums = scan(lambda c, x: (c + x, {"sum": c + x, "no": None}), x[0] * 0, x)
    torch_xla.sync()
    torch.testing.assert_close(last.detach().cpu(), X.sum(0))
    torch.testing.assert_close(sums["sum"].detach().cpu(), X.cumsum(0))
    assert sums["no"] is None
    sums["sum"].sum().backward()
    assert x.grad.tolist() == [[3.0] * 4, [2.0] * 4, [1.0] * 4]


def test_errors_of_scan():
    parameters = inspect.signature(scan).parameters
    assert [*parameters] == ["fn", "init", "xs", "partition_fn", "is_fn_pure"]
    x = X.to("xla")
    with pytest.raises(ValueError, match="must be callable"):
        scan(None, x[0], x)
    with pytest.raises(ValueError, match="must have a tensor"):
        scan(lambda c, x: (c, x), x[0], ())
    with pytest.raises(ValueError, match="one length"):
        scan(lambda c, x: (c, None), x[0], (x, x[:2]))
    for wrong in (lambda c, x: (c[:2], None), lambda c, x: (c.double(), None)):
        with pytest.raises(AssertionError, match="Convert one of them, or return it as y"):
            scan(wrong, x[0], x)
    with pytest.raises(RuntimeError, match="a write in place to the carry"):
        scan(lambda c, x: (c.add_(x), None), x[0], x)
    with pytest.warns(UserWarning, match=r"torch\.utils\.checkpoint inside of"):
        scan(lambda c, x: (c + x, None), x[0], x, partition_fn=lambda *args: None)


def test_none_has_no_leaf():
    tree = (1, [None, {"a": 2}], None)
    leaves, form = tree_flatten_none(tree)
    assert leaves == [1, 2]
    assert tree_unflatten_none([3, 4], form) == (3, [None, {"a": 4}], None)


def test_loops_over_numbers():
    one, two = torch.ones(2, device="xla"), torch.full((2,), 2.0, device="xla")
    assert fori_loop(0, 3, lambda i, x: x + i, one).tolist() == [4, 4]
    lower, upper = torch.tensor([0]).to("xla"), torch.tensor([3]).to("xla")
    step, total = fori_loop(lower, upper, lambda step, total: (step, total + step), two, one)
    assert step.tolist() == [2, 2] and total.tolist() == [7, 7]
    i, x = while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.zeros((), device="xla"), one)
    )
    assert i.item() == 3 and x.tolist() == [8, 8]
