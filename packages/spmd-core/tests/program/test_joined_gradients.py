"""Gradients that one program adds up are reduced over the batch's devices once."""

import copy
import re

import pytest
import torch
from recorded_graphs import graph_of, rewritten
from tiers import crossed
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd
from spmd_core.program import compile_cache
from spmd_core.program.partial_sums import ADDITION, PARTIAL_SUM, REDUCTION
from spmd_core.program.passes.batch_sums import batch_sums

PARTS = 3


class Positions(nn.Module):
    """Tokens and positions: the whole batch looks up the same rows of the second table."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids):
        rows = torch.arange(ids.shape[1], device=ids.device)[None]
        return F.linear(self.norm(self.tokens(ids) + self.positions(rows)), self.tokens.weight)


class Transposed(nn.Module):
    """A layer whose weight has the shape (in, out), as GPT-2's; its bias is a sum of rows."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16))

    def forward(self, x):
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


MODELS = {
    "linear": (lambda: nn.Linear(8, 16), lambda: torch.randn(PARTS, 16, 3, 8)),
    "transposed": (Transposed, lambda: torch.randn(PARTS, 16, 3, 8)),
    "uneven": (lambda: nn.Linear(9, 15), lambda: torch.randn(PARTS, 16, 3, 9)),
    "convolution": (lambda: nn.Conv2d(8, 16, 3), lambda: torch.randn(PARTS, 16, 8, 5, 4)),
    "positions": (Positions, lambda: torch.randint(16, (PARTS, 16, 4))),
}


def build(name):
    torch.manual_seed(0)
    make, data = MODELS[name]
    return make(), data()


def backward(model, x):
    out = model(x)
    (out.sin() * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.device)).sum().backward()


def sharded(model, mesh, spec):
    """The model on the device, its matrices split so, its vectors whole."""
    ours = copy.deepcopy(model).to("xla")
    for parameter in ours.parameters():
        spmd.mark_sharding(parameter, mesh, spec if parameter.dim() > 1 else ())
    return ours


def accumulate(ours, parts, mesh, batch):
    """Gradients of the parts, added up in one program; returns its text."""
    data = spmd.mark_sharding(parts.to("xla"), mesh, (None, batch))
    for x in data:
        spmd.mark_sharding(x, mesh, (batch,))
        backward(ours, x)
    spmd.sync()
    return compile_cache.newest().compiled.as_text()


def check(ours, model, parts):
    for x in parts:
        backward(model, x)
    for got, right in zip(ours.parameters(), model.parameters()):
        torch.testing.assert_close(got.grad.cpu(), right.grad, rtol=1e-4, atol=1e-4)
        assert got.grad.sharding == got.sharding


def reduced(text, kinds=("all-reduce", "reduce-scatter"), dtype="f32"):
    """The total number of elements of arrays of a dtype that collectives of these kinds return."""
    found = re.findall(rf"= (.*?) (?:{'|'.join(kinds)})\(", text)
    shapes = [dims for results in found for dims in re.findall(rf"{dtype}\[([\d,]*)\]", results)]
    return sum(torch.Size(map(int, d.split(","))).numel() if d else 1 for d in shapes)


@pytest.mark.parametrize(("name", "spec"), crossed([*MODELS], [("x",), (None, "x"), ()]))
def test_each_gradient_is_reduced_once(name, spec, num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    model, parts = build(name)
    ours = sharded(model, mesh, spec)
    text = accumulate(ours, parts, mesh, "x")
    check(ours, model, parts)
    if num_devices == 1:
        return
    # The results of reductions: a shard of what is split, the whole of the rest; uneven shards are
    # larger. Forward looks positions up in a table that is split by rows: an all-reduce each time.
    split = [p for p in ours.parameters() if p.dim() > 1 and spec]
    whole = sum(p.numel() for p in ours.parameters()) - sum(p.numel() for p in split)
    padded = sum(p.sharding.padded_shape(tuple(p.shape)) != tuple(p.shape) for p in split)
    shards = sum(-(-p.numel() // num_devices) for p in split) + padded * 32
    looked_up = PARTS * 4 * 8 if name == "positions" and spec == ("x",) else 0
    assert reduced(text) <= whole + shards + looked_up + 2
    assert bool(reduced(text, ["reduce-scatter"])) == bool(split)


@pytest.mark.parametrize(
    ("spec", "batch", "name"),
    crossed(
        [("x", None), ("x", "y"), ("y", "x"), (None, "y"), (("y", "x"), None), ()],
        ["x", ("x", "y"), "y"],
        ["transposed", "positions", "uneven"],
        rounds=2,
    ),
    ids=str,
)
def test_two_axes(name, batch, spec, num_devices):
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (2, num_devices // 2), ("x", "y"))
    model, parts = build(name)
    ours = sharded(model, mesh, spec)
    accumulate(ours, parts, mesh, batch)
    check(ours, model, parts)


def test_a_wrapped_module(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    model, parts = build("linear")
    ours = copy.deepcopy(model).to("xla")
    spmd.fully_shard(ours, mesh, axis="x")
    text = accumulate(ours, parts, mesh, "x")
    check(ours, model, parts)
    if num_devices > 1:
        assert len(re.findall(r" reduce-scatter\(", text)) == 2
        assert reduced(text) <= sum(p.numel() for p in model.parameters()) // num_devices


def test_gradients_may_be_reduced_at_once(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    model, parts = build("linear")
    spmd.config.reduce_gradients_once = False
    ours = sharded(model, mesh, ("x",))
    text = accumulate(ours, parts, mesh, "x")
    check(ours, model, parts)
    if num_devices > 1:
        assert len(re.findall(r" reduce-scatter\(", text)) == PARTS


def test_a_gradient_that_is_read_on_the_way(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    model, parts = build("linear")
    ours = sharded(model, mesh, ("x",))
    norms, expected = [], []
    for device, module, found in (("xla", ours, norms), ("cpu", model, expected)):
        for x in parts:
            x = x.to(device)
            backward(module, spmd.mark_sharding(x, mesh, ("x",)) if device == "xla" else x)
            found.append(module.weight.grad.norm())
    torch.testing.assert_close(torch.stack(norms).cpu(), torch.stack(expected))
    torch.testing.assert_close(ours.weight.grad.cpu(), model.weight.grad, rtol=1e-4, atol=1e-4)


def test_gradients_of_different_programs_are_added(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    model, parts = build("positions")
    ours = sharded(model, mesh, ("x",))
    accumulate(ours, parts, mesh, "x")
    accumulate(ours, parts, mesh, "x")
    check(ours, model, torch.cat([parts, parts]))


def test_a_part_whose_batch_does_not_divide(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    model, parts = build("linear")
    ours = sharded(model, mesh, ("x",))
    backward(ours, spmd.mark_sharding(parts[0].to("xla"), mesh, ("x",)))
    backward(ours, spmd.mark_sharding(parts[1, :5].to("xla"), mesh, ("x",)))
    backward(ours, spmd.mark_sharding(parts[2].to("xla"), mesh, ("x",)))
    for x in (parts[0], parts[1, :5], parts[2]):
        backward(model, x)
    for got, right in zip(ours.parameters(), model.parameters()):
        torch.testing.assert_close(got.grad.cpu(), right.grad, rtol=1e-4, atol=1e-4)


def test_under_verification(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    model, parts = build("positions")
    with spmd.debugging.verify():
        accumulate(sharded(model, mesh, ("x",)), parts, mesh, "x")


@pytest.mark.parametrize("spec", [("x",), ()], ids=["split", "whole"])
@pytest.mark.parametrize("num_parts", [1, PARTS])
def test_autocast_reduces_in_float32(num_parts, spec, num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    model, parts = build("transposed")
    ours = sharded(model, mesh, spec)
    with torch.autocast("xla", dtype=torch.bfloat16):
        text = accumulate(ours, parts[:num_parts], mesh, "x")
    for x in parts[:num_parts]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            backward(model, x)
    for got, right in zip(ours.parameters(), model.parameters()):
        torch.testing.assert_close(got.grad.cpu(), right.grad, rtol=0.05, atol=0.3)
    if num_devices > 1:
        assert reduced(text) and not reduced(text, dtype="bf16")


@pytest.mark.parametrize("size", [16, 14, 7])
@pytest.mark.parametrize("spec", [("x",), ()], ids=["split", "whole"])
def test_a_convolution_whose_positions_are_split_too(spec, size, num_devices):
    """Inside a region over the batch, uneven blocks of rows had gradients of zeros."""
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (2, num_devices // 2), ("x", "y"))
    torch.manual_seed(0)
    model, parts = nn.Conv2d(8, 16, 3, padding=1), torch.randn(2, 4, 8, size, size)
    ours = sharded(model, mesh, spec)
    for x in parts:
        backward(ours, spmd.mark_sharding(x.to("xla"), mesh, ("x", None, "y")))
    check(ours, model, parts)


def gradient_of(mesh, parts):
    """What the pass makes of the gradients of a weight that are added up."""
    layer = nn.Linear(8, 16, bias=False).to("xla")
    spmd.mark_sharding(layer.weight, mesh, ("x",))
    for _ in range(parts):
        x = spmd.mark_sharding(torch.randn(16, 3, 8).to("xla"), mesh, ("x",))
        layer(x).sin().sum().backward()
    graph = graph_of(layer.weight.grad)
    return [op.entry.name for op in rewritten(batch_sums, graph).ops if op.is_inserted]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_partial_sums_are_added_before_one_reduction(parts, mesh_1d, num_devices):
    found = gradient_of(mesh_1d, parts)
    joined = [PARTIAL_SUM] * parts + [ADDITION] * (parts - 1) + [REDUCTION]
    expected = [PARTIAL_SUM] if parts == 1 else joined
    assert sorted(found) == sorted(expected if num_devices > 1 else [])
    assert found[-1:] == expected[-1:] * (num_devices > 1)
