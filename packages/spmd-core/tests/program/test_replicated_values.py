"""Where nothing else helps, a program has no marks, and each value is replicated."""

import torch
from recorded_graphs import graph_of, names, rewritten

import spmd_core as spmd
from spmd_core.program.passes.replicated_values import replicated_values
from spmd_core.program.target import Replicated


def test_all_values_are_replicated(mesh_1d):
    x = spmd.mark_sharding(torch.randn(16, 8).to("xla"), mesh_1d, ("x",))
    y = spmd.mark_sharding(x * 2, mesh_1d, (None, "x")).sin()
    graph = graph_of(y)
    assert rewritten(replicated_values, graph) is graph
    assert rewritten(replicated_values, graph, replicated_part=Replicated.INDICES) is graph
    made = rewritten(replicated_values, graph, replicated_part=Replicated.EVERYTHING)
    assert names(made) == ["replicate", "mul.Tensor", "replicate", "sin", "replicate"]
