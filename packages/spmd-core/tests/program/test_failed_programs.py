"""A program that fails or is interrupted loses no write, and stays with the tensors it is about."""

import math

import pytest
import torch

import spmd_core as spmd
from spmd_core.program import compile_cache, execution

pytestmark = pytest.mark.one_device


@pytest.fixture
def broken(monkeypatch):
    """While its `on` is true, each program fails that has the operation of its name."""

    class Broken:
        on = True
        op = "aten::sin"

    original = compile_cache.making

    def get(key, *args):
        names = {entry.name for entry in key.structure if not isinstance(entry, int)}
        if Broken.on and Broken.op in names:
            raise spmd.errors.ProgramError("the device failed")
        return original(key, *args)

    monkeypatch.setattr(compile_cache, "cached", lambda key: None)
    monkeypatch.setattr(compile_cache, "making", get)
    return Broken


def test_a_failed_program_loses_no_write(broken):
    w = torch.ones(4).to("xla")
    spmd.sync()
    w.mul_(5)
    fresh = w.sin()
    with pytest.raises(spmd.errors.ProgramError, match="the device failed"):
        spmd.sync()
    spmd.sync()  # says it once
    assert w.tolist() == [5.0] * 4
    with pytest.raises(spmd.errors.ProgramError, match="the device failed"):
        fresh.cpu()
    broken.on = False
    torch.testing.assert_close(fresh.cpu(), torch.full((4,), 5.0).sin())


def test_a_write_to_a_tensor_whose_program_failed_asks_again(broken):
    w = torch.ones(4).to("xla")
    spmd.sync()
    w.sin_()
    with pytest.raises(spmd.errors.ProgramError):
        spmd.sync()
    w.add_(1)
    with pytest.raises(spmd.errors.ProgramError):
        spmd.sync()
    broken.on = False
    assert w.sub_(1).tolist() == pytest.approx([math.sin(1)] * 4)
    spmd.sync()
    assert w._handle.value.data is not None


def test_a_failure_stays_with_the_tensors_that_it_is_about(broken):
    w, bad = torch.ones(4).to("xla"), torch.ones(3).to("xla")
    spmd.sync()
    w.mul_(5)
    shared = w + 1
    bad.sin_()
    before = spmd.metrics.counter("executions")
    with pytest.raises(spmd.errors.ProgramError, match="the device failed") as raised:
        spmd.sync()
    assert "1 group(s) of them, ran apart" in raised.value.__notes__[0]
    assert spmd.metrics.counter("executions") == before + 1
    assert spmd.metrics.counter("cuts_run_apart") == 1
    assert w._handle.value.data is not None and shared._handle.value.data is not None
    assert w.tolist() == [5.0] * 4 and shared.tolist() == [6.0] * 4


def test_a_read_raises_for_its_own_program_alone(broken):
    w, bad = torch.ones(4).to("xla"), torch.ones(3).to("xla")
    result = bad.sin()
    assert (w * 2).tolist() == [2.0] * 4  # the cut of this read also has `result`
    with pytest.raises(spmd.errors.ProgramError, match="the device failed"):
        result.cpu()


def test_groups_that_meet_in_a_later_tensor_are_one(broken):
    a, b = torch.ones(4).to("xla") + 1, torch.ones(4).to("xla") + 2
    both = a + b
    other = torch.ones(2).to("xla").sin()
    compile_cache.clear()  # another test may have compiled this program
    with pytest.raises(spmd.errors.ProgramError):
        spmd.sync()
    assert spmd.metrics.programs()[-1].num_ops == 3
    assert both.tolist() == [5.0] * 4
    del other


def test_an_interruption_while_groups_run_apart_loses_nothing(broken, monkeypatch):
    first, second = torch.ones(4).to("xla"), torch.ones(3).to("xla")
    spmd.sync()
    first.sin_()
    second.mul_(7)
    original = execution.execute

    def execute(live, **options):
        if len(live) == 1 and live[0] is second._handle:
            raise KeyboardInterrupt
        return original(live, **options)

    monkeypatch.setattr(execution, "execute", execute)
    with pytest.raises(KeyboardInterrupt):
        spmd.sync()
    monkeypatch.setattr(execution, "execute", original)
    spmd.sync()
    assert second._handle.value.data is not None and second.tolist() == [7.0] * 3


def test_groups_that_run_apart_may_read_the_same_leaf(broken):
    w, twice, other = torch.ones(4).to("xla"), torch.zeros(4).to("xla"), torch.ones(3).to("xla")
    spmd.sync()
    product = w * 2  # of the value before the write
    w.add_(1)
    twice.copy_(product)
    del product
    other.sin_()  # fails, so that the others run apart
    with pytest.raises(spmd.errors.ProgramError):
        spmd.sync()
    assert w.tolist() == [2.0] * 4 and twice.tolist() == [2.0] * 4


def test_a_later_program_takes_no_buffer_that_a_failed_one_reads(broken):
    w = torch.ones(4).to("xla")
    spmd.sync()
    w.mul_(2)
    spmd.sync()
    failing = w.sin()
    with pytest.raises(spmd.errors.ProgramError):
        spmd.sync()
    w.add_(1)
    spmd.sync()
    broken.on = False
    assert failing.tolist() == pytest.approx([math.sin(2)] * 4) and w.tolist() == [3.0] * 4


def test_roll_back_gives_up_the_writes_that_failed(broken):
    w, other = torch.ones(4).to("xla"), torch.ones(3).to("xla")
    spmd.sync()
    w.add_(w.sin())  # a step that does not fit into memory, for instance
    other.mul_(3)
    with pytest.raises(spmd.errors.ProgramError):
        spmd.sync()
    assert spmd.roll_back() == 1
    assert w.tolist() == [1.0] * 4 and other.tolist() == [3.0] * 3
    w.add_(w.cos())
    spmd.sync()
    assert w.tolist() == pytest.approx([1 + math.cos(1)] * 4)
    assert spmd.roll_back() == 0


def test_what_is_computed_from_a_buffer_that_a_failed_program_took_is_an_error():
    w = torch.ones(4).to("xla")
    spmd.sync()
    execution.place(w._handle)
    y = w + 1
    w._handle.value.data.delete()
    with pytest.raises(
        spmd.errors.ProgramError, match=r"(?s)was donated to a program that failed.*Load"
    ):
        y.cpu()
    w._handle.fail()
    assert spmd.roll_back() == 0  # there is nothing to go back to


def test_an_interrupted_cut_loses_nothing(monkeypatch):
    w = torch.ones(4).to("xla")
    w.mul_(5)
    original = compile_cache.making

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_cache, "cached", lambda key: None)
    monkeypatch.setattr(compile_cache, "making", interrupt)
    with pytest.raises(KeyboardInterrupt):
        spmd.sync()
    monkeypatch.setattr(compile_cache, "making", original)
    spmd.sync()
    assert w._handle.value.data is not None  # the sync computed it, not the read
    assert w.tolist() == [5.0] * 4
