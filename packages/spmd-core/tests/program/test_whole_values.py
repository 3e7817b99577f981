"""Where nothing else helps, a program has no marks, and each value is whole."""

import torch
from recorded_graphs import graph_of, names, rewritten

import spmd_core as spmd
from spmd_core.program.passes.whole_values import whole_values
from spmd_core.program.target import Whole


def test_all_values_are_whole(mesh_1d):
    x = spmd.mark_sharding(torch.randn(16, 8).to("xla"), mesh_1d, ("x",))
    y = spmd.mark_sharding(x * 2, mesh_1d, (None, "x")).sin()
    graph = graph_of(y)
    assert rewritten(whole_values, graph) is graph
    assert rewritten(whole_values, graph, whole=Whole.INDICES) is graph
    made = rewritten(whole_values, graph, whole=Whole.EVERYTHING)
    assert names(made) == ["keep_whole", "mul.Tensor", "keep_whole", "sin", "keep_whole"]
