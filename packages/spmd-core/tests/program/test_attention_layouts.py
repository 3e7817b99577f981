"""How attentions may be split: batch as the data, sequences as marked, heads by the other axes."""

import pytest
import torch
import torch.nn.functional as F

import spmd_core as spmd
from spmd_core.program import attention_layouts, lowering


@pytest.fixture
def found(monkeypatch):
    """The layouts in programs that are lowered from now on: axes of batch, heads and rows."""
    layouts = []

    def find(*arguments):
        made = attention_layouts.find(*arguments)
        layouts.extend((x.batch, x.heads, x.rows) for x in made.values())
        return made

    class Module:
        pass

    Module.find = staticmethod(find)
    monkeypatch.setattr(lowering, "attention_layouts", Module)
    return layouts


def attend(mesh, ids_spec, query_spec, heads=4, kv_heads=4):
    """Lowers attention after a lookup of marked token ids, whose query is marked or not."""
    ids = spmd.mark_sharding(torch.zeros(8, 16, dtype=torch.int64).to("xla"), mesh, ids_spec)
    table = torch.ones(4, (heads + 2 * kv_heads) * 8, device="xla")
    x = F.embedding(ids, table).unflatten(-1, (-1, 8)).transpose(1, 2)
    query, key, value = x.split((heads, kv_heads, kv_heads), 1)
    if query_spec is not None:
        query = spmd.mark_sharding(query.clone(), mesh, query_spec)
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=heads != kv_heads)
    spmd.debugging.stablehlo(out)


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
def test_the_axes_of_each_dim(found, mesh, ids_spec, query_spec, layout):
    attend(mesh, ids_spec, query_spec)
    assert [tuple(map(tuple, x)) for x in found] == [layout]


def test_heads_of_keys_may_be_fewer(found, mesh):
    attend(mesh, ("data",), None, heads=4, kv_heads=1)
    attend(mesh, ("data",), None, heads=3, kv_heads=3)
    attend(mesh, ("data",), None, heads=6, kv_heads=3)
    heads = [layout[1] for layout in found]
    assert heads == [("context", "tensor"), (), ("context",)]
