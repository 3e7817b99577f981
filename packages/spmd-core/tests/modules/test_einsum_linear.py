"""The linear layer as one contraction: values, gradients, autocast, traces, replacing layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import spmd_core as spmd
from spmd_core.modules import einsum_linear
from spmd_core.program import compile_cache

pytestmark = pytest.mark.one_device


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 1, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_values_and_gradients_of_every_order(shape, bias, device):
    x, weight, b = torch.randn(shape), torch.randn(5, 4), torch.randn(5) if bias else None
    results = []
    for function, where in ((F.linear, "cpu"), (torch.ops.xla.einsum_linear_forward, device)):
        given = [None if t is None else t.to(where).requires_grad_() for t in (x, weight, b)]
        out = function(*given)
        wanted = [t for t in given if t is not None]
        first = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
        results.append([t.detach().cpu() for t in (out, *first, *second)])
    for got, right in zip(*results[::-1]):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_only_the_gradients_that_are_needed(device):
    x, weight = torch.randn(2, 3, 4).to(device), torch.randn(5, 4).to(device).requires_grad_()
    torch.ops.xla.einsum_linear_forward(x, weight, None).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(
        weight.grad.cpu(), x.cpu().sum((0, 1)).expand(5, 4), rtol=1e-5, atol=1e-5
    )
    grad = torch.randn(2, 3, 5).to(device)
    got = torch.ops.xla.einsum_linear_backward(grad, x, weight.detach(), None, True, False, False)
    assert got[1] is None and got[2] is None
    torch.testing.assert_close(
        got[0].cpu(), grad.cpu() @ weight.detach().cpu(), rtol=1e-5, atol=1e-5
    )


def test_no_dim_is_merged(mesh_2d):
    x = spmd.mark_sharding(torch.randn(8, 4, 6).to("xla"), mesh_2d, ("a", "b"))
    layer = einsum_linear.EinsumLinear(6, 4).to("xla")
    spmd.sync()
    out = layer(x)
    spmd.sync()
    program = compile_cache.newest()
    assert [n.entry.name for n in program.graph.nodes] == [
        "aten::linear"
    ] and "reshape" not in program.lowered.stage.as_text().split("dot_general")[0]
    torch.testing.assert_close(
        out.detach().cpu(),
        F.linear(x.cpu(), layer.weight.detach().cpu(), layer.bias.detach().cpu()),
        rtol=2e-5,
        atol=1e-5,
    )


def test_autocast():
    layer, x = einsum_linear.EinsumLinear(4, 4).to("xla"), torch.randn(2, 4).to("xla")
    with torch.autocast("xla", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32


def test_traces_keep_the_operators():
    def loss(x, weight, bias):
        out = torch.ops.xla.einsum_linear_forward(x, weight, bias)
        return torch.autograd.grad(out.sum(), [x, weight, bias])

    given = [
        torch.randn(2, 3, 4).requires_grad_(),
        torch.randn(5, 4).requires_grad_(),
        torch.randn(5).requires_grad_(),
    ]
    graph = make_fx(loss, tracing_mode="fake")(*given)
    names = {str(node.target) for node in graph.graph.nodes}
    assert {"xla.einsum_linear_forward.default", "xla.einsum_linear_backward.default"} <= names
    for got, right in zip(graph(*given), torch.autograd.grad(F.linear(*given).sum(), given)):
        torch.testing.assert_close(got, right)
    on_device = graph(*(t.detach().to("xla") for t in given))
    torch.testing.assert_close(on_device[1].cpu(), graph(*given)[1])
    with FakeTensorMode():
        out = torch.ops.xla.einsum_linear_forward(torch.empty(2, 4), torch.empty(5, 4), None)
        assert out.shape == (2, 5)
        with pytest.raises(
            RuntimeError, match=r"got \(2, 3\) and \(5, 4\). Make these two sizes equal"
        ):
            torch.ops.xla.einsum_linear_forward(torch.empty(2, 3), torch.empty(5, 4), None)


def test_layers_are_replaced_and_nothing_else():
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.ModuleDict({"inner": nn.Linear(4, 4, bias=False)}),
        nn.MultiheadAttention(4, 2),
        nn.ReLU(),
    )
    model.eval()
    calls = []
    model[0].register_forward_hook(lambda *args: calls.append(1))
    before, state = dict(model.named_parameters()), model.state_dict()
    x = torch.randn(3, 4)
    right = model[1]["inner"](model[0](x))
    assert einsum_linear.apply_einsum_linear(model) is model
    assert type(model[0]) is type(model[1]["inner"]) is einsum_linear.EinsumLinear
    assert type(model[2].out_proj) is not einsum_linear.EinsumLinear  # not exactly nn.Linear
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    torch.testing.assert_close(model[1]["inner"](model[0](x)), right)
    assert calls == [1, 1] and not model[0].training and list(model.state_dict()) == list(state)
    assert type(einsum_linear.apply_einsum_linear(nn.Linear(2, 2))) is einsum_linear.EinsumLinear


def test_a_model_trains_as_before():
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        if device == "xla":
            model = einsum_linear.apply_einsum_linear(model).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 24).reshape(2, 3, 4).to(device)).square().mean().backward()
            optimizer.step()
        results.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=1e-6)
