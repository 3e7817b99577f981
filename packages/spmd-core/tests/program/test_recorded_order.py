"""On a CPU, gradients of weights are computed in the order of recording, not at the end."""

import torch
from torch import nn

import spmd_core as spmd
from spmd_core.program import compile_cache
from spmd_core.program.recorded_order import late_results


def waits_of(function):
    """The shapes of what the products of a function's program wait for."""
    compile_cache.clear()
    held = function()
    spmd.sync()
    del held
    graph = compile_cache.newest().graph
    shapes = [out.shape for node in graph.nodes for out in node.entry.outs]
    return [shapes[number] for wait in late_results(graph).values() for number in wait.values]


def test_products_wait_for_the_gradients_of_weights(mesh_1d):
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh()).to("xla")
    for parameter in model[2].parameters():
        spmd.mark_sharding(parameter, mesh_1d, ())
    x = torch.randn(16, 8).to("xla").requires_grad_()
    found = waits_of(lambda: nn.Linear(16, 4).to("xla")(model(x)).square().sum().backward())
    # Each product of the backward waits for the gradients of the layer behind it.
    assert found == [(4, 16), (4,), (16, 32), (16,)]


def test_products_wait_for_sums_of_gradients():
    """Of a layer that is used twice, as by two microbatches: the sum is due, not its terms."""
    first, second = nn.Linear(8, 32).to("xla"), nn.Linear(32, 16).to("xla")
    xs = [torch.randn(4, 8).to("xla") for _ in range(2)]

    def backward():
        return sum(torch.tanh(second(torch.tanh(first(x)))).sum() for x in xs).backward()

    compile_cache.clear()
    backward()
    spmd.sync()
    graph = compile_cache.newest().graph
    made_by = [node.entry.name for node in graph.nodes for _ in node.entry.outs]
    waited = [made_by[n] for wait in late_results(graph).values() for n in wait.values]
    assert waited.count("aten::add.Tensor") == 2  # of the weight and of the bias of `second`


def test_programs_without_gradients_wait_for_nothing():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("xla"), torch.randn(2, 8)
    with torch.no_grad():
        assert waits_of(lambda: model(x.to("xla"))) == []


def test_values_do_not_change(num_devices):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(16, 8)
    expected = [*torch.autograd.grad(model(x).square().sum(), [*model.parameters()])]
    ours = model.to("xla")
    ours(x.to("xla")).square().sum().backward()
    for got, right in zip(ours.parameters(), expected):
        torch.testing.assert_close(got.grad.cpu(), right, rtol=1e-4, atol=1e-4)
