"""Communication reports: what moves between devices, over which axis, how many bytes, and why."""

from pathlib import Path

import jax
import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core import debugging, source_lines
from spmd_core.debugging import communication
from spmd_core.program import compile_cache

several = pytest.mark.skipif(
    spmd.global_runtime_device_count() == 1, reason="one device sends nothing"
)


def line_of(comment):
    """`file:line` of the one line of this file that ends with the comment `# {comment}`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {comment}")]
    return f"{__file__}:{number}"


def mesh_of(*names):
    num = spmd.global_runtime_device_count()
    second = 2 if len(names) == 2 else 1
    shape = (num // second, second)[: len(names)]
    return spmd.Mesh(range(num), shape, names)


class MLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x):
        h = self.up(x)
        return self.down(h.relu())


@several
def test_fsdp_gathers_each_weight_once_forward(num_devices):
    """Weight and batch are split over one axis, the result is marked: the weight is gathered."""
    mesh = mesh_of("fsdp")
    weight = spmd.mark_sharding(torch.randn(64, 256, device="xla"), mesh, ("fsdp",))
    x = spmd.mark_sharding(torch.randn(8 * num_devices, 64, device="xla"), mesh, ("fsdp",))
    with debugging.source_lines():
        y = x @ weight  # the product
        spmd.mark_sharding(y, mesh, ("fsdp",))
        found = debugging.collectives(y)
    (gather,) = found
    assert (gather.kind, gather.axes, gather.executions, gather.is_part) == (
        "all-gather",
        ("fsdp",),
        1,
        False,
    )
    assert (
        gather.result_bytes == 64 * 256 * 4 and gather.operand_bytes == 64 * 256 * 4 // num_devices
    )
    assert gather.groups == (tuple(range(num_devices)),)
    assert gather.line == line_of("the product") and gather.causes[0].op == "aten::mm"
    assert gather.causes[0].origin.phase is source_lines.Phase.FORWARD


@several
def test_megatron_reduces_once_forward_and_once_backward():
    """A column-parallel layer, then a row-parallel one.

    There is one all-reduce of the block's output, one of its input's gradient, and nothing else.
    """
    mesh = mesh_of("tensor")
    model = MLP(64, 256).to("xla")
    spmd.mark_sharding(model.up.weight, mesh, ("tensor", None))
    spmd.mark_sharding(model.down.weight, mesh, (None, "tensor"))
    x = spmd.mark_sharding(torch.randn(16, 64).to("xla").requires_grad_(), mesh, ())
    with debugging.source_lines():
        model(x).square().sum().backward()
        spmd.sync()
    found = debugging.collectives()
    assert [(c.kind, c.axes, c.result_bytes, c.executions) for c in found] == [
        ("all-reduce", ("tensor",), 16 * 64 * 4, 1)
    ] * 2
    forward, backward = (c.causes[0] for c in found)
    here = Path(__file__)
    lines = here.read_text().splitlines()
    assert (
        forward.origin.module == "MLP.down"
        and "self.down(h.relu())" in lines[forward.origin.line - 1]
    )
    assert backward.origin.module == "MLP.up" and "self.up(x)" in lines[backward.origin.line - 1]
    assert (forward.op, backward.op) == ("aten::linear", "aten::linear_backward")
    assert "(backward of this line)" in str(backward) and "(" not in str(forward)
    text = str(found)
    assert (
        "MLP.down aten::linear at" in text
        and "8,192 bytes of results per device" in text
        and "8,192 bytes in 2 x all-reduce over tensor" in text
        and "SPMD_SOURCE_LINES" not in text
    )


@several
def test_the_gather_that_nobody_wanted(num_devices):
    """Batch and weight are split over the same axis.

    Without a mark on the result the partitioner gathers the batch, and the table shows that.
    """
    mesh = mesh_of("fsdp")
    weight = spmd.mark_sharding(torch.randn(64, 256, device="xla"), mesh, (None, "fsdp"))
    x = spmd.mark_sharding(torch.randn(8 * num_devices, 64, device="xla"), mesh, ("fsdp",))
    (gather,) = debugging.collectives(x @ weight)
    assert gather.result_bytes == 8 * num_devices * 64 * 4  # the weight would have 64 * 256 * 4
    assert gather.line is None and gather.causes[0] == communication.Cause("aten::mm", None)
    text = str(debugging.collectives(x @ weight))
    assert "aten::mm" in text and "record and compile with SPMD_SOURCE_LINES=1" in text


@several
def test_data_parallel_gradients_are_reduced_over_the_data_axis(num_devices):
    if num_devices < 4:
        pytest.skip("two axes need four devices")
    mesh = mesh_of("data", "tensor")
    model = nn.Linear(32, 64, bias=False).to("xla")
    x = spmd.mark_sharding(torch.randn(32, 32).to("xla"), mesh, ("data",))
    spmd.mark_sharding(model.weight, mesh, ("tensor",))
    model(x).square().sum().backward()
    gradient = model.weight.grad
    (reduce,) = debugging.collectives(gradient).where(kind="all-reduce")
    assert reduce.axes == ("data",) and reduce.result_bytes == 64 * 32 * 4 // 2
    assert not debugging.collectives(gradient).where(axis="tensor")
    assert {len(group) for group in reduce.groups} == {num_devices // 2}


@several
def test_a_loop_says_how_often(num_devices):
    mesh = mesh_of("x")
    jax_mesh = mesh.get_jax_mesh()
    split = jax.sharding.NamedSharding(jax_mesh, jax.sharding.PartitionSpec("x"))

    def power(a):
        # The product needs the whole result of the previous iteration, which is split.
        return jax.lax.fori_loop(
            0, 7, lambda i, c: jax.lax.with_sharding_constraint(a @ c, split), a
        )

    a = spmd.mark_sharding(torch.randn(8 * num_devices, 8 * num_devices).to("xla"), mesh, ("x",))
    (gather,) = debugging.collectives(spmd.call_jax(power, a))
    assert (
        gather.executions == 7
        and gather.kind == "all-gather"
        and gather.causes[0].op == "jax::power"
    )
    assert (
        debugging.collectives(spmd.call_jax(power, a)).result_bytes
        == 7 * gather.result_bytes
        == 7 * (8 * num_devices) ** 2 * 4
    )


@several
def test_explicit_collectives_and_a_permute(num_devices):
    mesh = mesh_of("x")
    x = torch.randn(num_devices * num_devices, 4).to("xla")
    ring = [(i, (i + 1) % num_devices) for i in range(num_devices)]

    def exchange(block):
        return spmd.manual.reduce_scatter(spmd.manual.collective_permute(block, "x", ring), "x")

    found = debugging.collectives(spmd.shard_map(exchange, mesh, [("x",)], ("x",))(x))
    kinds = {c.kind: c for c in found}
    assert kinds["collective-permute"].groups == tuple(ring) and kinds[
        "collective-permute"
    ].axes == ("x",)
    assert kinds["collective-permute"].causes[0].op == "spmd::collective_permute"
    assert (
        kinds["reduce-scatter"].result_bytes * num_devices == kinds["reduce-scatter"].operand_bytes
    )


@several
def test_device_ids_are_the_meshs_own(num_devices):
    """Groups hold device ids, not positions in the mesh."""
    if num_devices < 8:
        pytest.skip("needs eight devices")
    order = [3, 1, 6, 0, 4, 5, 7, 2]
    mesh = spmd.Mesh(order, (2, 4), ("a", "b"))
    x = spmd.mark_sharding(torch.randn(16, 16).to("xla"), mesh, ("a", "b"))
    (reduce,) = debugging.collectives(spmd.mark_sharding(x.sum(1), mesh, ("a",)))
    assert reduce.axes == ("b",) and {frozenset(g) for g in reduce.groups} == {
        frozenset(order[:4]),
        frozenset(order[4:]),
    }


@several
def test_blocks_that_are_turned_use_a_part_of_an_axis(num_devices):
    """From (4, 2) blocks to (2, 4).

    Pairs of devices with the same columns exchange halves; then blocks move to their final devices.
    """
    if num_devices < 8:
        pytest.skip("needs eight devices")
    mesh = spmd.Mesh(range(8), (4, 2), ("a", "b"))
    x = spmd.mark_sharding(torch.randn(64, 64).to("xla"), mesh, ("a", "b"))
    found = debugging.collectives(spmd.mark_sharding(x * 2, mesh, ("b", "a")))
    exchange, move = found
    assert (exchange.kind, exchange.axes, exchange.is_part) == (
        "all-to-all",
        ("a",),
        True,
    ) and "a (part)" in str(found)
    # Two neighbours along `a` form one block with twice the rows: device 2 * i + j holds row block
    # i and column block j.
    assert {frozenset(g) for g in exchange.groups} == {
        frozenset((2 * i + j, 2 * (i + 1) + j)) for i in (0, 2) for j in (0, 1)
    }
    assert move.kind == "collective-permute" and {source for source, _ in move.groups} == set(
        range(8)
    )


MESHES = [spmd.Mesh(range(8), (2, 2, 2), ("x", "y", "z")), spmd.Mesh(range(8), (8,), ("all",))]


@pytest.mark.parametrize(
    ("groups", "is_permute", "expected"),
    [
        (((0, 4), (1, 5), (2, 6), (3, 7)), False, (("x",), False)),
        (((0, 1, 2, 3), (4, 5, 6, 7)), False, (("y", "z"), False)),
        ((tuple(range(8)),), False, (("x", "y", "z"), False)),
        (((0, 3), (1, 2), (4, 7), (5, 6)), False, (("y", "z"), True)),
        (((0, 1), (1, 2)), True, (("y", "z"), False)),
        (((0, 9), (1, 8)), False, (None, False)),
        (((0,), (1,)), False, ((), False)),
    ],
)
def test_groups_are_matched_with_axes(groups, is_permute, expected):
    assert communication.match_axes(groups, MESHES, is_permute=is_permute) == expected


def test_a_coarser_mesh_matches_where_it_is_exact():
    halves = spmd.Mesh(range(8), (2, 4), ("outer", "inner"))
    assert communication.match_axes(((0, 1, 2, 3), (4, 5, 6, 7)), [MESHES[1], halves]) == (
        ("inner",),
        False,
    )
    assert communication.match_axes(((0, 1), (2, 3), (4, 5), (6, 7)), [halves]) == (
        ("inner",),
        True,
    )


def test_a_program_that_moves_nothing_says_so():
    y = torch.ones(3, 3).to("xla") + 1
    found = debugging.collectives(y)
    assert found == () and str(found).endswith("no collectives") and found.result_bytes == 0


def test_without_a_program_there_is_nothing_to_read():
    compile_cache.clear()
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"collectives reads a compiled program; none was compiled yet\. Call it after sync",
    ):
        debugging.collectives()
    y = torch.ones(4).to("xla") * 3
    assert y.sum().item() == 12
    assert debugging.collectives() == debugging.collectives(program=compile_cache.newest())


@several
def test_bytes_that_a_device_sends(num_devices):
    mesh = mesh_of("x")
    x = spmd.mark_sharding(torch.randn(num_devices, 8, device="xla"), mesh, ("x",))
    share = (num_devices - 1) / num_devices
    whole = spmd.mark_sharding(x * 1, mesh, (None, None))
    (gather,) = debugging.collectives(whole)
    assert gather.moved_bytes == num_devices * 8 * 4 * share
    (reduction,) = debugging.collectives(x.sum(0))
    assert reduction.moved_bytes == 2 * 8 * 4 * share

    def local(block):
        scattered = spmd.manual.reduce_scatter(block, "x", 1)
        return spmd.manual.collective_permute(
            scattered, "x", [(i, (i + 1) % num_devices) for i in range(num_devices)]
        )

    y = spmd.mark_sharding(torch.randn(num_devices, num_devices, device="xla"), mesh, ("x",))
    moved = debugging.collectives(spmd.shard_map(local, mesh, [("x",)], (None, "x"))(y))
    assert {c.kind: c.moved_bytes for c in moved} == {
        "reduce-scatter": num_devices * 4 * share,
        "collective-permute": 4.0,
    }


def test_a_program_is_given_by_its_record(monkeypatch):
    x = torch.ones(3, device="xla")
    (x + 41).sum().item()
    record = max(spmd.metrics.programs(), key=lambda r: r.num_ops)
    assert "aten::add" in debugging.operations(program=record)
    assert debugging.hlo(program=record) and debugging.stablehlo(program=record)
    assert debugging.collectives(program=record).program == record.name
    compile_cache.clear()
    with pytest.raises(spmd.errors.SpmdError, match=r"which was dropped, as spmd\.config"):
        debugging.collectives(program=record)
