"""Open dims and priorities of marks: values of eager torch, and what the partitioner makes of them.

Most tests read the partitioned program: which block of a value each device computes.
"""

import copy
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from tiers import crossed

import spmd_core as spmd
from spmd_core import debugging
from spmd_core.errors import PartitionSpecError, ProgramError
from spmd_core.graph.recorders import lock
from spmd_core.modules.layer_stacks import stacked
from spmd_core.planner import topology
from spmd_core.program import fingerprint
from spmd_core.program.planning import plan
from spmd_core.runtime import jax_sharding
from spmd_core.sharding.sharding import Sharding

OPEN = spmd.PartitionSpec.OPEN
OTHER = {"jax_use_shardy_partitioner": False}
eight = pytest.mark.skipif(
    spmd.global_runtime_device_count() != 8, reason="reads the blocks of a mesh of 4 x 2"
)
LIBTPU = pytest.mark.skipif(
    topology.libtpu_version() is None, reason="libtpu is not installed: pip install libtpu"
)


def blocks(operation, *tensors):
    """The shapes of the blocks in which the program computes an operation, in its order."""
    found = re.findall(rf"= f32\[([\d,]+)\]\S* {operation}\(", debugging.hlo(*tensors))
    assert found, operation
    return [tuple(map(int, shape.split(","))) for shape in found]


def in_place(t, mesh, spec, **options):
    return spmd.mark_sharding(t, mesh, spec, **options)


def as_new(t, mesh, spec, **options):
    return spmd.mark_sharding(t, mesh, spec, inplace=False, **options)


# ---- values --------------------------------------------------------------------------------------


def three_steps(mark, device, rows, features, hidden):
    torch.manual_seed(0)
    x, target = torch.randn(rows, features), torch.randn(rows, 6)
    first, second = torch.randn(features, hidden), torch.randn(hidden, 6)
    x, target, first, second = (t.to(device) for t in (x, target, first, second))
    first.requires_grad_(), second.requires_grad_()
    mark("first", first), mark("second", second), mark("x", x)
    optimizer = torch.optim.AdamW([first, second], lr=0.1)
    found = []
    for _ in range(3):
        h = mark("h", (x @ first).relu())
        loss = mark("error", h @ second - target).square().mean()
        loss.backward()
        found += [loss.detach(), first.grad.clone()]
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
    return [t.detach().cpu() for t in (*found, first, second)]


MARKS = {
    "priorities": {
        "first": (("a", "b"), 2), "second": (("b", "a"), 1), "x": (("a",), 3),
        "h": ((None, "a"), 0), "error": (("b",), 1),
    },
    "open": {
        "first": ((("a", OPEN), OPEN), 0), "second": ((OPEN, ("b", OPEN)), 0),
        "h": ((OPEN, ("a", OPEN)), 0), "error": ((("b", OPEN), None), 0),
    },
    "both": {
        "first": ((("b", "a"), OPEN), 1), "second": ((("a", OPEN), "b"), 0),
        "x": (("b",), 0), "h": ((("b", OPEN), "a"), 5), "error": ((OPEN,), 2),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("marks", "num_axes", "sizes"),
    crossed([*MARKS], [1, 2], [(16, 8, 24), (13, 9, 11)]),
)
def test_training_equals_eager_torch(marks, num_axes, sizes, num_devices):
    b = 2 if num_axes == 2 and num_devices % 2 == 0 else 1
    mesh = spmd.Mesh(range(num_devices), (num_devices // b, b), ("a", "b"))

    def mark(name, t):
        spec, priority = MARKS[marks].get(name, (None, 0))
        return t if spec is None else spmd.mark_sharding(t, mesh, spec, priority=priority)

    expected = three_steps(lambda name, t: t, "cpu", *sizes)
    actual = three_steps(mark, "xla", *sizes)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


# ---- what the partitioner does -------------------------------------------------------------------


@eight
@pytest.mark.parametrize("set_mark", [in_place, as_new, spmd.constrain])
def test_a_priority_decides_a_conflict(set_mark, mesh_2d):
    a, b = torch.randn(16, 16), torch.randn(16, 16)

    def blocks_of_sum(first, second):
        x = set_mark(a.to("xla").sin(), mesh_2d, ("a", None), priority=first)
        y = set_mark(b.to("xla").cos(), mesh_2d, (None, "a"), priority=second)
        z = (x + y).tanh().sum()
        found = blocks("tanh", z)
        torch.testing.assert_close(z.cpu(), (a.sin() + b.cos()).tanh().sum())
        return found

    assert blocks_of_sum(0, 1) == blocks_of_sum(2, 7) == [(4, 16)]
    assert blocks_of_sum(1, 0) == [(16, 4)]


@eight
def test_the_priority_of_a_leaf_and_of_a_result(mesh_2d):
    """Both are given to jax with their sharding, which it would propagate before all marks."""
    a, b = torch.randn(16, 16), torch.randn(16, 16)

    def blocks_of_sum(priority):
        w = spmd.mark_sharding(a.to("xla"), mesh_2d, ("a",), priority=priority)
        y = spmd.constrain(b.to("xla").cos(), mesh_2d, (None, "a"))
        return blocks("tanh", (w + y).tanh().sum())

    def blocks_of_product(priority):
        y = spmd.constrain(b.to("xla").cos(), mesh_2d, (None, "a"))
        z = (a.to("xla").sin() @ y).tanh()
        spmd.mark_sharding(z, mesh_2d, ("a",), priority=priority)
        found = blocks("dot", z)
        torch.testing.assert_close(z.cpu(), (a.sin() @ b.cos()).tanh())
        assert z.local_shards[0].data.shape == (4, 16)
        return found

    assert blocks_of_sum(0) == [(4, 16)] and blocks_of_sum(1) == [(16, 4)]
    assert blocks_of_product(0) == [(4, 16)] and blocks_of_product(1) == [(16, 4)]


@eight
@pytest.mark.parametrize("set_mark", [in_place, as_new, spmd.constrain])
def test_an_open_dim_may_be_split_further(set_mark, mesh_2d):
    a, b = torch.randn(16, 16), torch.randn(16, 16)

    def blocks_of_sine(spec):
        x = set_mark(a.to("xla").sin(), mesh_2d, spec)
        y = spmd.constrain(b.to("xla"), mesh_2d, (("a", "b"),))
        z = (x.tan() * y).exp().sum()
        del x  # as a result it would have its sharding at rest
        found = blocks("sine", z)
        torch.testing.assert_close(z.cpu(), (a.sin().tan() * b).exp().sum())
        return found

    assert blocks_of_sine(("a",)) == [(4, 16)] and blocks_of_sine(()) == [(16, 16)]
    for spec in ((("a", OPEN),), ([OPEN],), (OPEN, None), (("a", OPEN), OPEN)):
        assert blocks_of_sine(spec) == [(2, 16)]


@eight
def test_a_leafs_gradient_gets_its_open_dims_and_priority(mesh_2d):
    w = torch.randn(16, 8).to("xla").requires_grad_()
    spmd.mark_sharding(w, mesh_2d, (("a", OPEN), None), priority=3)
    w.sin().sum().backward()
    text = debugging.stablehlo(w.grad)
    assert re.search(r'sdy.sharding_constraint %\d+ <@mesh, \[\{"a", \?\}p3, \{\}\]>', text)
    assert w.grad.sharding is w.sharding
    torch.testing.assert_close(w.grad.cpu(), w.detach().cpu().cos())


@eight
def test_data_at_rest_has_one_sharding(mesh_2d):
    closed = spmd.mark_sharding(torch.randn(16, 6).to("xla"), mesh_2d, ("a",))
    for t in (closed.detach().clone(), closed * 2):
        spmd.mark_sharding(t, mesh_2d, (("a", OPEN), OPEN), priority=1)
        spmd.sync()
        assert t.sharding_spec == closed.sharding_spec and t.partition_spec == ("a", None)
        assert t.local_shards[0].data.shape == (4, 6)
        like = torch.zeros_like(t)
        assert like.sharding is t.sharding and t.sharding.at_rest is closed.sharding
    assert t.sharding != closed.sharding
    moved = spmd.metrics.counter("resharded_bytes")
    spmd.mark_sharding(t, mesh_2d, ("a",))
    assert spmd.metrics.counter("resharded_bytes") == moved


def test_programs_are_told_apart(mesh_2d):
    """By openness and by priority, in the program's key and in the text that processes compare."""
    data = torch.randn(16, 16)

    def program(spec, priority):
        x = spmd.mark_sharding(data.to("xla").sin(), mesh_2d, spec, priority=priority)
        with lock:
            text = fingerprint.lines(plan([x._handle]).key)
        before = spmd.metrics.counter("compiles")
        x.cpu()
        return "\n".join(text), spmd.metrics.counter("compiles") - before

    cases = [(("a",), 0), (("a",), 1), ((("a", OPEN),), 0), ((("a", OPEN),), 1), ((OPEN,), 0)]
    assert len({program(*case)[0] for case in cases}) == 5
    assert [program(*case)[1] for case in cases] == [0] * 5


def test_the_rows_of_a_stack_keep_both(mesh_2d):
    rows = [torch.randn(16, 8).to("xla").requires_grad_() for _ in range(3)]
    for row in rows:
        spmd.mark_sharding(row, mesh_2d, (None, ("a", OPEN)), priority=2)
    stack = stacked(rows)
    assert stack.sharding == Sharding.marked(mesh_2d, (None, None, ("a", OPEN)), 3, priority=2)
    stack.square().sum().backward()
    torch.testing.assert_close(rows[1].grad.cpu(), 2 * rows[1].detach().cpu())
    assert rows[1].grad.sharding is rows[1].sharding


@eight
def test_a_mark_that_says_more_is_not_dropped(mesh_2d):
    def constraints(*marks):
        t = torch.randn(16, 8).to("xla") * 2
        for spec, priority in marks:
            spmd.mark_sharding(t, mesh_2d, spec, priority=priority)
        return debugging.stablehlo(t).count("sdy.sharding_constraint")

    coarse, fine = ("a", None), ("a", "b")
    assert constraints((coarse, 0), (fine, 0)) == 1
    assert constraints((coarse, 0), (fine, 1)) == 3  # and one of the result
    assert constraints((coarse, 0), (("a", ("b", OPEN)), 0)) == 2
    assert constraints((("a", OPEN), 0), (("a", ("b", OPEN)), 0)) == 1


@eight
def test_fully_shard_keeps_both(mesh_2d):
    layer = torch.nn.Linear(16, 8, device="xla")
    spmd.mark_sharding(layer.weight, mesh_2d, (("b", OPEN), None), priority=4)
    spmd.fully_shard(layer, mesh_2d, axis="a")
    assert layer.weight.sharding.priority == 4 and layer.weight.sharding.open_dims == (0,)
    assert layer.weight.partition_spec == ("b", "a")


@eight
def test_inside_of_a_manual_region(mesh_2d):
    def local(x):
        x = spmd.mark_sharding(x * 2, mesh_2d, (None, ("b", OPEN)), priority=1)
        return x + spmd.manual.all_reduce(x, "a")

    data = torch.randn(8, 8)
    f = spmd.shard_map(local, mesh_2d, in_specs=(("a",),), out_specs=("a",), axis_names={"a"})
    expected = 2 * data + 2 * data.view(4, 2, 8).sum(0).repeat(4, 1)
    y = f(data.to("xla"))
    assert re.search(r'sdy.sharding_constraint .*\{"b", \?\}p1', debugging.stablehlo(y))
    torch.testing.assert_close(y.cpu(), expected)


@LIBTPU
def test_a_program_for_tpus():
    def step():
        spmd.use_spmd()
        mesh = spmd.Mesh(range(4), (2, 2), ("a", "b"))
        w = spmd.mark_sharding(torch.ones(256, 256, device="xla"), mesh, ("a",), priority=1)
        h = spmd.mark_sharding(w @ w, mesh, (("a", OPEN), None), priority=2)
        spmd.mark_sharding(h.sin() @ w, mesh, (None, ("b", OPEN)))
        spmd.sync()

    made = spmd.plan(step, topology="v4-8")
    assert made.largest.peak_bytes > 0


# ---- the marker, and what is refused -------------------------------------------------------------


def test_the_marker_and_its_shardings_are_copied_and_pickled(mesh_2d):
    spec = spmd.PartitionSpec(("a", OPEN), OPEN, None)
    assert repr(spec) == "PartitionSpec(('a', PartitionSpec.OPEN), PartitionSpec.OPEN, None)"
    mark = Sharding.marked(mesh_2d, spec, 4, priority=2)
    for made in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert made(OPEN) is OPEN and made(spec) == spec and made(mark) is mark
    assert mark.marked_spec == (*spec, None) and mark.open_dims == (0, 1)
    assert repr(mark).startswith("Sharding.marked(") and repr(mark).endswith(", priority=2)")
    assert mark == eval(
        repr(mark), {"Sharding": Sharding, "Mesh": spmd.Mesh, "PartitionSpec": spmd.PartitionSpec}
    )


@pytest.mark.parametrize("entry", [(OPEN, "a"), ("a", OPEN, OPEN), (("a", OPEN), "b")])
def test_an_open_marker_in_a_wrong_place(entry, mesh_2d):
    t = torch.ones(8, 8, device="xla")
    words = r"PartitionSpec.OPEN stands once in an open dim's entry, behind its axes; got \("
    with pytest.raises(PartitionSpecError, match=words):
        spmd.mark_sharding(t, mesh_2d, (None, entry))
    with pytest.raises(PartitionSpecError, match=words):
        spmd.PartitionSpec(entry)
    with pytest.raises(PartitionSpecError, match=r"must be a tuple .* got PartitionSpec.OPEN"):
        spmd.mark_sharding(t, mesh_2d, OPEN)
    spmd.mark_sharding(t, mesh_2d, (None, ("a", OPEN)))
    assert t.partition_spec == (None, "a")


def test_where_no_dim_can_be_open(mesh_2d):
    spec, words = (("a", OPEN),), r"an open dim belongs to a mark .* Leave PartitionSpec.OPEN out"
    for refused in (
        lambda: spmd.ShardingSpec(mesh_2d, spec),
        lambda: Sharding.of(mesh_2d, spec, 1),
        lambda: mesh_2d.get_op_sharding(spec),
        lambda: spmd.shard_map(lambda x: x, mesh_2d, (spec,), ("a",))(torch.ones(8).to("xla")),
    ):
        with pytest.raises(PartitionSpecError, match=words):
            refused()


def test_priorities_are_whole_numbers_from_0(mesh_2d):
    t = torch.ones(8, 8, device="xla")
    for mark in (in_place, as_new, spmd.constrain):
        with pytest.raises(ValueError, match=r"priority is a whole number .*from 0 .*; got -1"):
            mark(t, mesh_2d, ("a",), priority=-1)
        with pytest.raises(ValueError, match=r"priority is a whole number .*; got 2147483648"):
            mark(t, mesh_2d, ("a",), priority=2**31)
        for wrong in (1.0, True, "1", None):
            with pytest.raises(TypeError, match=r"priority is a whole number .*; got .*of type"):
                mark(t, mesh_2d, ("a",), priority=wrong)
    assert t.sharding is None


def test_a_process_uploads_its_part_without_a_priority(mesh_2d, monkeypatch):
    monkeypatch.setattr(spmd.marks.marking.devices, "num_processes", lambda: 2)
    spec = spmd.ShardingSpec(mesh_2d, ("a",), minibatch=True)
    with pytest.raises(PartitionSpecError, match=r"without a priority; got priority=1. Leave it"):
        spmd.mark_sharding(torch.ones(8), spec, priority=1)


def test_another_partitioner_is_refused(mesh_2d, monkeypatch):
    monkeypatch.setattr(jax_sharding, "jax", SimpleNamespace(config=SimpleNamespace(**OTHER)))
    t = torch.ones(8, 8, device="xla")
    for spec, priority in ((("a",), 1), ((OPEN,), 0)):
        with pytest.raises(ProgramError, match=r"need jax's partitioner Shardy; constrain got one"):
            spmd.constrain(t, mesh_2d, spec, priority=priority)
