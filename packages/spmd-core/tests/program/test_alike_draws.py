"""program/alike_draws.py: tensors that are drawn alike share a program, with the same values."""

import pytest
import torch

import spmd_core as spmd
from spmd_core.program import execution
from spmd_core.sharding.sharding import Sharding

NUM = 8  # so many share a program


def _weight(sharding=None):
    x = torch.empty(6, 10, device="xla")
    if sharding is not None:
        spmd.mark_sharding(x, *sharding)
    return x.uniform_(-0.9, 0.9).erfinv_().mul_(0.5).clamp_(-0.6, 0.6)


def _alone(draws):
    """The values of these draws, each computed by a cut of its own."""
    torch.manual_seed(3)
    values = []
    for draw in draws:
        values.append(draw())
        spmd.sync()
    torch.manual_seed(3)
    return [x.cpu() for x in values]


def _compiled():
    return len(spmd.metrics.programs())


def _equal(found, expected):
    for x, value in zip(found, expected, strict=True):
        torch.testing.assert_close(x.cpu(), value, rtol=0, atol=0)


@pytest.mark.one_device
@pytest.mark.parametrize("spec", [None, ("a", None), ("a", "b"), (None, ("a", "b"))])
def test_one_program_draws_them(spec, mesh_2d):
    sharding = spec and (mesh_2d, spec)
    draws = [lambda: _weight(sharding)] * NUM
    known = _compiled()
    expected = _alone(draws)
    assert _compiled() == known + 1
    drawn = [draw() for draw in draws]
    spmd.sync()
    assert _compiled() == known + 1  # it has run for each
    assert len({tuple(x.flatten().tolist()) for x in drawn}) == NUM
    _equal(drawn, expected)
    if spec:
        assert all(x._handle.value.placement.sharding is x._handle.sharding for x in drawn)
        assert drawn[0]._handle.sharding == Sharding.of(mesh_2d, spec, 2)


def test_of_two_shapes_and_marks_in_any_order_with_others_between(mesh_1d):
    kinds = [
        lambda: torch.randn(4, 6, device="xla"),
        lambda: _weight((mesh_1d, ("x", None))),
        lambda: torch.zeros(3, device="xla"),
        lambda: torch.rand(2, device="xla"),
    ]
    draws = [*kinds[:3] * NUM, kinds[3], kinds[3], kinds[0]]
    expected = _alone(draws)
    known = _compiled()
    drawn = [draw() for draw in draws]
    spmd.sync()
    assert _compiled() == known + 1  # of the rest
    _equal(drawn, expected)


def test_what_a_step_reads_is_drawn_by_its_program():
    def step():
        noise = [torch.randn(4, device="xla") for _ in range(NUM)]
        total = sum(x.cos() for x in noise)
        spmd.sync()
        return total, noise

    step()
    counts = spmd.metrics.counters()["executions"]
    total, noise = step()
    assert spmd.metrics.counters()["executions"] == counts + 1
    torch.testing.assert_close(total.cpu(), sum(x.cpu().cos() for x in noise))


def test_shapes_are_no_sizes_that_grow():
    known = _compiled()
    drawn = [torch.randn(size, 3, device="xla") for size in range(4, 10) for _ in range(NUM)]
    spmd.sync()
    assert _compiled() == known + 6 and not spmd.metrics.counter("growing_sizes_refused")
    assert all(x._handle.value.placement.room is None for x in drawn)


def test_parts_of_a_draw_and_views_of_it():
    def padded():
        x = torch.randn(4, 3, device="xla")
        x[0].zero_()
        return x

    expected = _alone([padded] * NUM)
    drawn = [padded() for _ in range(NUM)]
    views = [x[1:] for x in drawn]
    spmd.sync()
    _equal(drawn, expected)
    _equal(views, [x[1:] for x in expected])


def test_an_interruption_between_them_loses_none(monkeypatch):
    draws = [lambda: torch.randn(5, device="xla")] * NUM
    expected = _alone(draws)
    original, started = execution.execute, []

    def interrupted(live, **options):
        started.append(live)
        if len(started) == 4:
            raise KeyboardInterrupt
        return original(live, **options)

    drawn = [draw() for draw in draws]
    other = torch.ones(3, device="xla") * 2
    with monkeypatch.context() as patched:
        patched.setattr(execution, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            spmd.sync()
    assert [x._handle.value.data is None for x in drawn] == [False] * 3 + [True] * (NUM - 3)
    spmd.sync()
    assert all(x._handle.value.data is not None for x in (*drawn, other))  # not the reads did
    _equal(drawn, expected)


def test_one_that_fails_leaves_the_others(monkeypatch):
    original, failing = execution.execute, []

    def fails(live, **options):
        if live == failing:
            raise spmd.errors.ProgramError("the device failed")
        return original(live, **options)

    drawn = [torch.randn(5, device="xla") for _ in range(NUM)]
    other = torch.ones(3, device="xla") * 2
    failing.append(drawn[2]._handle)
    with monkeypatch.context() as patched:
        patched.setattr(execution, "execute", fails)
        with pytest.raises(spmd.errors.ProgramError, match="the device failed"):
            spmd.sync()
    made = [x._handle.value.data is not None for x in (*drawn, other)]
    assert made == [True, True, False, *[True] * (NUM - 2)]
    assert drawn[2].isfinite().all()


def test_a_plan_has_their_program_once_and_no_further_memory(num_devices):
    def draw():
        weights = [torch.randn(64, 64, device="xla") for _ in range(NUM)]
        spmd.sync()
        return weights

    (program,) = spmd.plan(draw, topology=f"cpu-{num_devices}").programs
    assert program.executions == NUM
    assert NUM * 64 * 64 * 4 <= program.peak_bytes < NUM * 64 * 64 * 4 + 100  # and a seed
