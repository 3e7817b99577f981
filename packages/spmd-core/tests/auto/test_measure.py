"""auto/measure.py: candidates run on copies, and the least measured time decides."""

import copy

import pytest
import torch
from auto_steps import losses, training, words

import spmd_core as spmd
from spmd_core.auto import measure
from spmd_core.errors import AutoShardingError, DeviceMemoryError


def mesh_of():
    count = spmd.global_runtime_device_count()
    return spmd.Mesh(range(count), (count,))


def searched(model, batch, **options):
    """The training of a model, and the plan of its measured search over one axis."""
    own = training(model.to("xla"))
    inputs = [x.to("xla") for x in batch]
    options = {"mesh": mesh_of(), "candidates": 2, "objective": "measured", **options}
    return own, inputs, spmd.auto_shard(own.step, *inputs, **options)


@pytest.mark.one_device
@pytest.mark.parametrize("steps_before", [0, 1])
def test_programs_run_on_copies(steps_before):
    """AdamW's state begins in the step that is measured, or is there already."""
    model, batch = words(vocabulary=13, batch=7)
    own = training(copy.deepcopy(model))
    for _ in range(steps_before):
        own.step(*batch)
    expected = losses(own.step, batch)
    own = training(model.to("xla"))
    inputs = [x.to("xla") for x in batch]
    for _ in range(steps_before):
        own.step(*inputs)
    before = [p.detach().cpu().clone() for p in model.parameters()]
    plan = spmd.auto_shard(own.step, *inputs, mesh=mesh_of(), candidates=2, objective="measured")
    times = [x.measured_s for x in plan.tried if x.measured_s is not None]
    assert 1 <= len(times) <= 2 and min(times) > 0
    assert times[0] <= measure._CLOSE_AS_MEASURED * min(times)
    assert [x.measured_s for x in plan.tried[: len(times)]] == times
    title, row = plan.table().splitlines()[-len(plan.tried) - 1 :][:2]
    assert title.endswith("measured") and row.endswith(f"{times[0] * 1e3:,.2f} ms")
    for p, value in zip(model.parameters(), before):
        assert torch.equal(p.detach().cpu(), value)
    assert losses(own.step, inputs) == pytest.approx(expected, rel=2e-5)


@pytest.mark.skipif("spmd.global_runtime_device_count() < 8")  # for the limit of the memory
@pytest.mark.parametrize("steps_before", [0, 1])
def test_candidates_have_the_loops_of_the_programs_that_run(monkeypatch, steps_before):
    turn, have_loops = measure._turn, []

    def noted(program, recorded, form):
        have_loops.append(bool(program.record.loops))
        return turn(program, recorded, form)

    monkeypatch.setattr(measure, "_turn", noted)
    shape = {"vocabulary": 512, "width": 64, "inner": 256, "depth": 6, "batch": 64}
    model, batch = words(**shape)
    own = training(copy.deepcopy(model), fused=True)
    for _ in range(steps_before):
        own.step(*batch)
    expected = losses(own.step, batch)
    own = training(model.to("xla"), fused=True)
    inputs = [x.to("xla") for x in batch]
    for _ in range(steps_before):
        own.step(*inputs)
        spmd.sync()
    before = [p.detach().cpu().clone() for p in model.parameters()]
    # Less than whole parameters take.
    options = {"mesh": mesh_of(), "candidates": 2, "memory": 1_800_000, "objective": "measured"}
    plan = spmd.auto_shard(own.step, *inputs, **options)
    first = plan.tried[0]
    assert first.measured_s and any(have_loops)
    for p, value in zip(model.parameters(), before):
        assert torch.equal(p.detach().cpu(), value)
    known = {id(x): x.executions for x in spmd.metrics.programs()}
    assert losses(own.step, inputs) == pytest.approx(expected, rel=2e-5)
    ran = [x for x in spmd.metrics.programs() if x.executions > known.get(id(x), 0)]
    last = max(ran, key=lambda x: x.num_ops)
    assert last.loops
    assert first.program.peak_bytes == pytest.approx(last.peak_bytes, rel=0.05)


@pytest.fixture
def chosen_times(monkeypatch):
    """Makes the programs of candidates take given seconds in each turn, or fail."""

    def given(*times):
        calls = []

        def turn(program, recorded, form):
            calls.append(program.record.name)
            seconds = times[int(program.record.name.partition("_")[2]) - 1]
            if isinstance(seconds, Exception):
                raise seconds
            return [seconds]

        monkeypatch.setattr(measure, "_turn", turn)
        return calls

    return given


def several():
    if spmd.global_runtime_device_count() == 1:
        pytest.skip("one device has one candidate")


@pytest.mark.parametrize("times", [(1.03, 1.0), (1.0, 2.0)])
def test_the_least_time_decides(chosen_times, times):
    several()
    chosen_times(*times)
    model, batch = words()
    _, _, plan = searched(model, batch)
    first, second = plan.tried[:2]
    assert (first.measured_s, second.measured_s) == tuple(sorted(times))
    assert (first.seconds <= second.seconds) == (times[0] == 1.0)
    spec = next(x.spec for x in plan.parameters if x.name.endswith("table.weight"))
    assert model.table.weight.partition_spec == spec


def test_the_compiled_figures_decide_among_those_that_are_as_fast(chosen_times):
    several()
    chosen_times(1.01, 1.0)  # the first one is the better one as compiled
    _, _, plan = searched(*words())
    assert [x.measured_s for x in plan.tried[:2]] == [1.01, 1.0]
    assert plan.tried[0].seconds < plan.tried[1].seconds


@pytest.mark.parametrize(("slower", "turns"), [(1.6, 1), (1.2, 4), (1.05, 8), (1.01, 12)])
def test_candidates_run_until_they_are_far_slower(chosen_times, slower, turns):
    several()
    calls = chosen_times(1.0, slower)
    _, _, plan = searched(*words())
    assert {*map(calls.count, set(calls))} == {turns}
    assert [x.measured_s for x in plan.tried[:2]] == [1.0, slower]


def test_no_turn_begins_late(chosen_times, monkeypatch):
    several()
    monkeypatch.setattr(measure, "_MOST_S", -1)
    calls = chosen_times(1.0, 1.01)
    _, _, plan = searched(*words())
    assert {*map(calls.count, set(calls))} == {4} and plan.tried[0].measured_s == 1.0


def test_an_equal_search_does_not_measure_again(chosen_times):
    calls = chosen_times(1.0, 2.0)
    _, _, first = searched(*words())
    count = len(calls)
    assert count
    _, _, second = searched(*words())
    assert len(calls) == count and second.table() == first.table()


def test_a_candidate_that_does_not_fit_beside_what_is_there(chosen_times):
    several()
    chosen_times(DeviceMemoryError("no room"), 2.0)
    _, _, plan = searched(*words())
    assert plan.tried[0].measured_s == 2.0
    assert [x.refusal for x in plan.tried if x.refusal] == ["no room"]


def test_no_candidate_fits_beside_what_is_there(chosen_times):
    error = DeviceMemoryError("no room")
    chosen_times(error, error)
    model, batch = words()
    rule = r"must fit the devices beside what is there; got [12] candidates.*no room.*\"time\""
    with pytest.raises(AutoShardingError, match=rule):
        searched(model, batch)
    assert all(p.sharding is None for p in model.parameters())


def test_what_cannot_be_measured():
    model, batch = words()
    with pytest.raises(AutoShardingError, match=r"got candidates=0. Write candidates=4"):
        searched(model, batch, candidates=0)
    with pytest.raises(AutoShardingError, match=r"must be here; got topology='v4-8'"):
        searched(model, batch, topology="v4-8", mesh=None)
