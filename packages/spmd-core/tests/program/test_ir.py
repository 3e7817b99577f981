"""The graph that passes rewrite: its laws, what a rewriter makes, and its text."""

import dataclasses
import re

import pytest
import torch
from recorded_graphs import graph_of, names

import spmd_core as spmd
from spmd_core.program.ir import BarrierEntry, Graph, Ref, Rewriter, before_barriers, inserted


def product() -> Graph:
    """`relu(x @ w)`, and `w * 0.5`."""
    x, w = torch.randn(4, 8).to("xla"), torch.randn(8, 2).to("xla")
    return graph_of((x @ w).relu(), w * 0.5)


def test_a_recorded_graph():
    graph = product()
    graph.check()
    assert names(graph) == ["mm", "relu", "mul.Tensor"]
    mm, relu, mul = graph.ops
    assert relu.operands == mm.results == (Ref(mm),)
    assert [x.producer for x in mm.operands] == [*graph.inputs]
    assert mul.operands[0] == mm.operands[1]
    assert {*graph.outputs} == {Ref(relu), Ref(mul)}
    assert [op.scalars for op in graph.ops] == [(), (), (0,)]
    assert graph.users()[mm.operands[1]] == [mm, mul]


def test_what_nobody_reads_is_left_out():
    graph = product()
    _, relu, mul = graph.ops
    rewriter = Rewriter(graph)
    for op in graph.ops:
        rewriter.keep(op)
    rewriter.replace(Ref(relu), Ref(rewriter.add(mul.entry, [], mul.source, scalars=(0,))))
    assert names(rewriter.graph()) == ["mul.Tensor", "mul.Tensor"]
    assert names(graph) == ["mm", "relu", "mul.Tensor"]  # the old graph stays as it is


def test_only_what_follows_reads_behind_a_barrier():
    graph = product()
    mm, relu, mul = graph.ops
    w = mm.operands[1]
    rewriter = Rewriter(graph)
    for op in graph.ops:
        if op is mul:
            behind, _ = rewriter.wait([w, Ref(relu)], op.source)
            rewriter.replace(w, behind)
        rewriter.keep(op)
    made = rewriter.graph()
    made.check()
    assert names(made) == ["mm", "relu", "optimization_barrier", "mul.Tensor"]
    assert made.ops[:2] == graph.ops[:2]  # what did not change is shared
    (operand,) = made.ops[-1].operands
    assert isinstance(operand.op.entry, BarrierEntry)
    assert before_barriers(operand) == w


def test_what_a_check_finds():
    graph = product()
    mm, relu, mul = graph.ops
    with pytest.raises(AssertionError, match="reads a value that is computed after it"):
        dataclasses.replace(graph, ops=(relu, mm, mul)).check()
    with pytest.raises(AssertionError, match="a result is not computed"):
        dataclasses.replace(graph, ops=(mm, relu)).check()
    with pytest.raises(AssertionError, match="is computed as"):
        dataclasses.replace(graph, outputs=(Ref(mm), Ref(mm))).check()
    rewriter = Rewriter(graph)
    for op in graph.ops:
        rewriter.keep(op)
    number = rewriter.add(mul.entry, [mm.operands[1]], mul.source)
    rewriter.replace(Ref(mul), Ref(number))
    with pytest.raises(AssertionError, match="lacks scalar inputs"):
        rewriter.graph().check()


def test_the_text(mesh_2d):
    x = spmd.mark_sharding(torch.randn(16, 8).to("xla"), mesh_2d, ("a", None))
    y = spmd.mark_sharding(x * 2, mesh_2d, (("a", "b"), None))
    graph = graph_of(y)
    rewriter = Rewriter(graph)
    for op in graph.ops:
        rewriter.keep(op)
    store = inserted("spmd::store", lambda arrays: arrays[0], y._handle.spec)
    rewriter.replace(graph.outputs[0], Ref(rewriter.add(store, graph.outputs, op.source)))
    assert rewriter.graph().text() == (
        "input 0: float32[16, 8] P(a, None)\n"
        "%0 = aten::mul.Tensor(input 0) -> float32[16, 8] scalars 0\n"
        "%1 = spmd::mark_sharding(%0) -> float32[16, 8] P(a+b, None)\n"
        "%2 = spmd::store(%1) -> float32[16, 8] of spmd::mark_sharding\n"
        "return %2\n"
    )


def test_the_text_has_source_lines():
    with spmd.debugging.source_lines():
        text = graph_of(torch.ones(3).to("xla") + 1).text()
    assert re.search(r"aten::add\.Tensor\(input 0\) .*# .*test_ir\.py:\d+", text)
