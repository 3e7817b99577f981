"""Lookups in a table that is split by its rows, as eager torch; and what moves between devices."""

import copy
import math
import re

import pytest
import torch
from recorded_graphs import graph_of, rewritten
from torch import nn

import spmd_core as spmd
from spmd_core.program import compile_cache
from spmd_core.program.passes.lookups import lookups
from spmd_core.program.target import Replicated

WIDTH = 6


def mesh_of(num_devices, *names):
    if len(names) == 1:
        return spmd.Mesh(range(num_devices), (num_devices,), names)
    if num_devices < 4:
        pytest.skip("needs two axes")
    return spmd.Mesh(range(num_devices), (num_devices // 2, 2), names)


def compare(mesh, table_spec, ids, ids_spec, *, rows, dtype=torch.float32):
    """A lookup and its gradient, as torch's; returns the program's text."""
    torch.manual_seed(0)
    table = nn.Embedding(rows, WIDTH, dtype=dtype)
    ours = copy.deepcopy(table).to("xla")
    spmd.mark_sharding(ours.weight, mesh, table_spec)
    data = spmd.mark_sharding(ids.to("xla"), mesh, ids_spec)
    found = ours(data)
    spmd.sync()
    text = compile_cache.newest().compiled_text()
    expected = table(ids)
    assert torch.equal(found.cpu(), expected)
    factor = torch.randn_like(expected)
    (ours(data) * factor.to("xla")).sum().backward()
    (expected * factor).sum().backward()
    torch.testing.assert_close(ours.weight.grad.cpu(), table.weight.grad)
    return text


def moved(text, kind):
    """Elements of the float results of a kind of collective, the largest."""
    shapes = re.findall(rf"= f(?:32|64)\[([\d,]+)\]\S* {kind}\(", text)
    return max((math.prod(map(int, shape.split(","))) for shape in shapes), default=0)


def ids_of(*shape, rows):
    torch.manual_seed(1)
    return torch.randint(rows, shape)


@pytest.mark.parametrize("shape", [(8,), (16, 3), (8, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_rows_travel(shape, dtype, num_devices):
    mesh = mesh_of(num_devices, "fsdp")
    ids = ids_of(*shape, rows=96)
    text = compare(mesh, ("fsdp", None), ids, ("fsdp",), rows=96, dtype=dtype)
    if num_devices > 1:
        assert moved(text, "all-gather") == moved(text, "all-reduce") == 0
        assert moved(text, "reduce-scatter") == ids.numel() * WIDTH // num_devices


def test_a_table_with_fewer_rows_is_gathered(num_devices):
    mesh = mesh_of(num_devices, "fsdp")
    text = compare(mesh, ("fsdp", None), ids_of(16, 3, rows=48), ("fsdp",), rows=48)
    if num_devices > 1:
        assert moved(text, "all-gather") == 48 * WIDTH
        assert moved(text, "all-reduce") == moved(text, "reduce-scatter") == 0


@pytest.mark.parametrize(
    "table_spec", [("fsdp", None), (("tensor", "fsdp"), None), (("fsdp", "tensor"), None)]
)
@pytest.mark.parametrize("rows", [16, 96])
def test_a_tensor_axis(table_spec, rows, num_devices):
    mesh = mesh_of(num_devices, "fsdp", "tensor")
    ids = ids_of(num_devices, 4, rows=rows)
    text = compare(mesh, table_spec, ids, ("fsdp",), rows=rows)
    if rows == 96:
        assert moved(text, "all-gather") == 0
        assert moved(text, "reduce-scatter") == ids.numel() * WIDTH // (num_devices // 2)


@pytest.mark.parametrize("rows", [16, 96])
@pytest.mark.parametrize("ids_spec", [(("data", "fsdp"),), ("fsdp", "data"), ("fsdp",)])
def test_another_axis_of_the_data(ids_spec, rows, num_devices):
    mesh = mesh_of(num_devices, "data", "fsdp")
    compare(mesh, ("fsdp", None), ids_of(num_devices, 4, rows=rows), ids_spec, rows=rows)


@pytest.mark.parametrize(
    ("table_spec", "shape", "rows"),
    [
        (("fsdp", None), (16, 3), 90),  # rows that do not divide
        (("fsdp", None), (5, 3), 96),  # indices that do not
        ((None, "fsdp"), (16, 3), 96),
        ((None, None), (16, 3), 96),
    ],
)
def test_what_is_left_to_the_partitioner(table_spec, shape, rows, num_devices):
    compare(
        mesh_of(num_devices, "fsdp"), table_spec, ids_of(*shape, rows=rows), ("fsdp",), rows=rows
    )


def test_a_tied_table_is_gathered_once(num_devices):
    """For the lookup and for the product."""
    mesh = mesh_of(num_devices, "fsdp")
    table = spmd.mark_sharding(torch.randn(96, WIDTH).to("xla"), mesh, ("fsdp", None))
    ids = spmd.mark_sharding(ids_of(8, 2, rows=96).to("xla"), mesh, ("fsdp",))
    logits = nn.functional.embedding(ids, table) @ table.t()
    spmd.sync()
    text = compile_cache.newest().compiled_text()
    expected = table.cpu()[ids.cpu()] @ table.cpu().t()
    torch.testing.assert_close(logits.cpu(), expected)
    assert text.count(f" = f32[96,{WIDTH}]{{1,0}} all-gather(") == (num_devices > 1)
    assert moved(text, "reduce-scatter") == 0


@pytest.mark.parametrize("checks", [True, False])
def test_indices_outside_of_the_table(checks, num_devices, monkeypatch):
    """They are found, or give the nearest row."""
    monkeypatch.setattr(spmd.config, "check_indices", checks)
    mesh = mesh_of(num_devices, "fsdp")
    table = torch.randn(96, WIDTH)
    ids = torch.tensor([0, 96, 1000, 95, -1, -5, 3, 2])
    on_xla = spmd.mark_sharding(table.to("xla"), mesh, ("fsdp", None))
    data = spmd.mark_sharding(ids.to("xla"), mesh, ("fsdp",))
    found = nn.functional.embedding(data * 1, on_xla)  # what comes from the host is checked there
    if checks:
        with pytest.raises(IndexError, match="an index must lie inside the dim that it indexes"):
            found.cpu()
    else:
        assert torch.equal(found.cpu(), table[ids.clamp(0, 95)])


def test_the_layout(num_devices):
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = mesh_of(num_devices, "fsdp", "tensor")
    table = spmd.mark_sharding(torch.randn(96, WIDTH).to("xla"), mesh, (("tensor", "fsdp"), None))
    ids = spmd.mark_sharding(ids_of(8, 2, rows=96).to("xla"), mesh, ("fsdp",))
    spmd.sync()
    found = nn.functional.embedding(ids, table)
    graph = graph_of(found)
    (layout,) = [
        op.hint for op in rewritten(lookups, graph).ops if op.entry.name == "aten::embedding"
    ]
    assert (layout.rows, layout.shared, layout.gathers) == (("tensor", "fsdp"), "fsdp", False)
    assert rewritten(lookups, graph, replicated_part=Replicated.EVERYTHING) is graph
