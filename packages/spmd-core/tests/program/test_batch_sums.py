"""Gradients of split parameters: reduce-scattered where they are sums over a split batch."""

import copy
import re
from pathlib import Path

import pytest
import torch
from recorded_graphs import graph_of, rewritten
from tiers import crossed
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd
from spmd_core.program import compile_cache
from spmd_core.program.ir import Ref
from spmd_core.program.mark_names import MARK
from spmd_core.program.passes.batch_sums import batch_sums


class Tied(nn.Module):
    """A table that is read twice, with a norm between; inputs are token ids (B, T)."""

    def __init__(self, rows=16, width=8, padding_idx=None):
        super().__init__()
        self.table = nn.Embedding(rows, width, padding_idx=padding_idx)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        return F.linear(self.norm(self.table(ids)), self.table.weight)


class Transposed(nn.Module):
    """A layer whose weight has the shape (in, out), as GPT-2's."""

    def __init__(self, size_in, size_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size_in, size_out))
        self.bias = nn.Parameter(torch.randn(size_out))

    def forward(self, x):
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


MODELS = {
    "linear": (lambda: nn.Linear(8, 16), lambda: torch.randn(16, 3, 8)),
    "linear of rows": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16)), None),
    "transposed": (lambda: Transposed(8, 16), lambda: torch.randn(16, 3, 8)),
    "convolution": (lambda: nn.Conv2d(8, 16, 3), lambda: torch.randn(16, 8, 5, 4)),
    "tied": (Tied, lambda: torch.randint(16, (16, 3))),
    # More rows than are looked up.
    "tied, many rows": (lambda: Tied(64, padding_idx=3), lambda: torch.randint(64, (16, 3))),
    "uneven": (lambda: nn.Linear(9, 15), lambda: torch.randn(16, 3, 9)),
}
INPUTS = {"linear of rows": lambda: torch.randint(9, (16, 8))}


def build(name):
    make, data = MODELS[name]
    torch.manual_seed(0)
    return make(), (data or INPUTS[name])()


def loss(model, x):
    x = x if isinstance(model, (Tied, nn.Embedding)) else x.float()
    out = model(x)
    return (out.sin() * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.device)).sum()


def compare(model, x, mesh, batch, spec_of):
    """Checks all gradients against eager torch; returns the text of the compiled program."""
    ours = copy.deepcopy(model).to("xla")
    for parameter in ours.parameters():
        spmd.mark_sharding(parameter, mesh, spec_of(parameter))
    data = spmd.mark_sharding(x.to("xla"), mesh, batch)
    loss(ours, data).backward()
    spmd.sync()
    text = compile_cache.newest().compiled.as_text()
    loss(model, x).backward()
    for got, right in zip(ours.parameters(), model.parameters()):
        torch.testing.assert_close(got.grad.cpu(), right.grad, rtol=1e-4, atol=1e-4)
        assert got.grad.sharding == got.sharding
    return text


def reduced(text, kind):
    """The numbers of elements of the arrays that collectives of a kind return."""
    found = re.findall(rf"= (.*?) {kind}\(", text)
    shapes = [dims for results in found for dims in re.findall(r"f32\[([\d,]*)\]", results)]
    return [torch.Size(map(int, dims.split(","))).numel() if dims else 1 for dims in shapes]


@pytest.mark.parametrize("name", MODELS)
def test_a_split_batch_is_summed_by_reduce_scatters(name, num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    model, x = build(name)
    text = compare(model, x, mesh, ("fsdp",), lambda p: ("fsdp",) if p.dim() > 1 else ())
    largest = max(p.numel() for p in model.parameters())
    if num_devices > 1:
        assert reduced(text, "reduce-scatter")
        assert max(reduced(text, "all-reduce"), default=0) < largest


@pytest.mark.parametrize(
    ("name", "spec"),
    crossed(
        [*MODELS],
        [
            ("fsdp",),
            (None, "fsdp"),
            (("data", "fsdp"),),
            (None, ("data", "fsdp")),
            (("fsdp", "data"),),
            ("data", "fsdp"),
            ("fsdp", "data"),
        ],
        rounds=3,
    ),
)
def test_two_axes_split_the_batch(name, spec, num_devices):
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (2, num_devices // 2), ("data", "fsdp"))
    model, x = build(name)
    text = compare(model, x, mesh, (("data", "fsdp"),), lambda p: spec if p.dim() > 1 else ())
    assert reduced(text, "reduce-scatter")
    largest = max(p.numel() for p in model.parameters())
    if len(spec[-1]) == 2:
        assert max(reduced(text, "all-reduce"), default=0) < largest


@pytest.mark.parametrize("is_bf16", [False, True])
def test_both_axes_of_the_batch_split_the_parameter(is_bf16, num_devices):
    """The sum is scattered over both, under autocast in float32."""
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (2, num_devices // 2), ("outer", "inner"))
    both = ("outer", "inner")
    model, x = nn.Linear(8, 16, bias=False), torch.randn(16, 3, 8)
    ours = copy.deepcopy(model).to("xla")
    spmd.mark_sharding(ours.weight, mesh, (both, None))
    found = {}
    for own, data in ((model, x), (ours, spmd.mark_sharding(x.to("xla"), mesh, (both,)))):
        with torch.autocast(data.device.type, torch.bfloat16, enabled=is_bf16):
            out = own(data)
        out.float().sin().sum().backward()
        found[data.device.type] = own.weight.grad
    text = spmd.debugging.stablehlo(found["xla"])
    of_each = f"{16 // num_devices}x8xf32"
    assert re.findall(r"reduce_scatter.*?-> tensor<(\w+)>", text, re.DOTALL) == [of_each]
    close = {"rtol": 2e-2, "atol": 0.1} if is_bf16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found["xla"].cpu(), found["cpu"], **close)
    assert found["xla"].sharding == ours.weight.sharding


@pytest.mark.parametrize(
    ("name", "spec"),
    crossed(
        [*MODELS],
        [("tensor", "fsdp"), ("fsdp", "tensor"), (("tensor", "fsdp"), None), ("tensor", None)],
        rounds=2,
    ),
)
def test_another_axis_splits_the_parameter_too(name, spec, num_devices):
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (num_devices // 2, 2), ("fsdp", "tensor"))
    model, x = build(name)
    text = compare(model, x, mesh, ("fsdp",), lambda p: spec if p.dim() > 1 else ())
    if name in ("linear", "transposed"):
        assert reduced(text, "reduce-scatter") == [8 * 16 // num_devices] * ("fsdp" in str(spec))
        assert "all-to-all(" not in text


@pytest.mark.parametrize(("rows", "make"), crossed([3, 13, 90], [Tied, nn.Embedding]))
def test_rows_that_another_axis_splits_unevenly(rows, make, num_devices):
    """The batch's axis splits the columns: the parts of the rows have a padding, which is cut."""
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (num_devices // 2, 2), ("tensor", "fsdp"))
    torch.manual_seed(0)
    model, x = make(rows, 8, padding_idx=1), torch.randint(rows, (16, 3))
    spec = ("tensor", "fsdp")
    text = compare(model, x, mesh, ("fsdp",), lambda p: spec if p.dim() > 1 else ())
    assert reduced(text, "reduce-scatter")
    # Gradients that are added up before their reduction.
    ours = copy.deepcopy(model).to("xla")
    for parameter in ours.parameters():
        parameter.grad = None
        spmd.mark_sharding(parameter, mesh, spec if parameter.dim() > 1 else ())
    for part in x.split(8):
        loss(ours, spmd.mark_sharding(part.to("xla"), mesh, ("fsdp",))).backward()
    model.zero_grad()
    for part in x.split(8):
        loss(model, part).backward()
    for got, right in zip(ours.parameters(), model.parameters()):
        torch.testing.assert_close(got.grad.cpu(), right.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [96, 90])
def test_few_rows_that_are_looked_up_are_gathered(rows, num_devices):
    """Instead of a part of the whole table on each device."""
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    torch.manual_seed(0)
    model, x = nn.Embedding(rows, 8, padding_idx=2), torch.randint(rows, (16, 3))
    x[0, 0] = 2
    text = compare(model, x, mesh, ("fsdp",), lambda p: ("fsdp",))
    if num_devices > 1:
        # Of the lookup itself, if the rows divide.
        scattered = [x.numel() * 8 // num_devices] if rows % num_devices == 0 else []
        assert reduced(text, "reduce-scatter") == scattered
        assert max(reduced(text, "all-gather")) <= x.numel() * 8
        assert max(reduced(text, "all-reduce"), default=0) <= x.numel() * 8


@pytest.mark.parametrize("length", [8, 6])
@pytest.mark.parametrize("parts", [(), (None,)])
def test_sequences_are_split_too(parts, length, num_devices):
    """The gradients are sums over batch and sequences; of uneven ones, if need be, otherwise."""
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (2, num_devices // 2), ("fsdp", "context"))
    torch.manual_seed(0)
    x = torch.randint(16, (2, 16, length) if parts else (16, length))
    text = compare(
        Tied(), x, mesh, (*parts, "fsdp", "context"), lambda p: ("fsdp",) if p.dim() > 1 else ()
    )
    if length == 8:
        assert reduced(text, "reduce-scatter")
        assert max(reduced(text, "all-gather")) <= 16 * 8  # the table, and no activation


def test_sequences_of_a_wrapped_module(num_devices):
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (2, num_devices // 2), ("fsdp", "context"))
    model = Tied()
    ours = spmd.fully_shard(copy.deepcopy(model).to("xla"), mesh)
    x = torch.randint(16, (16, 8))
    loss(ours, spmd.mark_sharding(x.to("xla"), mesh, ("fsdp", "context"))).backward()
    spmd.sync()
    text = compile_cache.newest().compiled.as_text()
    assert reduced(text, "reduce-scatter")
    assert max(reduced(text, "all-gather")) <= 16 * 8  # the table, and no activation
    loss(model, x).backward()
    for got, right in zip(ours.parameters(), model.parameters()):
        torch.testing.assert_close(got.grad.cpu(), right.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [(), (None, "fsdp"), ("other",)])
def test_a_batch_that_the_axis_does_not_split(batch, num_devices):
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (2, num_devices // 2), ("other", "fsdp"))
    model, x = build("linear")
    text = compare(model, x, mesh, batch, lambda p: ("fsdp",) if p.dim() > 1 else ())
    assert not reduced(text, "reduce-scatter")


@pytest.mark.parametrize("size", [6, 12])
def test_a_batch_that_does_not_divide(size, num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    model, _ = build("linear")
    compare(
        model, torch.randn(size, 3, 8), mesh, ("fsdp",), lambda p: ("fsdp",) if p.dim() > 1 else ()
    )


def test_activations_are_no_gradients_of_parameters(num_devices):
    """Their products sum over features, whatever axis splits their rows."""
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    a, b = torch.randn(16, 16), torch.randn(16, 16)
    x, w = (t.to("xla").requires_grad_() for t in (a, b))
    spmd.mark_sharding(x, mesh, ("fsdp",))
    hidden = spmd.mark_sharding(x @ w, mesh, ("fsdp",))
    (hidden.sin() @ w).sum().backward()
    spmd.sync()
    assert not reduced(compile_cache.newest().compiled.as_text(), "reduce-scatter")
    p, q = a.requires_grad_(), b.requires_grad_()
    ((p @ q).sin() @ q).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), p.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(w.grad.cpu(), q.grad, rtol=1e-4, atol=1e-4)


def test_second_derivatives_of_a_split_parameter(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    x, w = torch.randn(16, 4, 8), torch.randn(16, 8)

    def penalty(device):
        weight = w.clone().to(device).requires_grad_()
        data = x.to(device)
        if device == "xla":
            spmd.mark_sharding(weight, mesh, ("fsdp",))
            spmd.mark_sharding(data, mesh, ("fsdp",))
        (gradient,) = torch.autograd.grad(
            F.linear(data, weight).sin().sum(), weight, create_graph=True
        )
        gradient.square().sum().backward()
        return weight.grad.cpu()

    torch.testing.assert_close(penalty("xla"), penalty("cpu"), rtol=1e-3, atol=1e-3)


def test_under_verification(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    model, x = build("tied")
    with spmd.debugging.verify():
        compare(model, x, mesh, ("fsdp",), lambda p: ("fsdp",) if p.dim() > 1 else ())


def test_sums_of_a_wrapped_module_are_reduced_over_the_replicated_axis_too(num_devices):
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (2, num_devices // 2), ("replicate", "fsdp"))
    eager = nn.Linear(8, 8)
    x = torch.randn(2 * num_devices, 8)
    eager(x).square().sum().backward()
    unit = copy.deepcopy(eager).to("xla")
    unit.zero_grad()
    spmd.fully_shard(unit, mesh, extra_data_axis="replicate")
    data = spmd.mark_sharding(x.to("xla"), mesh, (("replicate", "fsdp"),))
    unit(data).square().sum().backward()
    spmd.sync()
    assert reduced(compile_cache.newest().compiled.as_text(), "reduce-scatter")
    for got, expected in zip(unit.parameters(), eager.parameters()):
        torch.testing.assert_close(got.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("spec", "is_found"), [(("x",), True), ((None, "x"), True), ((), False)])
def test_the_graph_of_a_weights_gradient(spec, is_found, mesh_1d, num_devices):
    """It reads what the product read, which is gone. A whole gradient is the partitioner's."""
    layer = nn.Linear(8, 16, bias=False).to("xla")
    spmd.mark_sharding(layer.weight, mesh_1d, spec)
    x = spmd.mark_sharding(torch.randn(16, 3, 8).to("xla"), mesh_1d, ("x",))
    layer(x).sin().sum().backward()
    graph = graph_of(layer.weight.grad)
    made = rewritten(batch_sums, graph)
    if num_devices == 1 or not is_found:
        assert made is graph
        return
    (product,) = (op for op in graph.ops if op.entry.name == "aten::linear_backward")
    (part,) = (op for op in made.ops if op.is_inserted)
    assert (part.operands, part.source) == (product.operands, product.source)
    assert part.entry.spec.shape == (16, 8)
    assert product not in made.ops
    assert [op.entry.name for op in made.ops if Ref(part) in op.operands] == [MARK]


def test_the_dump_that_the_documentation_shows(num_devices):
    """ARCHITECTURE.md follows a gradient through the pass."""
    if num_devices == 1:
        pytest.skip("one device has no partial sums")
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    layer = nn.Linear(8, 16, bias=False).to("xla")
    spmd.mark_sharding(layer.weight, mesh, ("x", None))
    x = spmd.mark_sharding(torch.randn(16, 3, 8).to("xla"), mesh, ("x",))
    layer(x).sin().sum().backward()
    graph = graph_of(layer.weight.grad)
    pages = (Path(__file__).parents[4] / "ARCHITECTURE.md").read_text()
    for each in (graph, rewritten(batch_sums, graph)):
        lines = each.text().splitlines()
        shown = "\n".join(lines[-3:-1])
        assert f"```\n{shown}\n```" in pages, each.text()
