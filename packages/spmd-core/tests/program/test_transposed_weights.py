"""Products read split weights in the order of memory, not their transposes, on CPUs."""

import re

import pytest
import torch
from recorded_graphs import graph_of, rewritten

import spmd_core as spmd
from spmd_core import debugging
from spmd_core.ops.registry import TransposedRight
from spmd_core.program.passes.transposed_weights import transposed_weights
from spmd_core.program.target import Replicated

ROWS, INPUTS, OUTPUTS = 16, 24, 32


def hinted(tensor, **options):
    """The products that read what was transposed, as shapes of their second matrices."""
    graph = rewritten(transposed_weights, graph_of(tensor), **options)
    found = [op for op in graph.ops if op.hint == TransposedRight()]
    return [op.operands[op.entry.traits.right].spec.shape for op in found]


def fsdp_mesh():
    num = spmd.global_runtime_device_count()
    if num < 2:
        pytest.skip("one device splits nothing")
    return spmd.Mesh(range(num), (num,), ("fsdp",))


def split(shape, dims=("fsdp", None)):
    weight = torch.randn(shape).to("xla")
    spmd.mark_sharding(weight, fsdp_mesh(), dims)
    return weight


def test_which_products_do() -> None:
    weight = split((OUTPUTS, INPUTS))
    x, bias = torch.randn(ROWS, INPUTS).to("xla"), torch.randn(OUTPUTS).to("xla")
    for transpose in (torch.t, lambda w: w.T, lambda w: w.permute(1, 0), lambda w: w.mT):
        assert hinted(x @ transpose(weight)) == [(OUTPUTS, INPUTS)]
    assert hinted(torch.addmm(bias, x, weight.t(), beta=0.5)) == [(OUTPUTS, INPUTS)]
    assert hinted(weight @ x.t()) == [(ROWS, INPUTS)]
    assert hinted(x @ weight.t(), platform="tpu") == []
    assert hinted(x @ weight.t(), replicated_part=Replicated.EVERYTHING) == []
    assert hinted(x.t().contiguous().t() @ weight.t().contiguous()) == []


def test_other_orders_of_a_square_are_left_alone() -> None:
    weight = split((OUTPUTS, OUTPUTS))
    x = torch.randn(ROWS, OUTPUTS).to("xla")
    for change in (lambda w: w.flip(0), lambda w: w.roll(1, 1), torch.abs):
        assert hinted(x @ change(weight)) == []
    assert hinted(x @ weight.flip(0).t()) == [(OUTPUTS, OUTPUTS)]


def test_weights_that_several_products_read_are_left_alone() -> None:
    weight = split((OUTPUTS, INPUTS))
    x, y = torch.randn(ROWS, INPUTS).to("xla"), torch.randn(ROWS, OUTPUTS).to("xla")
    assert hinted(x @ weight.t() + y) == [(OUTPUTS, INPUTS)]  # the sum is no product
    assert hinted((y @ weight) @ weight.t()) == []
    assert hinted((y.bfloat16() @ weight.bfloat16()) @ weight.t().bfloat16()) == []
    assert hinted((x @ weight.t()) @ weight.t().t()) == []
    assert hinted((x @ weight.t()) @ torch.ones(OUTPUTS, 2, device="xla")) == [(OUTPUTS, INPUTS)]


def test_fsdp_frees_gathered_weights_after_forward() -> None:
    """Forward and backward of GPT-2's products would share the gathers of all weights."""
    mesh, widths = fsdp_mesh(), (64, 96)  # in turns, so that no layer is repeated
    weights = [torch.randn(widths[i % 2], widths[1 - i % 2]).to("xla") for i in range(6)]
    x = torch.randn(256, widths[0]).to("xla")
    for tensor in (*weights, x):
        spmd.mark_sharding(tensor, mesh, ("fsdp", None))
    for weight in weights:
        weight.requires_grad_()
        x = (x @ weight).tanh()
    x.sum().backward()
    text = debugging.hlo(*(weight.grad for weight in weights))
    gathers = re.findall(r" = f32\[(?:64,96|96,64)\]\S* all-gather\(", text)
    assert len(gathers) == len(weights) + len(weights[1:])  # x has no gradient


def gradients(result, inputs):
    return torch.autograd.grad(result.square().sum(), inputs)


def of_devices(run, *shapes):
    """What a function computes of tensors of these shapes, on xla and by eager torch."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) / 8 for shape in shapes]
    for mine, right in zip(run(*(x.to("xla") for x in values)), run(*values), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), right.detach(), rtol=1e-4, atol=1e-5)


MARKS = {
    "rows": (("fsdp",), (("fsdp", None),)),
    "columns": (("fsdp",), ((None, "fsdp"),)),
    "rows and columns": (("fsdp", "tensor"), (("fsdp", "tensor"),)),
    "weight and data": (("fsdp", "tensor"), (("tensor", None), ("fsdp", None))),
    "one axis": (("fsdp",), (("fsdp", None), ("fsdp", None))),
}


@pytest.mark.parametrize("sizes", [(16, 24, 32), (15, 9, 13)])
@pytest.mark.parametrize("marks", MARKS)
def test_values_and_gradients_are_those_of_eager_torch(marks, sizes) -> None:
    axes, specs = MARKS[marks]
    num = spmd.global_runtime_device_count()
    if num < 2 ** len(axes):
        pytest.skip("needs more devices")
    shape = (num,) if len(axes) == 1 else (num // 2, 2)
    mesh = spmd.Mesh(range(num), shape, axes)
    rows, inputs, outputs = sizes

    def marked(*tensors):
        if tensors[0].device.type == "xla":
            for tensor, spec in zip(tensors, specs):
                spmd.mark_sharding(tensor, mesh, spec)
        return tensors

    def product(weight, x):
        weight, x = marked(weight, x)
        return [x @ weight.t()]

    def sum_and_product(weight, x, bias):
        weight, x = marked(weight, x)
        return [torch.addmm(bias, x, weight.t(), beta=2, alpha=0.5)]

    def gradient_of_input(weight, x):
        weight, x = marked(weight, x)
        x.requires_grad_()
        y = x.exp() @ weight.t()
        if y.device.type == "xla":
            spmd.sync()  # what follows is a program of its own
        return gradients(y, [x])

    def both_ways(weight, x):
        weight, x = marked(weight, x)
        weight.requires_grad_()
        x.requires_grad_()
        y = (x @ weight.t()).tanh() @ weight
        return [y, *gradients(y, [weight, x])]

    of_devices(product, (outputs, inputs), (rows, inputs))
    of_devices(sum_and_product, (outputs, inputs), (rows, inputs), (outputs,))
    of_devices(gradient_of_input, (outputs, inputs), (rows, inputs))
    of_devices(both_ways, (outputs, inputs), (rows, inputs))


def test_gradients_of_gradients_in_a_scan() -> None:
    mesh = fsdp_mesh()

    def run(weights, x):
        if weights.device.type == "xla":
            spmd.mark_sharding(weights, mesh, (None, "fsdp", None))
            y, _ = spmd.scan(lambda y, w: ((y @ w.t()).tanh(), None), x, weights)
        else:
            y = x
            for w in weights:
                y = (y @ w.t()).tanh()
        return [y]

    of_devices(run, (3, INPUTS, INPUTS), (ROWS, INPUTS))

    def twice(weights, x):
        weights.requires_grad_()
        (y,) = run(weights, x)
        (grad,) = torch.autograd.grad(y.square().sum(), [weights], create_graph=True)
        return [grad, *torch.autograd.grad(grad.square().sum(), [weights])]

    of_devices(twice, (3, INPUTS, INPUTS), (ROWS, INPUTS))


def test_bfloat16_and_integers() -> None:
    mesh = fsdp_mesh()
    for dtype in (torch.bfloat16, torch.int64):
        values = [torch.randint(-8, 8, shape).to(dtype) for shape in ((32, 24), (16, 24))]
        weight, x = (value.to("xla") for value in values)
        spmd.mark_sharding(weight, mesh, ("fsdp", None))
        assert torch.equal((x @ weight.t()).cpu(), values[1] @ values[0].t())  # exact


def test_a_local_product_of_a_manual_region() -> None:
    mesh = fsdp_mesh()
    weight, x = split((OUTPUTS, INPUTS)), torch.randn(ROWS, INPUTS).to("xla")
    product = spmd.shard_map(
        lambda w, x: x @ w.t(), mesh, in_specs=(("fsdp", None), ()), out_specs=(None, "fsdp")
    )
    made = product(weight, x)
    assert hinted(made) == []
    torch.testing.assert_close(made.cpu(), x.cpu() @ weight.cpu().t(), rtol=1e-5, atol=1e-5)


def test_the_gathered_weight_is_not_transposed() -> None:
    mesh = fsdp_mesh()
    weight, x = torch.randn(INPUTS, OUTPUTS).to("xla"), torch.randn(ROWS, OUTPUTS).to("xla")
    spmd.mark_sharding(weight, mesh, ("fsdp", None))
    spmd.mark_sharding(x, mesh, ("fsdp", None))
    y = x @ weight.t()
    spmd.mark_sharding(y, mesh, ("fsdp", None))
    text = debugging.hlo(y)
    gathers = re.findall(r"f32\[(\d+),(\d+)\]\{([\d,]+)\S* all-gather\(", text)
    assert gathers == [(str(INPUTS), str(OUTPUTS), "1,0")]
    assert " transpose(" not in text
