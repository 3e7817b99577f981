"""`compile`: one program for a region, and what it refuses inside."""

from contextlib import suppress

import pytest
import torch

import spmd_core as spmd
from spmd_core.dispatch import eager
from spmd_core.program import compile_cache, cut_guard
from spmd_core.steps import closures, compile

pytestmark = pytest.mark.one_device


def executions():
    return spmd.metrics.counter("executions")


def test_a_region_is_one_program_between_two_cuts():
    x = torch.arange(4.0).to("xla")
    pending = x + 1
    before, steps = executions(), spmd.metrics.counter("steps")
    with compile.step():
        assert pending._handle.value.data is not None and executions() == before + 1
        y = (x * 3).sum() + pending[0]
        assert executions() == before + 1
    assert executions() == before + 2 and spmd.metrics.counter("steps") == steps + 2
    assert y.item() == 19


def test_a_decorated_function():
    @compile.compile(full_graph=True)
    def double(x, *, plus=0.0):
        """Doubles."""
        return x * 2 + plus

    def halve(x):
        return x / 2

    halved = compile.compile(halve, name="halve it")
    x = torch.ones(2).to("xla")
    assert (
        double(x, plus=1.0).tolist() == [3, 3]
        and double.__name__ == "double"
        and double.__doc__ == "Doubles."
    )
    assert halved(x).tolist() == [0.5, 0.5]
    assert spmd.metrics.programs()[-1].name.startswith("halve_it_1ops")
    assert cut_guard.this_thread.cut_guard is None


def test_full_graph_names_the_line_and_loses_nothing():
    w = torch.ones(3).to("xla")
    spmd.sync()

    @compile.compile(full_graph=True, name="train")
    def step(read):
        w.mul_(2)
        if read:
            return w.sum().item()
        return w.sum()

    with pytest.raises(
        spmd.errors.ProgramError,
        match=r"inside the region 'train'; .*test_compile.py:\d+ needs a value"
        r".*leave out full_graph",
    ):
        step(True)
    assert w.tolist() == [2, 2, 2]
    assert step(False).item() == 12


def test_a_value_that_is_known_may_be_read_inside():
    x = torch.ones(3).to("xla")
    spmd.sync()
    with compile.compile(full_graph=True):
        y = x * x[0].item()
    assert y.tolist() == [1, 1, 1]


def test_without_full_graph_reading_is_allowed():
    x = torch.ones(3).to("xla")
    with compile.compile():
        total = (x * 2).sum().item()
        y = x + total
    assert y.tolist() == [7, 7, 7]


def test_a_nested_region_keeps_the_promise_of_the_outer_one():
    x = torch.ones(3).to("xla")
    shift = compile.compile(lambda: x + 1)

    @compile.compile(full_graph=True, name="outer")
    def outer():
        kept.append(x + 1)
        shift()

    kept = []
    with pytest.raises(
        spmd.errors.ProgramError, match="nothing is executed inside the region 'outer'"
    ):
        outer()
    assert kept[0].tolist() == [2, 2, 2] and cut_guard.this_thread.cut_guard is None


def test_a_program_that_cannot_be_compiled_is_none_of_the_different_graphs(monkeypatch):
    @compile.compile(max_different_graphs=1)
    def double(x):
        return x * 2

    def fail(key, make_graph, name):
        raise spmd.errors.ProgramError("the compiler failed")

    compile_cache.clear()
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "making", fail)
        with pytest.raises(spmd.errors.ProgramError, match="the compiler failed"):
            double(torch.ones(5).to("xla"))
    spmd.roll_back()
    assert double(torch.ones(3).to("xla")).tolist() == [2.0] * 3


def test_too_many_programs_say_what_changed():
    @compile.compile(max_different_graphs=1)
    def shift(x):
        return x + 1

    short, long = torch.ones(3).to("xla"), torch.ones(4).to("xla")
    spmd.sync()
    for _ in range(2):
        assert shift(short).tolist() == [2, 2, 2]
    with pytest.raises(
        spmd.errors.ProgramError,
        match=r"at most 1 different programs.*shift'.*float32\[4\].*in place of.*float32\[3\]"
        r".*raise max_diff",
    ):
        shift(long)
    assert shift(short).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match=r"at least 1; got 0. Leave it out"):
        compile.compile(max_different_graphs=0)
    with (
        pytest.raises(ValueError, match=r"got none. Pass name=\.\.\., or decorate"),
        compile.compile(max_different_graphs=2),
    ):
        pass


def test_the_difference_of_two_keys_has_a_place():
    a = compile_cache.Key((1, 2), ("a",), (), (), (0,))
    b = a._replace(structure=(1, 3), leaves=("a", "b"))
    assert (
        compile._differences(b, a)
        == "structure (3 in place of 2), leaves ('b' in place of nothing)"
    )


def test_eager_mode_is_off_inside():
    x = torch.ones(3).to("xla")
    with eager.eager_mode_context(True):
        before = executions()
        with compile.compile():
            assert not eager.is_eager_mode()
            y = x + 1
            y = y * 2
        assert eager.is_eager_mode() and executions() == before + 1
    assert y.tolist() == [4, 4, 4]


def test_an_exception_passes_and_computes_nothing():
    x = torch.ones(3).to("xla")
    spmd.sync()
    before = executions()
    kept = []
    with suppress(KeyError), compile.compile():
        kept.append(x + 1)
        raise KeyError("passes")
    assert executions() == before and cut_guard.this_thread.cut_guard is None
    assert kept[0].tolist() == [2, 2, 2]


def test_closures_may_read_what_the_region_computed():
    seen = []

    @compile.compile(full_graph=True)
    def train(x):
        loss = (x * 2).sum()
        closures.add_step_closure(lambda t: seen.append(t.item()), args=(loss,))
        closures.add_step_closure(lambda t: seen.append(t.item()), args=(loss + 1,), run_async=True)

    train(torch.ones(3).to("xla"))
    closures.wait_for_closures()
    assert sorted(seen) == [6, 7]


def test_what_cannot_be_a_region():
    def pieces():
        yield 1

    async def later():
        return 1

    for function in (pieces, later):
        with pytest.raises(
            TypeError,
            match=r"from its call to its return; got .*(pieces|later), which runs in pieces. "
            r"Write `with compile\(\):`",
        ):
            compile.compile(function)
    region = compile.compile()
    with (
        region,
        pytest.raises(
            spmd.errors.SpmdError,
            match=r"entered once at a time.*Write `with compile\(\):` for the inner one",
        ),
    ):
        region.__enter__()
    with region:
        y = torch.ones(1).to("xla") + 1
    assert cut_guard.this_thread.cut_guard is None and y.tolist() == [2]


def test_a_function_that_calls_itself():
    @compile.compile
    def descend(x, depth):
        return descend(x + 1, depth - 1) if depth else x

    assert (
        descend(torch.ones(2).to("xla"), 3).tolist() == [4, 4]
        and cut_guard.this_thread.cut_guard is None
    )
