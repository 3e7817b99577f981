"""Automatic sharding of models that are sharded in part already, or not computed plainly."""

import copy
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from auto_steps import Block, losses, training, words
from tiers import exhaustive
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import spmd_core as spmd
from spmd_core.auto import decide, mode
from spmd_core.auto.candidates import Kind, candidates
from spmd_core.auto.machine import Machine
from spmd_core.auto.marked_graph import Shardings
from spmd_core.auto.sharding_plan import ShardingPlan
from spmd_core.errors import AutoShardingError
from spmd_core.program import growing_program

pytestmark = pytest.mark.skipif("spmd.global_runtime_device_count() < 8")
CLOSE = {"rel": 2e-5}
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def fsdp_unit(model, mesh):
    spmd.fully_shard(model.blocks[0], mesh, axis="fsdp")


def tensor_parallel(model, mesh):
    spmd.dtensor.parallelize_module(model.blocks[0], mesh, PLAN, axis="tensor")


def both(model, mesh):
    tensor_parallel(model, mesh)
    fsdp_unit(model, mesh)


def recomputed(model, mesh):
    for block in model.blocks:
        spmd.checkpoint_module(block)


def scanned(model, mesh):
    spmd.scan_model(model)


class Layers(torch.nn.Module):
    """Layers that run as one loop."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return spmd.scan_layers(self.layers, x)


def layered(model, mesh):
    model.blocks = Layers(model.blocks)


def pipelined(model, mesh):
    model.blocks = spmd.pipeline(model.blocks, mesh, axis="tensor", num_microbatches=2)


class Region(torch.nn.Module):
    """A linear layer whose products are summed by an all-reduce that is written out."""

    def __init__(self, linear, mesh, axis_names):
        super().__init__()
        self.linear, self.mesh, self.axis_names = linear, mesh, axis_names

    def forward(self, x):
        rows = "fsdp" if self.axis_names is None else None

        def product(x, weight, bias):
            return spmd.manual.all_reduce(x @ weight.T, "tensor") + bias

        specs = [(rows, None, "tensor"), (None, "tensor"), ()]
        mapped = spmd.shard_map(product, self.mesh, specs, (rows,), axis_names=self.axis_names)
        return mapped(x, self.linear.weight, self.linear.bias)


def in_region(model, mesh):
    model.blocks[1].down = Region(model.blocks[1].down, mesh, None)


def in_region_over_one_axis(model, mesh):
    model.blocks[1].down = Region(model.blocks[1].down, mesh, ["tensor"])


def plain(model, mesh):
    pass


WAYS = [
    *(fsdp_unit, tensor_parallel, both, recomputed, scanned, layered, pipelined),
    *(in_region, in_region_over_one_axis),
]
LOOPS = (scanned, layered)


def trained(way, mesh, find, *, is_bf16=False, parts=1):
    """The losses under `find(step, inputs)`, those of eager torch, and the model."""
    model, batch = words(vocabulary=64, width=32, inner=64, batch=16)

    def step_of(model):
        own = training(model, torch.optim.SGD, lr=0.1)

        def step(x, classes):
            found = []
            for ids, targets in zip(x.chunk(parts), classes.chunk(parts)):
                with torch.autocast(x.device.type, torch.bfloat16, enabled=is_bf16):
                    logits = own.model(ids)
                loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten()) / parts
                loss.backward()
                found.append(loss.detach())
            own.optimizer.step()
            own.optimizer.zero_grad()
            return torch.stack(found).sum()

        return step

    expected = losses(step_of(copy.deepcopy(model)), batch)
    model.to("xla")
    way(model, mesh)
    step, inputs = step_of(model), [x.to("xla") for x in batch]
    find(step, inputs)
    return losses(step, inputs), expected, model


@pytest.fixture
def split(monkeypatch):
    """Makes searches choose what splits features where there is such a candidate."""

    def most_split(*args, **options):
        found = candidates(*args, **options)
        return [x for x in found if x.kind is Kind.TENSOR] or found

    def without_latency(devices, of=Machine.of):
        return replace(of(devices), latency_s=0.0)  # small parameters would stay whole

    monkeypatch.setattr(decide, "candidates", most_split)
    monkeypatch.setattr(Machine, "of", without_latency)
    monkeypatch.setattr(Shardings, "without_results", lambda self: self)


@pytest.mark.parametrize(
    "way",
    [exhaustive(w) if w in (fsdp_unit, tensor_parallel, in_region) else w for w in WAYS],
)
def test_auto_shard(way, split):
    mesh = spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor"))
    before = spmd.metrics.counter("stacks_run_layer_by_layer")

    def find(step, inputs):
        plan = spmd.auto_shard(step, *inputs, mesh=mesh, candidates=1)
        assert plan.tried[0].program is not None

    got, expected, model = trained(way, mesh, find)
    assert got == pytest.approx(expected, **CLOSE)
    weights = [x.up.weight.sharding for x in model.modules() if isinstance(x, Block)]
    assert weights[-1] is not None and not weights[-1].is_replicated
    if way in LOOPS:
        assert weights[0] == weights[1]
        assert spmd.metrics.counter("stacks_run_layer_by_layer") == before


def test_a_loop_that_has_run(split):
    mesh = spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor"))

    def find(step, inputs):
        step(*inputs)
        spmd.sync()
        spmd.auto_shard(step, *inputs, mesh=mesh, candidates=1)

    got, expected, model = trained(scanned, mesh, find)
    assert got[:-1] == pytest.approx(expected[1:], **CLOSE)
    weight = model.blocks[1].up.weight
    assert weight.sharding is not None and not weight.sharding.is_replicated


@pytest.mark.parametrize(
    "way",
    [exhaustive(w) if w in (fsdp_unit, tensor_parallel, recomputed) else w for w in WAYS],
)
def test_the_mode(way, split, monkeypatch):
    monkeypatch.setattr(mode, "_MOST_COMPILED", 0)
    mesh = spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor"))
    got, expected, model = trained(way, mesh, lambda step, inputs: mode.start(mesh))
    assert got == pytest.approx(expected, **CLOSE)
    weights = [x.up.weight.sharding for x in model.modules() if isinstance(x, Block)]
    assert weights[-1] is not None and not weights[-1].is_replicated
    assert way not in LOOPS or weights[0] == weights[1]


def left_on_devices():
    """A tensor that is local to a region, behind it."""
    kept = []
    mesh = spmd.Mesh(range(8), (8,), ("rows",))

    def function(block):
        kept.append(block * 2)
        return kept[0]

    spmd.shard_map(function, mesh, [("rows",)], ("rows",))(torch.ones(8, 4, device="xla"))
    spmd.sync()
    return kept[0]


def grown(monkeypatch):
    """A tensor with room for more rows, as a loop has left it."""
    monkeypatch.setattr(growing_program, "_LEAST_ROOM", 8)
    monkeypatch.setattr(growing_program, "_CHEAP_BYTES", 0)
    rows = torch.ones(3, 4, device="xla")
    for _ in range(6):
        rows = torch.cat([rows, rows[-1:] @ torch.eye(4, device="xla")])
        spmd.sync()
    assert rows._handle.value.placement.room is not None
    return rows


def test_what_is_no_whole_tensor_is_refused_and_left_as_it_is(monkeypatch):
    local, of_any_size = left_on_devices(), grown(monkeypatch)
    for given, what in ((local, "shard_map has left"), (of_any_size, "whose size varies")):
        with pytest.raises(AutoShardingError, match=f"got a step that reads .*{what}.* by marks"):
            spmd.auto_shard(lambda given=given: given.T @ given)
    mode.start()
    total = local.T @ local
    with pytest.warns(UserWarning, match=r"leaves programs that read a tensor.*has left.*by hand"):
        spmd.sync()
    del total


@pytest.mark.parametrize(("is_bf16", "parts"), [(True, 1), (False, 2)])
def test_mixed_precision_and_accumulation(is_bf16, parts):
    mesh = spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor"))

    def find(step, inputs):
        plan = spmd.auto_shard(step, *inputs, mesh=mesh, candidates=1)
        assert plan.tried[0].program is not None

    got, expected, _ = trained(plain, mesh, find, is_bf16=is_bf16, parts=parts)
    assert got == pytest.approx(expected, rel=2e-2 if is_bf16 else 2e-5)


def test_the_loop_sums_whole_parameters_gradients_in_their_own_dtype(monkeypatch, tmp_path):
    """Under autocast products make them in bfloat16, in which the partitioner would sum them."""

    def whole(*args, **options):
        found = candidates(*args, **options)
        # Parameters are small here, and whole in the candidate that FSDP asks for, too.
        return [x for x in found if x.kind in (Kind.DATA, Kind.FSDP)][-1:]

    monkeypatch.setattr(decide, "candidates", whole)
    mesh = spmd.Mesh(range(8), (8,), ("data",))

    def summed(model, step, batch):
        step(*batch)
        text = spmd.debugging.stablehlo(model.blocks[0].up.weight)
        spmd.sync()
        return re.findall(r"all_reduce.*?-> tensor<(64x32x\w+|32x64x\w+)>", text, re.DOTALL)

    def made():
        model, batch = words(vocabulary=64, width=32, inner=64, batch=16)
        own = training(model.to("xla"), torch.optim.SGD, is_bf16=True)
        return model, own.step, [x.to("xla") for x in batch]

    model, step, batch = made()
    plan = spmd.auto_shard(step, *batch, mesh=mesh, candidates=0)
    marks = {row.name: row.marks_gradient for row in plan.parameters}
    assert marks["Words.blocks.0.up.weight"] and not marks["Words.blocks.0.norm.weight"]
    assert model.blocks[0].up.weight.sharding.is_replicated
    assert set(summed(model, step, batch)) == {"64x32xf32"}
    assert "blocks" in plan.code() and "norm" not in plan.code()
    plan.save(tmp_path / "plan.json")
    other, step, batch = made()
    ShardingPlan.load(tmp_path / "plan.json").apply(other)
    batch = [spmd.mark_sharding(x, mesh, ("data", None)) for x in batch]
    assert set(summed(other, step, batch)) == {"64x32xf32"}
