"""auto/auto_shard.py: shardings are found and applied, and values stay those of eager torch."""

import copy
import signal
from collections import Counter

import pytest
import torch
from auto_steps import losses, pictures, training, words
from tiers import exhaustive
from torch import nn

import spmd_core as spmd
from spmd_core.auto import decide
from spmd_core.auto.candidates import Kind, candidates
from spmd_core.auto.marked_graph import Shardings, marked
from spmd_core.auto.recorded_step import record
from spmd_core.errors import AutoShardingError, NotInSpmdModeError
from spmd_core.runtime import devices

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
# Rounding of sums in another order, after three steps.
CLOSE = {"rel": 2e-5}


def mesh_of(*sizes):
    """A mesh of as many devices as there are, of these sizes; 0 stands for what is left."""
    count = spmd.global_runtime_device_count()
    rest = count
    for n in sizes:
        rest //= n or 1
    if rest < 1:
        pytest.skip(f"{count} devices are too few for {sizes}")
    return spmd.Mesh(range(count), [n or rest for n in sizes])


def compared(model, batch, make=ADAMW, mark=lambda model: None, **options):
    """The plan of a step; the losses of a loop after it must be those of eager torch."""
    names = ("mesh", "candidates", "memory", "report", "on_interrupt")
    search = {k: options.pop(k) for k in names if k in options}
    reference = losses(training(copy.deepcopy(model), make, **options).step, batch)
    moved = model.to("xla")
    mark(moved)
    own = training(moved, make, **options)
    inputs = [x.to("xla") for x in batch]
    plan = spmd.auto_shard(own.step, *inputs, **{"candidates": 0, **search})
    assert losses(own.step, inputs) == pytest.approx(reference, **CLOSE)
    return plan, own


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("sizes", "vocabulary", "batch"),
    [((0,), 32, 8), ((2, 0), 13, 7)],
)
def test_words_on_any_mesh(sizes, vocabulary, batch):
    compared(*words(vocabulary=vocabulary, batch=batch), mesh=mesh_of(*sizes), fused=True)


@pytest.mark.parametrize("batch", [exhaustive(8), 5])
def test_pictures(batch):
    compared(*pictures(batch), SGD, momentum=0.9, mesh=mesh_of(2, 0))


def test_candidates_are_compiled_and_parameters_are_marked():
    model, batch = words(vocabulary=64, width=32, inner=128, batch=16)
    plan, own = compared(model, batch, candidates=2)
    assert sum(one.program is not None for one in plan.tried) == 2
    best, *_ = plan.tried
    assert best.seconds == min(one.seconds for one in plan.tried if one.seconds is not None)
    for row in plan.parameters:
        found = model.get_parameter(row.name.partition(".")[2])
        assert found.partition_spec == row.spec and tuple(found.shape) == row.shape
        moments = own.optimizer.state[found]
        assert moments["exp_avg"].partition_spec == row.spec
    # What the table says that a device holds is what it holds.
    weight = model.blocks[0].up.weight
    (row,) = [x for x in plan.parameters if x.name.endswith("blocks.0.up.weight")]
    spmd.sync(wait=True)
    shards = spmd.to_jax(weight).addressable_shards
    assert {shard.data.nbytes for shard in shards} == {row.bytes}


@pytest.mark.parametrize("sizes", [(0,), (0, 2)])
def test_the_program_of_the_loop_is_the_one_that_was_chosen(sizes, monkeypatch):
    mesh = mesh_of(*sizes)
    kind = Kind.TENSOR if len(sizes) > 1 else Kind.FSDP

    def of_kind(*args, **options):
        found = candidates(*args, **options)
        return [x for x in found if x.kind is kind] or found

    monkeypatch.setattr(decide, "candidates", of_kind)
    # Results of modules are marked also where Shardy's propagation is the same without.
    monkeypatch.setattr(Shardings, "without_results", lambda self: self)
    model, batch = words(vocabulary=512, width=64, inner=256, batch=16)
    own = training(model.to("xla"), fused=True)
    inputs = [x.to("xla") for x in batch]

    def operations(recorded):
        return [(x.entry.name, x.entry.sharding, x.entry.outs) for x in recorded.nodes]

    graph = record(lambda: own.step(*inputs), lambda recorded: recorded.graph)
    plan = spmd.auto_shard(own.step, *inputs, mesh=mesh, candidates=1)
    best = plan.tried[0]
    if mesh.size() > 1:
        assert best.candidate.kind is kind and plan.activations and best.shardings.gradients
    chosen = operations(marked(graph, best.shardings))
    looped = operations(record(lambda: own.step(*inputs), lambda recorded: recorded.graph))
    assert Counter(looped) == Counter(chosen)


def test_memory_is_respected():
    if spmd.global_runtime_device_count() < 8:
        pytest.skip("on few devices all candidates take about as much")
    model, batch = words(vocabulary=2048, width=128, inner=256, batch=8)
    free, _ = compared(copy.deepcopy(model), batch, mesh=mesh_of(0), candidates=5)
    peaks = [x.program.peak_bytes for x in free.tried if x.program is not None]
    assert peaks[0] > min(peaks)  # the fastest is not the smallest
    small, _ = compared(model, batch, mesh=mesh_of(0), candidates=5, memory=min(peaks))
    assert small.tried[0].program.peak_bytes <= min(peaks)


def test_nothing_fits():
    model, batch = words()
    own = training(model.to("xla"))
    inputs = [x.to("xla") for x in batch]
    with pytest.raises(AutoShardingError, match=r"must fit the 20,000 bytes.*Take more devices"):
        spmd.auto_shard(own.step, *inputs, mesh=mesh_of(0), memory=20_000, candidates=1)
    assert all(p.sharding is None for p in model.parameters())


@pytest.mark.parametrize("sizes", [(0,), exhaustive((2, 0))])
def test_marks_of_the_user_stay(sizes):
    mesh = mesh_of(*sizes)
    last = len(sizes) - 1
    model, batch = words()

    def mark(model):
        spmd.mark_sharding(model.blocks[0].up.weight, mesh, (None, last))
        spmd.mark_sharding(model.table.weight, mesh, (0, None))
        model.blocks[1].register_forward_hook(
            lambda module, inputs, result: spmd.mark_sharding(result, mesh, (None, None, last))
        )

    plan, _ = compared(model, batch, mark=mark)
    assert plan.mesh == mesh
    specs = {row.name.partition(".")[2]: row.spec for row in plan.parameters}
    assert specs["blocks.0.up.weight"] == (None, last) and specs["table.weight"] == (0, None)
    assert model.blocks[0].up.weight.partition_spec == (None, last)


def test_a_model_alone():
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    x = torch.randn(8, 16)
    expected = model(x)
    model.to("xla")
    plan = spmd.auto_shard(model, x.to("xla"), candidates=0)
    assert {row.name for row in plan.parameters} >= {"Sequential.0.weight", "Sequential.2.bias"}
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(model(x.to("xla")).cpu(), expected)
    frozen = nn.Linear(16, 64).eval().to("xla")
    plan = spmd.auto_shard(frozen, x, candidates=0)
    assert plan.inputs and frozen.weight.sharding is not None


@pytest.mark.exhaustive  # the tables of two searches are compared in test_searches.py
def test_a_plan_is_the_same_again():
    texts = set()
    for _ in range(2):
        model, batch = words()
        own = training(model.to("xla"))
        plan = spmd.auto_shard(own.step, *(x.to("xla") for x in batch), candidates=0)
        texts.add(plan.table() + plan.code())
    assert len(texts) == 1


def test_for_devices_that_are_not_there():
    model, batch = words()
    own = training(model.to("xla"))
    count = spmd.global_runtime_device_count()
    topology = f"cpu-{count}"
    plan = spmd.auto_shard(own.step, *(x.to("xla") for x in batch), topology=topology, candidates=1)
    assert plan.mesh.size() == count
    assert all(p.sharding is None for p in model.parameters())


@pytest.fixture
def interrupts():
    """Python's own handler, as a shell starts a process in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_at(number):
    """A `report` that presses Ctrl-C when the candidate of this number is to be compiled."""

    def report(text):
        if text.startswith(f"compiling candidate {number} "):
            signal.raise_signal(signal.SIGINT)

    return report


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_search_changes_nothing():
    model, batch = words(vocabulary=512, width=64, inner=256, batch=16)
    expected = losses(training(copy.deepcopy(model)).step, batch)
    own = training(model.to("xla"))
    inputs = [x.to("xla") for x in batch]
    with pytest.raises(KeyboardInterrupt):
        spmd.auto_shard(own.step, *inputs, candidates=3, report=interrupted_at(2))
    assert all(p.sharding is None and p.grad is None for p in model.parameters())
    assert not own.optimizer.state
    assert losses(own.step, inputs) == pytest.approx(expected, **CLOSE)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("number", [exhaustive(1), 2])
def test_an_interrupted_search_gives_the_best_so_far(number):
    model, batch = words()
    plan, _ = compared(
        model,
        batch,
        candidates=2,
        mesh=mesh_of(0),
        report=interrupted_at(number),
        on_interrupt="best",
    )
    assert [one.program is not None for one in plan.tried[: number - 1]] == [True] * (number - 1)
    assert all(one.program is None for one in plan.tried[number - 1 :]) and len(plan.tried) > 1
    assert all(p.sharding is not None for p in model.parameters())


def test_a_search_that_is_interrupted_before_its_first_candidate(monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(decide, "candidates", interrupted)
    model, batch = words()
    own = training(model.to("xla"))
    with pytest.raises(KeyboardInterrupt):
        spmd.auto_shard(own.step, *(x.to("xla") for x in batch), on_interrupt="best")
    assert all(p.sharding is None for p in model.parameters())


def test_bad_arguments(monkeypatch):
    with pytest.raises(AutoShardingError, match=r"time, memory, measured; got 'speed'.*='time'"):
        spmd.auto_shard(lambda: None, objective="speed")
    with pytest.raises(AutoShardingError, match=r"raise, best; got 'stop'.*on_interrupt='raise'"):
        spmd.auto_shard(lambda: None, on_interrupt="stop")
    with pytest.raises(AutoShardingError, match=r"a function or a module; got.*type int"):
        spmd.auto_shard(3)
    with pytest.raises(TypeError, match="mesh"):
        spmd.auto_shard(lambda: None, mesh=8)
    with pytest.raises(ValueError, match="candidates"):
        spmd.auto_shard(lambda: None, candidates=-1)
    monkeypatch.setattr(devices._state, "spmd", False)
    with pytest.raises(NotInSpmdModeError, match="auto_shard"):
        spmd.auto_shard(lambda: None)


def test_marks_over_several_meshes():
    count = spmd.global_runtime_device_count()
    if count < 4:
        pytest.skip("needs two different meshes")
    model, batch = words()
    model.to("xla")
    spmd.mark_sharding(model.table.weight, spmd.Mesh(range(count), (count,)), (0, None))
    other = spmd.Mesh(range(count), (2, count // 2))
    spmd.mark_sharding(model.blocks[0].up.weight, other, (0, 1))
    with pytest.raises(AutoShardingError, match=r"must share one mesh; got .*Write them over one"):
        spmd.auto_shard(training(model).step, *(x.to("xla") for x in batch), candidates=0)
