"""On a CPU, gradients of weights are computed in the order of recording, not at the end."""

import torch
from recorded_graphs import graph_of, names, rewritten
from torch import nn

import spmd_core as spmd
from spmd_core.program.ir import BarrierEntry
from spmd_core.program.passes.recorded_order import recorded_order


def waits_of(*held):
    """For each product that waits, how many of its operands do, and what it waits for."""
    ops = rewritten(recorded_order, graph_of(*held)).ops
    found = []
    for barrier in (op for op in ops if isinstance(op.entry, BarrierEntry)):
        read = {x.result for op in ops for x in op.operands if x.op is barrier}
        found.append((len(read), barrier.operands[len(read) :]))
    return found


def gradients_of(loss, *modules):
    loss.backward()
    return [p.grad for module in modules for p in module.parameters()]


def test_products_wait_for_the_gradients_of_weights(mesh_1d):
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh()).to("xla")
    for parameter in model[2].parameters():
        spmd.mark_sharding(parameter, mesh_1d, ())
    last, x = nn.Linear(16, 4).to("xla"), torch.randn(16, 8).to("xla").requires_grad_()
    waits = waits_of(*gradients_of(last(model(x)).square().sum(), model, last), x.grad)
    shapes = [[value.spec.shape for value in waited] for _, waited in waits]
    # Each product of the backward waits for the gradients of the layer behind it.
    assert shapes == [[(4, 16), (4,)], [(16, 32), (16,)]]


def test_products_wait_for_sums_of_gradients():
    """Of a layer that is used twice, as by two microbatches: the sum is due, not its terms."""
    first, second = nn.Linear(8, 32).to("xla"), nn.Linear(32, 16).to("xla")
    xs = [torch.randn(4, 8).to("xla") for _ in range(2)]
    loss = sum(torch.tanh(second(torch.tanh(first(x)))).sum() for x in xs)
    waits = waits_of(*gradients_of(loss, first, second))
    waited = [value.op.entry.name for _, values in waits for value in values]
    assert waited.count("aten::add.Tensor") == 2  # of the weight and of the bias of `second`


def test_transposed_first_factors_wait_though_they_are_inputs():
    """As in a loop's body, to which what forward has kept is an input."""
    x, first = torch.randn(16, 8).to("xla"), nn.Parameter(torch.randn(8, 32).to("xla"))
    second = nn.Parameter(torch.randn(32, 4).to("xla"))
    torch.mm(torch.tanh(torch.mm(x, first)), second).square().sum().backward()
    ops = rewritten(recorded_order, graph_of(first.grad, second.grad)).ops
    products = [op for op in ops if op.entry.name == "aten::mm"]
    *_, of_first = [op for op in products if op.entry.spec.shape == (8, 32)]
    barrier = of_first.operands[0].op
    assert isinstance(barrier.entry, BarrierEntry)
    assert barrier.operands[of_first.operands[0].result].op.operands[0].op is None  # x


def test_programs_without_gradients_wait_for_nothing():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("xla"), torch.randn(2, 8)
    with torch.no_grad():
        graph = graph_of(model(x.to("xla")))
    assert rewritten(recorded_order, graph) is graph


def test_only_programs_for_cpus_wait():
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to("xla")
    graph = graph_of(*gradients_of(layer(torch.randn(2, 8).to("xla")).sum(), layer))
    assert "optimization_barrier" in names(rewritten(recorded_order, graph))
    assert rewritten(recorded_order, graph, "tpu") is graph


def test_values_do_not_change(num_devices):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(16, 8)
    expected = [*torch.autograd.grad(model(x).square().sum(), [*model.parameters()])]
    ours = model.to("xla")
    ours(x.to("xla")).square().sum().backward()
    for got, right in zip(ours.parameters(), expected):
        torch.testing.assert_close(got.grad.cpu(), right, rtol=1e-4, atol=1e-4)
