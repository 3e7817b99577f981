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
from spmd_core.program.passes.batch_sums import batch_sums
from spmd_core.program.passes.column_gathers import GATHER, GATHER_BLOCKS, column_gathers

several = pytest.mark.skipif(
    spmd.global_runtime_device_count() < 4, reason="needs a mesh of two axes"
)
BATCH, WIDTH, HIDDEN = 16, 24, 32


def mesh():
    num = spmd.global_runtime_device_count()
    return spmd.Mesh(range(num), (num // 2, 2), ("fsdp", "tensor"))


def num_gathers(*tensors, platform="cpu", name=GATHER):
    graph = rewritten(column_gathers, graph_of(*tensors), platform)
    return sum(op.entry.name == name for op in graph.ops)


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
    for use, of_products in ((lambda x, w: x + w[:BATCH], 0), (lambda x, w: x @ w.t(), 1)):
        made = product(before, after, use)
        assert num_gathers(made) == of_products
        assert num_gathers(made, name=GATHER_BLOCKS) == 1 - of_products
    uneven = product(before, after, shape=(HIDDEN - 1, WIDTH))
    assert num_gathers(uneven) == num_gathers(uneven, name=GATHER_BLOCKS) == 0
    unread = product(before, after, lambda x, w: w)
    assert num_gathers(unread) == num_gathers(unread, name=GATHER_BLOCKS) == 0


class Plan(nn.Module):
    """A table, and a layer that a tensor parallel plan splits by rows."""

    def __init__(self, rows):
        super().__init__()
        self.table, self.up = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, rows, bias=False)

    def forward(self, ids):
        return self.up(torch.tanh(self.table(ids)))


def planned(device, rows=HIDDEN):
    torch.manual_seed(0)
    model, ids = Plan(rows).to(device), torch.arange(BATCH).reshape(-1, 2).to(device)
    if device == "xla":
        styles = {
            "table": spmd.dtensor.RowwiseParallel(
                input_layouts=spmd.dtensor.Replicate(), output_layouts=spmd.dtensor.Shard(1)
            ),
            "up": spmd.dtensor.ColwiseParallel(input_layouts=spmd.dtensor.Shard(1)),
        }
        spmd.dtensor.parallelize_module(model, mesh(), styles, axis="tensor")
        spmd.fully_shard(model, mesh())
        ids = spmd.mark_sharding(ids, mesh(), ("fsdp", None))
    loss = model(ids).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@several
def test_partial_sums_of_products_read_the_transpose() -> None:
    """The gradient of the layer's input is one; the lookup is a partial sum, and no product."""
    graph = rewritten(column_gathers, rewritten(batch_sums, graph_of(*planned("xla"))))
    found = [op.entry.name for op in graph.ops]
    assert (found.count(GATHER), found.count(GATHER_BLOCKS)) == (2, 1)


@several
@pytest.mark.parametrize("rows", [HIDDEN, HIDDEN - 1])
def test_a_plan_has_the_values_of_eager_torch(rows) -> None:
    for mine, right in zip(planned("xla", rows), planned("cpu", rows)):
        torch.testing.assert_close(mine.cpu(), right, rtol=1e-5, atol=1e-5)


@several
def test_no_table_is_transposed() -> None:
    """A device has rows of WIDTH / num columns, of a table (HIDDEN / 2, WIDTH) when gathered."""
    num, rows = mesh().mesh_shape[0], HIDDEN // 2
    text = debugging.hlo(*planned("xla"))
    entry = text[text.index("ENTRY ") :]
    assert re.search(rf"f32\[{num},{rows},{WIDTH // num}\]\S* all-gather", entry)
    assert re.search(rf"f32\[1,{rows},{WIDTH // num}\]\S* reduce-scatter", entry)
    assert not re.search(rf"f32\[{rows},{WIDTH}\]\{{0,1\}}", entry)


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
