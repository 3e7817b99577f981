"""auto/propagated.py: what Shardy's propagation says is near to what XLA compiles."""

import jax
import numpy as np
import pytest
from auto_steps import chosen, training, words

import spmd_core as spmd
from spmd_core.auto import decide
from spmd_core.auto.candidates import Kind
from spmd_core.auto.machine import Machine
from spmd_core.auto.marked_graph import marked
from spmd_core.auto.propagated import MLIRError, Moved, _ir, _Reader, propagated, seconds
from spmd_core.auto.read_step import read_step
from spmd_core.auto.recorded_step import record
from spmd_core.debugging import communication
from spmd_core.planner.topology import present
from spmd_core.program import ir
from spmd_core.program.compilation import build
from spmd_core.program.lower import lower
from spmd_core.program.target import Target


@pytest.mark.skipif("spmd.global_runtime_device_count() < 8")
@pytest.mark.parametrize(
    ("kind", "shape"), [(Kind.FSDP, (8,)), (Kind.DATA, (8,)), (Kind.TENSOR, (4, 2))]
)
def test_as_much_is_moved_as_in_the_compiled_program(kind, shape):
    def read(recorded, groups, found):
        graph = marked(recorded.graph, found)
        before = ir.Graph.of(graph)
        moved = propagated(lower(before, Target.of(before), "step"), Machine.of(present().devices))
        program = build(graph, "step")
        return moved, communication.of_text(program.compiled_text(), program.lowered)

    # With few rows, XLA and Shardy differ in whether rows or weights are gathered.
    moved, compiled = chosen(kind, spmd.Mesh(range(8), shape), read, batch=128)
    assert {x.crosses for x in moved} == {False}
    total = sum(c.moved_bytes * (c.executions or 1) for c in compiled)
    assert total > 1e6 and sum(x.bytes for x in moved) == pytest.approx(total, rel=0.2)
    for name in ("all-gather", "reduce-scatter") if kind is Kind.FSDP else ("all-reduce",):
        expected = sum(c.moved_bytes * (c.executions or 1) for c in compiled.where(kind=name))
        assert sum(x.bytes for x in moved if x.kind == name) == pytest.approx(expected, rel=0.2)


# What the passes leave, over a mesh of 2 x 4 devices whose axis `x` crosses slices.
MODULE = """
sdy.mesh @mesh = <["x"=2, "y"=4]>
func.func @main(
    %a: tensor<16x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>},
    %n: tensor<i64>) -> tensor<16x8xf32> {
  BODY
  return %r : tensor<16x8xf32>
}
func.func private @inner(
    %a: tensor<16x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}) -> tensor<16x8xf32> {
  %r = sdy.all_reduce {"x"} %a out_sharding=<@mesh, [{"y"}, {}]> : tensor<16x8xf32>
  return %r : tensor<16x8xf32>
}
"""
GATHER = 'sdy.all_gather [{"y"}, {}] %a out_sharding=<@mesh, [{}, {}]> : tensor<16x8xf32>'
ROWS = '{sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"y"}, {}]>]>}'
BYTES = 16 * 8 * 4


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"%r = {GATHER}", [Moved("all-gather", False, 1, BYTES * 3 / 4, BYTES)]),
        # XLA computes equal collectives of one value once.
        (
            f"%q = {GATHER}\n  %r = {GATHER}",
            [Moved("all-gather", False, 1, BYTES * 3 / 4, BYTES)],
        ),
        (  # a parameter that is cast, and what is computed from it
            f"%u = stablehlo.convert %a {ROWS} : tensor<16x8xf32>\n"
            f"  %v = stablehlo.tanh %u {ROWS} : tensor<16x8xf32>\n"
            f"  %q = {GATHER.replace('%a', '%u')}\n  %r = {GATHER.replace('%a', '%v')}",
            [Moved("all-gather", False, 2, 2 * BYTES * 3 / 4, BYTES)],
        ),
        (
            '%r = sdy.all_reduce {"x"} %a out_sharding=<@mesh, [{"y"}, {}]> : tensor<16x8xf32>',
            [Moved("all-reduce", True, 1, 2 * BYTES / 4 / 2)],
        ),
        (  # the minor part of an axis
            '%r = sdy.all_gather [{"y":(2)2}, {}] %a out_sharding=<@mesh, [{"y":(1)2}, {}]>'
            " : tensor<16x8xf32>",
            [Moved("all-gather", False, 1, BYTES / 2 / 2, BYTES / 2)],
        ),
        (
            '%q = sdy.all_reduce {"x"} %a out_sharding=<@mesh, [{"y"}, {}]> : tensor<16x8xf32>\n'
            '  %r = sdy.all_slice [{}, {"x"}] %q out_sharding=<@mesh, [{"y"}, {"x"}]>'
            " : tensor<16x8xf32>",
            [Moved("reduce-scatter", True, 1, BYTES / 8)],
        ),
        (
            '%r = sdy.collective_permute %a out_sharding=<@mesh, [{"x", "y":(2)2}, {}]>'
            " : tensor<16x8xf32>",
            [Moved("collective-permute", True, 1, BYTES / 4)],
        ),
        (
            "%p = func.call @inner(%a) : (tensor<16x8xf32>) -> tensor<16x8xf32>\n"
            "  %zero = stablehlo.constant dense<0> : tensor<i64>\n"
            "  %r, %i = stablehlo.while(%v = %p, %j = %zero) : tensor<16x8xf32>, tensor<i64>\n"
            "  cond {\n"
            "    %most = sdy.constant dense<5> : tensor<i64>\n"
            "    %c = stablehlo.compare LT, %j, %most : (tensor<i64>, tensor<i64>) -> tensor<i1>\n"
            "    stablehlo.return %c : tensor<i1>\n"
            "  } do {\n"
            f"    %g = {GATHER}\n"
            "    stablehlo.return %g, %j : tensor<16x8xf32>, tensor<i64>\n"
            "  }",
            [
                Moved("all-gather", False, 5, 5 * BYTES * 3 / 4),
                Moved("all-reduce", True, 1, 2 * BYTES / 4 / 2),
            ],
        ),
        (  # as in a manual region: between devices 0 and 4, 1 and 5, ...
            '%r = "stablehlo.all_reduce"(%a) <{replica_groups = dense<[[0, 4], [1, 5], [2, 6],'
            " [3, 7]]> : tensor<4x2xi64>}> ({\n"
            "  ^bb0(%x: tensor<f32>, %y: tensor<f32>):\n"
            "    %s = stablehlo.add %x, %y : tensor<f32>\n"
            "    stablehlo.return %s : tensor<f32>\n"
            "  }) : (tensor<16x8xf32>) -> tensor<16x8xf32>",
            [Moved("all-reduce", True, 1, 2 * BYTES / 2)],
        ),
        (  # the same, as jax 0.12 writes it, over a part of the axis `y`
            '%r = "stablehlo.all_reduce"(%a) <{replica_groups = '
            "#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = "
            '[#stablehlo.axis_ref<name = "y", sub_axis_info = (1)2>]>}> ({\n'
            "  ^bb0(%x: tensor<f32>, %y: tensor<f32>):\n"
            "    %s = stablehlo.add %x, %y : tensor<f32>\n"
            "    stablehlo.return %s : tensor<f32>\n"
            "  }) : (tensor<16x8xf32>) -> tensor<16x8xf32>",
            [Moved("all-reduce", False, 1, 2 * BYTES / 2)],
        ),
        (
            "%r = stablehlo.add %a, %a : tensor<16x8xf32>",
            [],
        ),
    ],
)
def test_what_is_read(body, expected):
    with jax._src.interpreters.mlir.make_ir_context():
        if "replica_group_mesh_axes" in body and jax.__version_info__ < (0, 12, 0):
            pytest.skip("its StableHLO names no axes there")
        module = _ir.Module.parse(MODULE.replace("BODY", body))
        slices = np.array([0, 0, 0, 0, 1, 1, 1, 1])
        reader = _Reader(module, {"x": 2, "y": 4}, {"x": True, "y": False}, slices)
        assert list(reader.read()) == expected


# A manual region that gathers the rows of %a, as those of gathers in stages do.
REGION = """%NAME = sdy.manual_computation(%OPERAND)
    in_shardings=[<@mesh, [{"y"}, {}]>] out_shardings=[<@mesh, [{}, {}]>]
    manual_axes={"x", "y"} (%part: tensor<4x8xf32>) {
  %whole = "stablehlo.all_gather"(%part) <{all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>}>
    : (tensor<4x8xf32>) -> tensor<16x8xf32>
  sdy.return %whole : tensor<16x8xf32>
} : (tensor<16x8xf32>) -> tensor<16x8xf32>"""


@pytest.mark.parametrize(
    ("second", "times"),
    [
        (REGION.replace("OPERAND", "a"), 1),
        (REGION.replace("OPERAND", "other"), 2),
        (REGION.replace("OPERAND", "a").replace("[4, 5, 6, 7]", "[7, 6, 5, 4]"), 2),
    ],
    ids=["equal", "of another value", "another gather"],
)
def test_equal_regions_of_one_value_count_once(second, times):
    first = REGION.replace("OPERAND", "a").replace("NAME", "first")
    # The operation in between shifts the numbers of the values that follow.
    body = f"%other = stablehlo.negate %a : tensor<16x8xf32>\n{first}\n"
    body += second.replace("NAME", "r")
    with jax._src.interpreters.mlir.make_ir_context():
        module = _ir.Module.parse(MODULE.replace("BODY", body))
        reader = _Reader(module, {"x": 2, "y": 4}, {"x": True, "y": False}, np.zeros(8, int))
        expected = Moved("all-gather", False, times, times * BYTES * 3 / 4)
        assert list(reader.read()) == [expected]


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_which_layers_are_a_loop(is_recomputed, monkeypatch):
    model, example = words()
    moved = model.to("xla")
    for block in moved.blocks if is_recomputed else ():
        spmd.checkpoint_module(block)
    step, inputs = training(moved).step, [x.to("xla") for x in example]

    def read(recorded):
        graph = read_step(recorded.graph)
        found = [decide._has_loops(graph)]  # it is short, and not for TPUs
        monkeypatch.setattr(decide, "_MOST_UNFOLDED", 0)
        found.append(decide._has_loops(graph))
        monkeypatch.setattr(decide.devices, "platform", lambda: "tpu")
        return [*found, decide._has_loops(graph)]

    assert record(lambda: step(*inputs), read) == [False, False, is_recomputed]


def test_modelled_seconds():
    links, network = 2e9, 1e9
    machine = Machine("chip", 8, 1.0, 1.0, links, network, 1e-3, None, (0,) * 8, 1.5)
    moved = [
        Moved("all-gather", False, 2, 4e9),
        Moved("all-reduce", True, 1, 3e9),
        Moved("reduce-scatter", False, 1, 2e9),
    ]
    assert seconds(moved, machine) == pytest.approx(2 + 3 + 1.5 + 4e-3)


def test_what_shardy_refuses_keeps_the_models_figures(monkeypatch):
    def refused(lowered, machine):
        raise MLIRError("no such shardings", [])

    monkeypatch.setattr(decide, "propagated", refused)
    model, batch = words()
    own = training(model.to("xla"))
    said = []
    count = spmd.global_runtime_device_count()
    plan = spmd.auto_shard(
        own.step,
        *(x.to("xla") for x in batch),
        mesh=spmd.Mesh(range(count), (count,)),
        candidates=1,
        report=said.append,
    )
    assert any(text.startswith("Shardy refuses candidate 1: ") for text in said)
    assert all(one.propagated_s is None for one in plan.tried)
    assert plan.tried[0].seconds is not None
