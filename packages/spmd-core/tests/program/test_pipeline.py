"""The list of passes: what it leaves alone, its check, its dumps."""

import pytest
import torch
from recorded_graphs import graph_of, target_of
from torch import nn

import spmd_core as spmd
from spmd_core import debugging
from spmd_core.program import pipeline
from spmd_core.program.ir import Ref, Rewriter
from spmd_core.program.passes.batch_sums import batch_sums
from spmd_core.program.passes.exact_values import exact_values


def step(mesh):
    """The gradients of a small model."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to("xla")
    for parameter in model.parameters():
        spmd.mark_sharding(parameter, mesh, ("x",))
    x = spmd.mark_sharding(torch.randn(16, 3, 8).to("xla"), mesh, ("x",))
    model(x).amax().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("rewrite", pipeline.PASSES, ids=lambda rewrite: rewrite.__name__)
def test_a_pass_with_nothing_to_do_returns_its_graph(rewrite):
    graph = graph_of(torch.randn(4, 8).to("xla") @ torch.randn(8, 2).to("xla"))
    assert rewrite(graph, target_of(graph)) is graph


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_graph_holds_its_laws_behind_each_pass(platform, mesh_1d):
    graph = graph_of(*step(mesh_1d))
    target = target_of(graph, platform)
    for rewrite in pipeline.PASSES:
        graph = rewrite(graph, target)
        graph.check()


def test_a_pass_that_breaks_a_law_is_found(monkeypatch):
    def broken(graph, target):
        rewriter = Rewriter(graph)
        for op in graph.ops:
            rewriter.keep(op, [Ref(graph.ops[-1])] * len(op.operands))
        return rewriter.graph()

    monkeypatch.setattr(spmd.config, "check_passes", True)
    monkeypatch.setattr(pipeline, "PASSES", (broken,))
    with pytest.raises(
        AssertionError, match=r"aten::add\.Tensor.* reads a value that is computed after"
    ):
        debugging.stablehlo(torch.ones(3).to("xla") + 1)


def test_dumps_are_of_the_passes_that_changed_the_graph(
    mesh_1d, num_devices, monkeypatch, tmp_path
):
    held = step(mesh_1d)
    monkeypatch.setattr(spmd.config, "dump_passes", str(tmp_path))
    debugging.stablehlo(*held)
    (folder,) = tmp_path.iterdir()
    dumps = {path.name.split("_", 1)[1]: path.read_text() for path in sorted(folder.iterdir())}
    expected = ["recorded.txt", "recorded_order.txt", "exact_values.txt"]
    if num_devices > 1:
        expected.insert(1, "batch_sums.txt")
        assert "spmd::partial_sum(" in dumps["batch_sums.txt"]
        assert "spmd::partial_sum(" not in dumps["recorded.txt"]
    assert [*dumps] == expected
    assert "spmd::store(" in dumps["exact_values.txt"]
    assert {batch_sums, exact_values} < {*pipeline.PASSES}


def test_a_folder_of_dumps_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    x = torch.ones(3, device="xla") + 41
    monkeypatch.setattr(spmd.config, "dump_passes", str(tmp_path / "file" / "passes"))
    with pytest.raises(OSError, match=r"dump_passes, .*; got '.*passes': .* Assign another folder"):
        spmd.sync()
    monkeypatch.setattr(spmd.config, "dump_passes", str(tmp_path / "passes"))
    assert x.tolist() == [42.0] * 3
    assert list((tmp_path / "passes").glob("*/*recorded.txt"))
