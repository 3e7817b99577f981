"""Gradients of gradients through marks, marked modules and FSDP units, against eager torch."""

import copy

import pytest
import torch
from tiers import crossed
from torch import nn
from torch.func import functional_call

import spmd_core as spmd

pytestmark = pytest.mark.one_device


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1)
    )


def marked(net: nn.Module, mesh: spmd.Mesh) -> nn.Module:
    for p in net.to("xla").parameters():
        spmd.mark_sharding(p, mesh, ("a",))
    return net


def gathered_in_units(net: nn.Module, mesh: spmd.Mesh) -> nn.Module:
    for layer in net.to("xla"):
        if isinstance(layer, nn.Linear):
            spmd.fully_shard(layer, mesh=mesh, axis="a")
    return spmd.fully_shard(net, mesh=mesh, axis="a")


SHARDED = {"marked": marked, "fully_shard": gathered_in_units}


def penalised(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss with the squared norm of the gradients of parameters and input."""
    out = net(x).square().mean()
    grads = torch.autograd.grad(out, [x, *net.parameters()], create_graph=True)
    return out + sum(g.square().sum() for g in grads)


def adapted(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss after one step of descent, as in MAML."""
    named = dict(net.named_parameters())
    inner = functional_call(net, named, (x,)).square().mean()
    grads = torch.autograd.grad(inner, list(named.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(named.items(), grads)}
    return functional_call(net, fast, (x + 1,)).square().mean()


def accumulated(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss of gradients that `backward(create_graph=True)` left in `.grad`."""
    net(x).square().mean().backward(create_graph=True)
    grads = [p.grad for p in net.parameters()]
    for p in net.parameters():
        p.grad = None
    return sum(g.square().sum() for g in grads)


@pytest.mark.parametrize(
    ("loss", "sharded"), crossed([penalised, adapted, accumulated], [*SHARDED])
)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_second_derivatives(loss, sharded, mesh_2d):
    eager = model()
    net = SHARDED[sharded](copy.deepcopy(eager), mesh_2d)
    data = torch.randn(8, 6)
    x, y = data.clone().requires_grad_(), data.to("xla").requires_grad_()
    spmd.mark_sharding(y, mesh_2d, ("b",))
    expected, result = loss(eager, x), loss(net, y)
    expected.backward()
    result.backward()
    torch.testing.assert_close(result.cpu(), expected.detach())
    torch.testing.assert_close(y.grad.cpu(), x.grad, rtol=1e-4, atol=1e-6)
    for p, q in zip(net.parameters(), eager.parameters()):
        # accumulated() leaves the last bias, which only the first derivative reaches, at None.
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("which", ["leaf", "intermediate", "input of the graph"])
def test_a_product_with_the_hessian(which, mesh_1d):
    data, direction = torch.linspace(0.5, 2, 16), torch.linspace(-1, 1, 16)
    products = []
    for device in ("cpu", "xla"):
        x = data.to(device).requires_grad_()
        y = x * 2
        target = {"leaf": x, "intermediate": y, "input of the graph": x}[which]
        if device == "xla":
            spmd.mark_sharding(target, mesh_1d, ("x",))
        (first,) = torch.autograd.grad((y**3).sum(), target, create_graph=True)
        assert first.requires_grad
        (product,) = torch.autograd.grad(first, x, direction.to(device))
        products.append(product.cpu())
    torch.testing.assert_close(*products)


def test_the_gradient_of_a_gradient_is_sharded_like_the_parameter(mesh_1d):
    w = torch.arange(1.0, 17.0).to("xla").requires_grad_()
    spmd.mark_sharding(w, mesh_1d, ("x",))
    loss = (w**3).sum()
    (gradient,) = torch.autograd.grad(loss, w, create_graph=True)
    assert gradient.sharding == w.sharding
    (loss + gradient.square().sum()).backward()
    assert w.grad.sharding == w.sharding
