"""planner/plan.py: programs of a plan are those of a run, and nothing runs."""

import contextlib
import gc
import re
from dataclasses import dataclass

import pytest
import torch
from planner import training
from torch import nn

import spmd_core as spmd
from spmd_core.planner.memory_uses import MemoryUse, roles
from spmd_core.planner.planned import TopologyPlan
from spmd_core.program import compile_cache, planned_program
from spmd_core.runtime import devices
from spmd_core.runtime.processes import get_1d_mesh

counter = spmd.metrics.counter


@pytest.fixture(scope="module")
def planned():
    """A plan that tests read and leave as it is."""
    gc.collect()  # what other modules left in cycles would be computed in the plan
    spmd.sync()
    count = spmd.global_runtime_device_count()
    return spmd.plan(lambda: training.train(count), topology=f"cpu-{count}")


@dataclass(frozen=True)
class Whole:
    """A plan of many steps, all compiled, and what the process saw of it.

    Attributes:
        made: the plan.
        num_steps: how many steps ended in it.
        called, called_before: what step closures were given that were added in it, and before it.
        uploads, random_states, weights: before the plan and after it.
        pending: the values of a tensor that was pending before.
    """

    made: TopologyPlan
    num_steps: int
    called: list[float]
    called_before: list[float]
    uploads: tuple[int, int]
    random_states: tuple[torch.Tensor, torch.Tensor]
    weights: tuple[torch.Tensor, torch.Tensor]
    pending: torch.Tensor


@pytest.fixture(scope="module")
def whole():
    gc.collect()
    spmd.sync()
    count = spmd.global_runtime_device_count()
    weights = [training.train(count, steps=2)[0].weight.cpu()]
    torch.manual_seed(11)
    uploads, states = ([read()] for read in (lambda: counter("uploads"), torch.get_rng_state))
    pending = torch.arange(8.0, device="xla") + 1
    called, called_before, ran = [], [], []
    spmd.add_step_closure(lambda value: called_before.append(value.item()), args=(pending.sum(),))

    def after_step(loss: torch.Tensor) -> None:
        ran.append(loss)
        spmd.add_step_closure(lambda value: called.append(value.item()), args=(loss,))

    made = spmd.plan(
        lambda: training.train(count, steps=50, after_step=after_step),
        topology=f"cpu-{count}",
        compile_all=True,
    )
    uploads.append(counter("uploads"))
    states.append(torch.get_rng_state())
    values = (pending * 2).cpu()
    weights.append(training.train(count, steps=2)[0].weight.cpu())
    return Whole(made, len(ran), called, called_before, uploads, states, weights, values)


@pytest.mark.one_device
def test_the_step_program_takes_what_a_run_takes(planned, num_devices):
    training.train(num_devices)
    ran = spmd.metrics.programs()[-1]
    step = planned.step
    # A run's program has no source lines, and is another one for the compiler's cache only.
    assert step.costs.least_bytes == ran.argument_bytes + ran.output_bytes
    assert step.peak_bytes == pytest.approx(ran.peak_bytes, rel=0.02)
    assert step.state_bytes == ran.argument_bytes + ran.output_bytes - ran.alias_bytes
    assert planned.largest.peak_bytes == max(p.peak_bytes for p in planned.programs)
    assert planned.peak_bytes == planned.largest.peak_bytes


@pytest.mark.one_device
def test_memory_by_part(planned, num_devices):
    parts = planned.step.parts
    assert parts[MemoryUse.PARAMETERS] == training.NUM_PARAMS * 4 // num_devices
    # Two moments of each parameter, and a step count of each tensor on the host or the device.
    moments = 2 * training.NUM_PARAMS * 4 // num_devices
    assert moments <= parts[MemoryUse.OPTIMIZER] <= moments + 64
    batch = training.BATCH * training.WIDTH * 4 // num_devices
    assert batch <= parts[MemoryUse.INPUTS] <= batch + 512
    assert parts[MemoryUse.ACTIVATIONS] > 0
    assert planned.step.peak_bytes == sum(parts.values())


@pytest.mark.one_device
def test_buffers_name_the_users_lines(planned):
    named = [b for b in planned.step.buffers if b.origin is not None and b.op]
    assert {b.origin.file for b in named} >= {training.__file__}
    assert any("Sequential" in b.origin.module for b in named)
    state = {MemoryUse.PARAMETERS: [], MemoryUse.OPTIMIZER: []}
    for buffer in planned.step.buffers:
        if buffer.part in state and buffer.num_bytes > 4:  # the optimizer counts its steps
            state[buffer.part].append((buffer.num_bytes, buffer.origin.module))
    assert {module for _, module in state[MemoryUse.PARAMETERS]} == {"Sequential.0", "Sequential.2"}
    assert sorted(state[MemoryUse.OPTIMIZER]) == sorted(state[MemoryUse.PARAMETERS] * 2)
    sizes = [b.num_bytes for b in planned.step.buffers]
    assert sizes == sorted(sizes, reverse=True)
    in_memory = sum(sizes)
    assert in_memory + planned.step.parts.get(MemoryUse.ELSEWHERE, 0) == planned.step.peak_bytes


@pytest.mark.one_device
def test_nothing_runs_and_the_process_goes_on(whole):
    # The first step is the program of all steps, and three are quiet.
    assert whole.made.num_steps == whole.num_steps + 1 == 4
    assert whole.uploads[0] == whole.uploads[1]
    assert torch.equal(*whole.random_states)
    assert not devices.is_abstract()
    assert not spmd.debugging.is_planning()
    assert torch.equal(*whole.weights)


def test_step_closures_are_not_called(whole):
    """Neither in the plan nor at the steps behind it; those from before it wait for these."""
    assert whole.made.step is not None
    assert not whole.made.ended_by
    assert whole.called == []
    assert whole.called_before == [36.0]


def test_a_first_step_that_differs_is_compiled_if_asked(planned, whole, num_devices):
    for made in (planned, whole.made):  # that of AdamW does not
        assert made.left_out == ()
        assert "--all" not in str(made)
    assert dict(planned.step.parts).keys() <= dict(whole.made.step.parts).keys()

    def plan(**options):
        return spmd.plan(
            lambda: training.train_one_weight(num_devices, momentum=0.9, dampening=0.1),
            topology=f"cpu-{num_devices}",
            **options,
        )

    some, every = plan(), plan(compile_all=True)
    assert [record.executions for record in some.left_out] == [1]
    assert "--all compiles it as well" in str(some)
    assert every.left_out == ()
    assert len(every.programs) == len(some.programs) + 1
    assert every.step.peak_bytes == some.step.peak_bytes


def test_what_is_pending_before_stays(whole):
    assert torch.equal(whole.pending, torch.arange(8.0) * 2 + 2)


def test_is_planning_is_true_inside(num_devices):
    seen = []
    spmd.plan(lambda: seen.append(spmd.debugging.is_planning()), topology=f"cpu-{num_devices}")
    assert seen == [True]


def test_a_plan_of_fewer_devices(num_devices):
    if num_devices == 1:
        pytest.skip("needs several devices")
    made = spmd.plan(lambda: training.train_one_weight(2), topology="cpu-2")
    assert made.step.parts[MemoryUse.PARAMETERS] == 2 * 4 * 4 // 2
    assert devices.global_runtime_device_count() == num_devices


def test_a_function_without_steps_runs_to_its_end(num_devices):
    results = []

    def infer() -> None:
        model = nn.Linear(8, 8).to("xla")
        for _ in range(5):
            results.append(model(torch.ones(4, 8).to("xla")))
            spmd.sync()

    made = spmd.plan(infer, topology=f"cpu-{num_devices}")
    assert len(results) == 5
    assert made.step is None
    assert made.largest.executions >= 4


@pytest.mark.one_device
def test_a_read_before_a_complete_step_reports_what_there_is(num_devices):
    made = spmd.plan(
        lambda: training.train(num_devices, after_step=lambda loss: loss.item()),
        topology=f"cpu-{num_devices}",
    )
    assert "a plan computes no values, so what is planned must not read" in made.ended_by
    assert "test_plan.py" in made.ended_by
    assert "add_step_closure" in made.ended_by
    assert made.programs
    assert "The plan ended early" in str(made)


def test_a_read_before_any_program_raises(num_devices):
    with pytest.raises(
        spmd.errors.PlanReadError, match=r"must not read a tensor's values; .*:\d+ does"
    ):
        spmd.plan(lambda: _uploaded().tolist(), topology=f"cpu-{num_devices}")


def _uploaded() -> torch.Tensor:
    """On the device without a program."""
    x = torch.ones(8).to("xla")
    with contextlib.suppress(spmd.errors.PlanReadError):
        spmd.to_jax(x)
    return x


@pytest.mark.filterwarnings("ignore:the shape of the result of:UserWarning")
@pytest.mark.parametrize(
    ("reads", "what"),
    [
        (lambda x: spmd.to_jax(x), "a tensor as a jax array"),
        (lambda x: x.local_shards, "a tensor's shards"),
        (lambda x: x.unique(), "a tensor's values"),
        (lambda x: bool(x.sum() > 0), "a tensor's values"),
    ],
)
def test_every_kind_of_read_is_refused(num_devices, reads, what):
    def script() -> None:
        spmd.use_spmd()
        mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
        x = torch.ones(num_devices, 2).to("xla") + 1
        spmd.mark_sharding(x, mesh, ("x",))
        spmd.sync()
        reads(x)

    made = spmd.plan(script, topology=f"cpu-{num_devices}")
    assert f"must not read {what}" in made.ended_by


def test_a_plan_inside_of_a_plan_is_refused(num_devices):
    def inner() -> None:
        spmd.plan(lambda: None, topology="cpu-1")

    with pytest.raises(
        spmd.errors.PlanError, match=r"inside of a plan; got a second one. Make them one after"
    ):
        spmd.plan(inner, topology=f"cpu-{num_devices}")


@pytest.mark.one_device
def test_more_devices_than_were_started(num_devices):
    with pytest.raises(spmd.errors.PlanError, match=f"got cpu-64 after {num_devices} were started"):
        spmd.plan(lambda: None, topology="cpu-64")


@pytest.mark.one_device
def test_simulating_other_devices_inside(num_devices):
    spmd.plan(lambda: spmd.simulate(num_devices), topology=f"cpu-{num_devices}")
    with pytest.raises(spmd.errors.PlanError, match=r"simulate\(9\) asked for others"):
        spmd.plan(lambda: spmd.simulate(9), topology=f"cpu-{num_devices}")


@pytest.mark.one_device
def test_a_mesh_that_does_not_fit(num_devices):
    with pytest.raises(spmd.errors.MeshError):
        spmd.plan(lambda: training.train(num_devices * 2), topology=f"cpu-{num_devices}")


@pytest.mark.one_device
def test_tensors_do_not_cross_the_border(num_devices):
    outside = torch.ones(8).to("xla") + 1
    spmd.sync()
    kept = []
    with pytest.raises(spmd.errors.PlanError, match=r"only such tensors or none; .* got both"):
        spmd.plan(lambda: _computed(outside + _uploaded()), topology=f"cpu-{num_devices}")
    spmd.plan(lambda: kept.append(_uploaded()), topology=f"cpu-{num_devices}")
    with pytest.raises(spmd.errors.PlanError, match="Make every tensor inside of what is planned"):
        (kept[0] + 1).cpu()


def _computed(x: torch.Tensor) -> None:
    spmd.sync()


def test_what_does_not_fit_is_reported_with_the_compilers_words(num_devices, monkeypatch):
    def refuse(graph, name, **options):
        raise spmd.errors.DeviceMemoryError("a program must fit; it takes 58.4G of 31.0G hbm")

    monkeypatch.setattr(planned_program, "build", refuse)
    made = spmd.plan(lambda: training.train_one_weight(num_devices), topology=f"cpu-{num_devices}")
    assert made.fits is False
    assert made.peak_bytes is None
    assert "58.4G of 31.0G" in made.refusals[0]
    assert "DOES NOT FIT, as the compiler found" in str(made)


@pytest.mark.skipif(spmd.global_runtime_device_count() == 1, reason="one device has all results")
def test_what_does_not_fit_while_the_function_runs_is_reported(num_devices, monkeypatch):
    def refuse(graph, name, **options):
        raise spmd.errors.DeviceMemoryError("a program must fit; it takes 58.4G of 31.0G hbm")

    def function() -> None:
        spmd.use_spmd()
        x = spmd.mark_sharding(torch.ones(8, 4).to("xla"), get_1d_mesh("x"), ("x", None))
        kept.append(x @ torch.ones(4, 4).to("xla"))  # its place is the compiler's choice
        spmd.sync()
        raise AssertionError("the plan goes on behind a program that does not fit")

    kept: list[torch.Tensor] = []
    monkeypatch.setattr(planned_program, "build", refuse)
    made = spmd.plan(function, topology=f"cpu-{num_devices}")
    assert made.fits is False and made.refusals == (
        "a program must fit; it takes 58.4G of 31.0G hbm",
    )
    assert "whose results the compiler places; mark them" in str(made)
    assert not devices.is_abstract()


def test_an_error_of_the_function_comes_through(num_devices):
    with pytest.raises(ZeroDivisionError):
        spmd.plan(lambda: 1 / 0, topology=f"cpu-{num_devices}")
    assert not devices.is_abstract()


@pytest.mark.one_device
def test_the_report_names_what_matters(planned, num_devices):
    text = str(planned)
    assert f"Plan for cpu-{num_devices}: {num_devices} devices (emulated CPU)" in text
    for part in ("parameters", "optimizer state", "activations", "together"):
        assert f"  {part}" in text
    assert "training.py" in text
    # Below each of the largest buffers, its line and module.
    assert re.search(r"^ {15}\S*training\.py:\d+, Sequential", text, re.MULTILINE)
    assert "T of the model over all devices" in text
    assert max(map(len, text.splitlines())) <= 100 + len(training.__file__)
    if num_devices > 1:
        assert "over fsdp" in text
    else:
        assert "No collectives." in text


@pytest.mark.one_device
def test_gradients_below_casts_are_known(num_devices, monkeypatch):
    monkeypatch.setattr(spmd.config, "record_source_lines", True)
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    model = nn.Linear(8, 16).to("xla")
    spmd.mark_sharding(model.weight, mesh, ("fsdp",))
    x = spmd.mark_sharding(torch.randn(8, 4, 8).to("xla"), mesh, ("fsdp",))
    with torch.autocast("xla", dtype=torch.bfloat16):
        y = model(x)
    y.float().square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    spmd.sync()
    graph = compile_cache.newest().graph
    names = {graph.nodes[i].entry.name for i in roles(graph, ()).gradients}
    assert names & {"aten::mm", "aten::linear_backward"}
