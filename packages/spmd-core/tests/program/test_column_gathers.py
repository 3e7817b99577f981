"""Columns of weights are gathered, and gradients scattered, as rows of transposes, on CPUs."""

import re

import pytest
import torch
import torch.nn.functional as F
from recorded_graphs import graph_of, rewritten
from tiers import crossed
from torch import nn

import spmd_core as spmd
from spmd_core import debugging
from spmd_core.program.passes.column_gathers import GATHER, column_gathers

several = pytest.mark.skipif(
    spmd.global_runtime_device_count() < 4, reason="needs a mesh of two axes"
)
BATCH, WIDTH, HIDDEN = 16, 24, 32


def mesh():
    num = spmd.global_runtime_device_count()
    return spmd.Mesh(range(num), (num // 2, 2), ("fsdp", "tensor"))


def num_gathers(*tensors, platform="cpu"):
    graph = rewritten(column_gathers, graph_of(*tensors), platform)
    return sum(op.entry.name == GATHER for op in graph.ops)


def product(before, after, use=F.linear, shape=(HIDDEN, WIDTH)):
    weight = spmd.mark_sharding(torch.randn(*shape).to("xla"), mesh(), before)
    gathered = spmd.mark_sharding(weight * 1, mesh(), before)
    gathered = spmd.mark_sharding(gathered.clone(), mesh(), after)
    return use(torch.randn(BATCH, WIDTH).to("xla"), gathered)


@several
@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (("tensor", "fsdp"), ("tensor", None), 1),
        ((None, "fsdp"), (None, None), 1),
        ((None, ("tensor", "fsdp")), (None, "tensor"), 1),
        ((None, ("fsdp", "tensor")), (None, "tensor"), 0),  # the major axis: blocks in between
        (("fsdp", "tensor"), (None, "tensor"), 0),  # rows
        (("tensor", "fsdp"), (None, None), 0),  # both
    ],
)
def test_which_gathers(before, after, count) -> None:
    assert num_gathers(product(before, after)) == count
    assert num_gathers(product(before, after), platform="tpu") == 0


@several
def test_only_for_products_and_even_blocks() -> None:
    before, after = ("tensor", "fsdp"), ("tensor", None)
    assert num_gathers(product(before, after, lambda x, w: x + w[:BATCH])) == 0
    assert num_gathers(product(before, after, lambda x, w: x @ w.t())) == 1
    assert num_gathers(product(before, after, shape=(HIDDEN - 1, WIDTH))) == 0


def layer(device, hidden):
    torch.manual_seed(0)
    up, down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
    model = nn.Sequential(up, nn.GELU(), down)
    x = torch.randn(BATCH, WIDTH)
    if device == "xla":
        model.to("xla")
        spmd.mark_sharding(up.weight, mesh(), ("tensor", None))
        spmd.mark_sharding(down.weight, mesh(), (None, "tensor"))
        spmd.fully_shard(model, mesh())
        x = spmd.mark_sharding(x.to("xla"), mesh(), ("fsdp", None))
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@several
@pytest.mark.parametrize("hidden", [HIDDEN, HIDDEN + 2, HIDDEN - 1])
def test_values_are_those_of_eager_torch(hidden) -> None:
    for mine, right in zip(layer("xla", hidden), layer("cpu", hidden)):
        torch.testing.assert_close(mine.cpu(), right, rtol=1e-5, atol=1e-6)


def tied(device, classes, dtype):
    """A table that is looked up and multiplied with, and first and second gradients of a loss."""
    torch.manual_seed(0)
    table, up = torch.randn(classes, WIDTH), torch.randn(HIDDEN, WIDTH) / 4
    ids = torch.arange(BATCH) % classes
    own = [t.to(device).requires_grad_() for t in (table, up)]
    weights = own
    if device == "xla":
        for weight in own:
            spmd.mark_sharding(weight, mesh(), ("tensor", "fsdp"))
        weights = [spmd.mark_sharding(w.clone(), mesh(), ("tensor", None)) for w in own]
        ids = spmd.mark_sharding(ids.to("xla"), mesh(), ("fsdp",))
    with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
        x = F.embedding(ids, weights[0])
        x = F.linear(torch.tanh(F.linear(x, weights[1])), weights[1].T)
        logits = F.linear(x, weights[0]).float()
    loss = F.cross_entropy(logits, ids) + weights[1].square().sum()  # read as it is, too
    grads = torch.autograd.grad(loss, own, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), own)
    return [t.detach() for t in (loss, *grads, *second)]


@several
@pytest.mark.parametrize(("classes", "dtype"), crossed([40, 39], [torch.float32, torch.bfloat16]))
def test_tied_weights_and_second_gradients(classes, dtype) -> None:
    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-4
    for mine, right in zip(tied("xla", classes, dtype), tied("cpu", classes, dtype)):
        atol = tolerance * float(right.abs().max())
        torch.testing.assert_close(mine.cpu(), right, rtol=tolerance, atol=atol)


@several
def test_no_whole_weight_is_copied() -> None:
    """On a device the up weight is (HIDDEN / 2, WIDTH) where it is gathered."""
    text = debugging.hlo(*layer("xla", HIDDEN))
    whole = rf"f32\[(?:{HIDDEN // 2},{WIDTH}|{WIDTH},{HIDDEN // 2})\]"
    entry = text[text.index("ENTRY ") :]
    assert re.search(rf"{whole}\S* all-gather", entry)
    assert not re.search(rf"{whole}\S* (?:copy|transpose)\(", entry)
    assert not re.search(rf"copy\S* = {whole}\S* fusion", entry)
