"""torch's own loops and branches on tensors of the device."""

import pytest
import torch
from control_flow.eager_loops import both
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops.cond import cond_op

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_torch_cond_and_its_gradient():
    def compute(device, x):
        results = []
        for sign in (1, -1):
            pred, true_fn, false_fn = (x.abs() * sign).sum() > 0, torch.sin, lambda x: x * 2
            if device == "xla":
                y = torch.cond(pred, true_fn, false_fn, (x,))
            else:
                y = (true_fn if pred else false_fn)(x)
            results += [y, *torch.autograd.grad(y.sum(), x)]
        return results

    both(compute, X)
    assert torch.equal(torch.cond(X.sum() > 99, torch.sin, torch.cos, (X,)), X.cos())  # torch's own
    (y,) = cond_op(
        torch.tensor(True).to("xla"), lambda x: (x.sin(),), lambda x: (x,), (X.to("xla"),)
    )
    torch.testing.assert_close(y.cpu(), X.sin())


def test_torch_while_loop():
    i, y = torch.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * 1.5), (0, X.to("xla")))
    assert i.item() == 5
    torch.testing.assert_close(y.cpu(), X * 1.5**5)
    with torch.no_grad():
        (y,) = torch.ops.higher_order.while_loop(
            lambda x, most: x.sum() < most,
            lambda x, most: (x * 2,),
            (torch.ones((), device="xla"),),
            (torch.tensor(10.0).to("xla"),),
        )
    assert y.item() == 16


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_torch_while_loop(compiled, num_devices):
    def grow(x, w):
        return torch.while_loop(lambda x: x.sum() < 100, lambda x: (x * w + 1,), (x,))[0]

    found = []
    for device in ("cpu", "xla"):
        x, w = torch.ones(3).to(device), torch.tensor([2.0, 1.5, 1.2]).to(device)
        x, w = x.requires_grad_(), w.requires_grad_()
        backend = "openxla" if device == "xla" else "eager"
        call = torch.compile(grow, backend=backend, fullgraph=True) if compiled else grow
        y = call(x, w)
        y.square().sum().backward()
        found.append([t.detach().cpu() for t in (y, x.grad, w.grad)])
    for right, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize(("dim", "reverse"), [(0, False), (1, True), (-1, False)])
def test_torch_scan(dim, reverse):
    init = torch.zeros(4 if dim == 0 else 3, device="xla")
    last, ys = scan(lambda c, x: (c + x, (c + x) * 2), init, X.to("xla"), dim=dim, reverse=reverse)
    right = X.flip(dim).cumsum(dim).flip(dim) if reverse else X.cumsum(dim)
    torch.testing.assert_close(last.cpu(), X.sum(dim))
    torch.testing.assert_close(ys.cpu(), right * 2)


@pytest.mark.parametrize("dim", [1, -2, 2, -1])
def test_dims_of_torch_scan_are_those_of_xs(dim):
    """A result of fewer dims has the loop's dim first; a negative dim counts from the end of xs."""
    x = torch.randn(4, 5, 3)
    slices = x.movedim(dim, 0)
    init = torch.zeros(slices.shape[1:], device="xla")
    _, (sums, products) = scan(
        lambda c, x: (c + x, (x.sum(), (c + x) * x)), init, x.to("xla"), dim=dim
    )
    torch.testing.assert_close(sums.cpu(), slices.sum((1, 2)))
    torch.testing.assert_close(products.cpu(), x.cumsum(dim) * x)
    y = associative_scan(torch.add, x.to("xla"), dim)
    torch.testing.assert_close(y.cpu(), x.cumsum(dim))
    for loop in (
        lambda d: scan(lambda c, x: (c, x), init, x.to("xla"), dim=d),
        lambda d: associative_scan(torch.add, x.to("xla"), d),
    ):
        with pytest.raises(IndexError, match=r"Give one in \[-3, 2\]"):
            loop(3)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_torch_associative_scan(size):
    def compute(device, x):
        y = associative_scan(torch.add, x, 0) if device == "xla" else x.cumsum(0)
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    both(compute, torch.randn(size, 2))


def test_an_associative_scan_of_products_of_matrices():
    matrices = torch.randn(5, 3, 3) / 2
    products = [matrices[0]]
    for each in matrices[1:]:
        products.append(products[-1] @ each)
    y = associative_scan(torch.matmul, matrices.to("xla"), 0, combine_mode="generic")
    torch.testing.assert_close(y.cpu(), torch.stack(products))
    with pytest.raises(ValueError, match="Write 'generic' for a function of whole slices"):
        associative_scan(torch.matmul, matrices.to("xla"), 0, combine_mode="other")


def test_compiled_functions_with_branches(num_devices):
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    x = torch.ones(3, device="cpu")
    assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x), x.sin())
    y = torch.compile(function, backend="openxla", fullgraph=True)(-x.to("xla"))
    torch.testing.assert_close(y.cpu(), (-x).cos())
