"""A step's program, its memory and its collectives."""

import pytest
import torch

import spmd_core as spmd
from spmd_core import counters
from spmd_core.counters import ProgramRecord
from spmd_core.metrics import memory_use, step_program, traffic


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was compiled yet."""
    monkeypatch.setattr(counters, "_programs", [])


def trained(num_devices: int, features: int) -> ProgramRecord:
    """The program of a linear layer's loss and gradient, its rows split over the devices.

    Each test has another number of features, so that it compiles the program.
    """
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("data",))
    weight = torch.ones(4, features).to("xla").requires_grad_()
    spmd.mark_sharding(weight, mesh, (None, None))
    x = spmd.mark_sharding(torch.ones(16, features).to("xla"), mesh, ("data", None))
    (x @ weight.T).square().mean().backward()
    spmd.sync()
    assert weight.grad is not None
    return spmd.metrics.programs()[-1]


@pytest.mark.usefixtures("no_programs")
def test_the_steps_program_is_large_and_ran_most() -> None:
    assert step_program() is None
    for name, num_ops, executions in (("first", 120, 1), ("step", 100, 9), ("eval", 40, 50)):
        counters.record_program(ProgramRecord(name, num_ops, 1, 1, 1, executions=executions))
    found = step_program()
    assert found is not None and found.name == "step"
    assert step_program(since=spmd.metrics.counter("compiles")) is None


def test_memory_is_the_compilers_where_the_platform_counts_nothing(num_devices: int) -> None:
    program = trained(num_devices, features=5)
    found = memory_use(program)
    assert found.peak_bytes == program.peak_bytes > 0
    assert found.device_peak_bytes is None and found.device_limit_bytes is None
    text = str(found)
    assert text.startswith(f"{program.name}: ") and " at peak on a device, by the compiler" in text
    assert text.endswith("the platform does not count what a device has in use")


def test_memory_is_also_the_devices_where_it_counts(
    monkeypatch: pytest.MonkeyPatch, num_devices: int
) -> None:
    program = trained(num_devices, features=6)
    rows = [{"peak_bytes_in_use": n << 20, "bytes_limit": 80 << 20} for n in (3, 5)]
    monkeypatch.setattr("spmd_core.metrics.step_programs.allocator_stats", lambda: rows)
    found = memory_use(program)
    assert (found.device_peak_bytes, found.device_limit_bytes) == (5 << 20, 80 << 20)
    assert str(found).endswith("5.00 MiB of 80.00 MiB at peak since the start, measured")


def test_collectives_are_summed_by_kind_and_axis(num_devices: int) -> None:
    program = trained(num_devices, features=8)
    single = spmd.debugging.collectives(program=program)
    found = traffic(program)
    assert sum(t.number for t in found) == len(single)
    assert sum(t.moved_bytes for t in found) == sum(c.moved_bytes for c in single)
    assert all(t.is_exact and t.axes == ("data",) for t in found)
    if num_devices == 1:
        assert found == ()
        return
    (of_gradient,) = (t for t in found if t.result_bytes >= 4 * 8 * 4)
    assert of_gradient.kind == "all-reduce"
    assert f"{of_gradient.number} x all-reduce over data: 0.00 MiB sent by a device" == str(
        of_gradient
    )


@pytest.mark.usefixtures("no_programs")
@pytest.mark.parametrize("function", [memory_use, traffic, spmd.metrics.count_flops])
def test_something_must_have_been_compiled(function) -> None:  # type: ignore[no-untyped-def]
    message = f"{function.__name__} describes a compiled program; none was compiled yet. Call it"
    with pytest.raises(spmd.errors.SpmdError, match=message):
        function()


def test_a_dropped_program_has_no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ProgramRecord("gone", 1, 1, 1, 1)
    with pytest.raises(
        spmd.errors.SpmdError, match="traffic reads a program that is kept; got gone"
    ):
        traffic(record)
