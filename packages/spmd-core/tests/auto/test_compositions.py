"""Automatic sharding of models that are sharded in part already, or not computed plainly."""

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from auto_steps import losses, training, words
from tiers import exhaustive
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import spmd_core as spmd
from spmd_core.auto import decide, mode
from spmd_core.auto.candidates import Kind, candidates
from spmd_core.auto.machine import Machine
from spmd_core.auto.marked_graph import Shardings
from spmd_core.errors import AutoShardingError

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


def pipelined(model, mesh):
    model.blocks = spmd.pipeline(model.blocks, mesh, axis="tensor", num_microbatches=2)


def plain(model, mesh):
    pass


WAYS = [fsdp_unit, tensor_parallel, both, recomputed, scanned, pipelined]


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
    [w if w in (both, scanned, recomputed) else exhaustive(w) for w in WAYS if w is not pipelined],
)
def test_auto_shard(way, split):
    mesh = spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor"))
    before = spmd.metrics.counter("stacks_run_layer_by_layer")

    def find(step, inputs):
        plan = spmd.auto_shard(step, *inputs, mesh=mesh, candidates=1)
        assert plan.tried[0].program is not None

    got, expected, model = trained(way, mesh, find)
    assert got == pytest.approx(expected, **CLOSE)
    weights = [block.up.weight.sharding for block in model.blocks]
    assert weights[1] is not None and not weights[1].is_replicated
    if way is scanned:
        assert weights[0] == weights[1]
        assert spmd.metrics.counter("stacks_run_layer_by_layer") == before


def test_a_pipeline_is_refused():
    mesh = spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor"))
    rule = r"operations on whole tensors; got a step with a pipeline or a shard_map. Shard"
    with pytest.raises(AutoShardingError, match=rule):
        trained(pipelined, mesh, lambda step, inputs: spmd.auto_shard(step, *inputs, mesh=mesh))


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
def test_the_mode(way, monkeypatch):
    monkeypatch.setattr(mode, "_MOST_COMPILED", 0)
    mesh = spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor"))
    said = contextlib.nullcontext()
    if way in (scanned, pipelined):
        said = pytest.warns(UserWarning, match=r"leaves programs with (layers|a pipeline).*by hand")
    with said:
        got, expected, _ = trained(way, mesh, lambda step, inputs: mode.start(mesh))
    assert got == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize(("is_bf16", "parts"), [(True, 1), (False, 2)])
def test_mixed_precision_and_accumulation(is_bf16, parts):
    mesh = spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor"))

    def find(step, inputs):
        plan = spmd.auto_shard(step, *inputs, mesh=mesh, candidates=1)
        assert plan.tried[0].program is not None

    got, expected, _ = trained(plain, mesh, find, is_bf16=is_bf16, parts=parts)
    assert got == pytest.approx(expected, rel=2e-2 if is_bf16 else 2e-5)
