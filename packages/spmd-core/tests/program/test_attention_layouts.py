"""How attentions may be split: batch as the data, sequences as marked, heads by the other axes."""

import pytest
import torch
import torch.nn.functional as F
from recorded_graphs import graph_of, rewritten

import spmd_core as spmd
from spmd_core.program.passes.attention_layouts import attention_layouts


def attend(mesh, ids_spec, query_spec, heads=4, kv_heads=4):
    """The layout of attention after a lookup of marked token ids: axes of batch, heads, rows."""
    ids = spmd.mark_sharding(torch.zeros(8, 16, dtype=torch.int64).to("xla"), mesh, ids_spec)
    table = torch.ones(4, (heads + 2 * kv_heads) * 8, device="xla")
    x = F.embedding(ids, table).unflatten(-1, (-1, 8)).transpose(1, 2)
    query, key, value = x.split((heads, kv_heads, kv_heads), 1)
    if query_spec is not None:
        query = spmd.mark_sharding(query.clone(), mesh, query_spec)
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=heads != kv_heads)
    hints = [op.hint for op in rewritten(attention_layouts, graph_of(out)).ops if op.hint]
    (found,) = hints
    return found.batch, found.heads, found.rows


@pytest.fixture
def mesh(num_devices):
    if num_devices != 8:
        pytest.skip("the mesh is of eight devices")
    return spmd.Mesh(range(8), (2, 2, 2), ("data", "context", "tensor"))


@pytest.mark.parametrize(
    ("ids_spec", "query_spec", "layout"),
    [
        (("data",), None, (("data",), ("context", "tensor"), ())),
        (("data", "context"), (None, None, "context"), (("data",), ("tensor",), ("context",))),
        ((("data", "context"),), None, (("data", "context"), ("tensor",), ())),
        # Axes in another order than the mesh's.
        ((), (None, None, ("tensor", "data")), ((), ("context",), ("data", "tensor"))),
        # An axis cannot split both.
        (("data",), (None, None, "data"), ((), ("context", "tensor"), ("data",))),
    ],
)
def test_the_axes_of_each_dim(mesh, ids_spec, query_spec, layout):
    assert attend(mesh, ids_spec, query_spec) == layout


def test_heads_of_keys_may_be_fewer(mesh):
    counts = ((4, 1), (3, 3), (6, 3))
    heads = [attend(mesh, ("data",), None, heads=h, kv_heads=kv)[1] for h, kv in counts]
    assert heads == [("context", "tensor"), (), ("context",)]
