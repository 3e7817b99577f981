"""A mark that another one refines, and that nothing else reads, constrains nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_graphs import graph_of, names, rewritten
from tiers import by_tier

import spmd_core as spmd
from spmd_core import debugging
from spmd_core.planner import topology
from spmd_core.program.passes.refined_marks import refined_marks
from spmd_core.sharding.sharding import Sharding

LIBTPU = pytest.mark.skipif(
    topology.libtpu_version() is None, reason="libtpu is not installed: pip install libtpu"
)
several = pytest.mark.skipif(
    spmd.global_runtime_device_count() < 4, reason="needs a mesh of two axes"
)
X, Y, XY, YX = "x", "y", ("x", "y"), ("y", "x")


def mesh():
    num = spmd.global_runtime_device_count()
    return spmd.Mesh(range(num), (num // 2, 2), ("x", "y"))


def constraints(*tensors):
    """The number of constraints in the program that computes the tensors."""
    text = debugging.stablehlo(*tensors)
    return text.count("sdy.sharding_constraint")


@several
@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        ((X, None), (X, Y), 1),
        ((None, Y), (X, Y), 1),
        ((None, None), (None, XY), 1),
        ((X, None), (XY, None), 1),
        ((X, None), (X, None), 1),  # the same mark again is none
        ((X, Y), (X, None), 2),  # the second gathers
        ((Y, None), (XY, None), 2),  # other blocks: y is the minor axis
        ((X, None), (None, X), 2),
    ],
)
def test_pairs_of_marks(first, second, left):
    weight = torch.arange(16 * 8, dtype=torch.float32).reshape(16, 8)
    t = weight.to("xla") * 2
    spmd.mark_sharding(t, mesh(), first)
    spmd.mark_sharding(t, mesh(), second)
    assert t.sharding == Sharding.of(mesh(), second, 2)
    assert constraints(t) == left
    assert torch.equal(t.cpu(), weight * 2)


@several
def test_three_marks_of_which_each_refines_the_last():
    t = torch.ones(16, 8).to("xla") * 2
    for spec in ((None, None), (X, None), (X, Y)):
        spmd.mark_sharding(t, mesh(), spec)
    assert constraints(t) == 1
    assert torch.equal(t.cpu(), torch.full((16, 8), 2.0))


@several
def test_a_mark_that_is_read_otherwise_stays():
    t = torch.ones(16, 8).to("xla") * 2
    spmd.mark_sharding(t, mesh(), (X, None))
    read = t + 1
    spmd.mark_sharding(t, mesh(), (X, Y))
    assert constraints(t, read) == 2
    assert torch.equal(t.cpu() + 1, read.cpu())


@several
def test_a_marked_result_keeps_its_layout():
    t = spmd.mark_sharding(torch.ones(16, 8).to("xla") * 2, mesh(), (X, None))
    finer = spmd.mark_sharding(t.clone(), mesh(), (X, Y))
    spmd.sync()
    assert t.local_shards[0].data.shape == (16 * 2 // spmd.global_runtime_device_count(), 8)
    assert finer.local_shards[0].data.shape == (16 * 2 // spmd.global_runtime_device_count(), 4)


@several
def test_marks_on_another_mesh_stay():
    num = spmd.global_runtime_device_count()
    t = torch.ones(16, 8).to("xla") * 2
    spmd.mark_sharding(t, spmd.Mesh(range(num), (num,), ("all",)), (None, None))
    spmd.mark_sharding(t, mesh(), (X, Y))
    assert constraints(t) == 2
    assert torch.equal(t.cpu(), torch.full((16, 8), 2.0))


@several
@settings(max_examples=by_tier(30, in_all=100), deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [(), (X,), (Y,), (XY,), (YX,), (X, Y), (Y, X), (None, X), (None, Y), (None, XY)]
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([(8, 8), (5, 3), (9, 2)]),
    st.booleans(),
)
def test_no_chain_of_marks_changes_a_value_or_a_gradient(specs, shape, contracts):
    torch.manual_seed(1)
    x, w = torch.randn(shape[0], 4), torch.randn(4, shape[1], requires_grad=True)
    ours = w.detach().to("xla").requires_grad_()
    y = x.to("xla") @ ours if contracts else (ours * 3).t().contiguous()
    for spec in specs:
        spmd.mark_sharding(y, mesh(), spec[: y.dim()])
    right = x @ w if contracts else (w * 3).t().contiguous()
    y.sin().sum().backward()
    right.sin().sum().backward()
    torch.testing.assert_close(y.detach().cpu(), right.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.cpu(), w.grad, rtol=1e-4, atol=1e-5)


def test_one_device_has_such_marks_too():
    t = torch.ones(16, 8).to("xla") * 2
    one = spmd.Mesh(range(1), (1, 1), ("x", "y"))
    for spec in ((X, None), (X, Y)):
        spmd.mark_sharding(t, one, spec)
    graph = graph_of(t)
    assert names(graph).count("mark_sharding") == 2
    assert names(rewritten(refined_marks, graph)).count("mark_sharding") == 1


@pytest.mark.exhaustive
@LIBTPU
def test_what_is_marked_twice_is_drawn_within_its_shards():
    def draw() -> None:
        spmd.use_spmd()
        grid = spmd.Mesh(range(4), (2, 2), ("fsdp", "tensor"))
        for _ in range(6):
            weight = torch.empty(2048, 1024, device="xla").normal_()
            spmd.mark_sharding(weight, grid, ("tensor", None))
            weights.append(spmd.mark_sharding(weight, grid, ("tensor", "fsdp")))
        spmd.sync()

    weights: list[torch.Tensor] = []
    made = spmd.plan(draw, topology="v4-8")
    assert made.largest.peak_bytes <= 1.1 * 6 * 2048 * 1024 * 4 / 4
