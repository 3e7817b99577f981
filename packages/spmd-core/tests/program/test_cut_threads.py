"""Cuts of several threads: while one compiles, the others record, compile and run."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import spmd_core as spmd
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import pending
from spmd_core.program import compile_cache, execution
from spmd_core.source_lines import user_line

pytestmark = pytest.mark.one_device
WAIT_S = 60


class Held:
    """Holds programs that have an operation of a name at their compilation, until it is told.

    Attributes:
        op: the operation's name.
        has_come: set once such a program is to be compiled.
        may_go: it is compiled once this is set.
        names: of all programs that were to be compiled.
        error: raised in place of compiling it, once.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
        self.op = op
        self.has_come, self.may_go = threading.Event(), threading.Event()
        self.names: list[set[str]] = []
        self.error: BaseException | None = None
        compile_lowered = compile_cache.build.__kwdefaults__["compiler"]

        def compiler(lowered):
            names = {node.entry.name for node in lowered.graph.nodes}
            self.names.append(names)
            if self.op in names:
                self.has_come.set()
                assert self.may_go.wait(WAIT_S)
                error, self.error = self.error, None
                if error is not None:
                    raise error
            return compile_lowered(lowered)

        build = compile_cache.build
        monkeypatch.setattr(
            compile_cache, "build", lambda graph, name: build(graph, name, compiler=compiler)
        )


@contextmanager
def elsewhere(function: Callable[[], object]):
    """Runs a function in another thread; its result or error comes at the end of the block."""
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(function)
        yield found
        found.result(WAIT_S)


@pytest.fixture
def held(monkeypatch):
    compile_cache.clear()
    held = Held(monkeypatch, "aten::sinh")
    yield held
    held.may_go.set()


def test_others_record_and_run_while_one_compiles(held):
    x = torch.ones(3).to("xla")
    spmd.sync()
    with elsewhere(lambda: torch.sinh(x).add(2).tolist()) as found:
        assert held.has_come.wait(WAIT_S)
        y = x * 3
        assert y.tolist() == [3.0] * 3 and (y + 1).sum().item() == 12.0
        assert not found.done()
        held.may_go.set()
    assert found.result() == pytest.approx(torch.sinh(torch.ones(3)).add(2).tolist())


def test_two_programs_compile_at_the_same_time(monkeypatch):
    compile_cache.clear()
    both, build = threading.Barrier(2, timeout=WAIT_S), compile_cache.build
    compile_lowered = build.__kwdefaults__["compiler"]

    def compiler(lowered):
        both.wait()
        return compile_lowered(lowered)

    monkeypatch.setattr(
        compile_cache, "build", lambda graph, name: build(graph, name, compiler=compiler)
    )
    x = torch.ones(3).to("xla")
    with elsewhere(lambda: (x * 5).tolist()) as found:
        assert (torch.exp(x) * 0).tolist() == [0.0] * 3
    assert found.result() == [5.0] * 3


def test_threads_that_need_one_program_compile_it_once(held):
    x = torch.ones(3).to("xla")
    spmd.sync()
    with elsewhere(lambda: torch.sinh(x).tolist()) as first:
        assert held.has_come.wait(WAIT_S)
        with elsewhere(lambda: torch.sinh(x).tolist()) as second:
            held.may_go.set()
    assert first.result() == second.result()
    assert held.names == [{"aten::sinh"}]


def test_a_leaf_that_is_updated_meanwhile_is_read_as_it_was(held):
    x = torch.ones(3).to("xla")
    spmd.sync()

    def read():
        y = torch.sinh(x)
        has_recorded.set()
        return y.tolist()

    has_recorded = threading.Event()
    with elsewhere(read) as found:
        assert has_recorded.wait(WAIT_S) and held.has_come.wait(WAIT_S)
        x.add_(1)
        spmd.sync()
        assert x.tolist() == [2.0] * 3
        held.may_go.set()
    assert found.result() == pytest.approx(torch.sinh(torch.ones(3)).tolist())


def test_a_buffer_that_another_thread_still_reads_is_not_donated(held):
    x = torch.ones(3).to("xla")
    spmd.sync()
    product = x * 5  # pending in this thread, of the value before the write
    with elsewhere(lambda: x.sinh_().tolist()) as found:
        assert held.has_come.wait(WAIT_S)
        later = product + 1
        held.may_go.set()
    assert found.result() == pytest.approx(torch.sinh(torch.ones(3)).tolist())
    assert product.tolist() == [5.0] * 3 and later.tolist() == [6.0] * 3


def test_what_others_have_computed_meanwhile_is_not_computed_again(held):
    x = torch.ones(3).to("xla")
    spmd.sync()
    y = []

    def read():
        y.append(torch.sinh(x))
        return y[0].tolist()

    with elsewhere(read) as found:
        assert held.has_come.wait(WAIT_S)
        held.op = "none"
        # This program computes `y` for its own thread, too.
        assert (y[0] - y[0]).tolist() == [0.0] * 3
        held.may_go.set()
    assert found.result() == pytest.approx(torch.sinh(torch.ones(3)).tolist())


def test_a_failure_is_raised_in_its_thread_and_loses_nothing(held):
    x = torch.ones(3).to("xla")
    spmd.sync()
    held.error = spmd.errors.ProgramError("no such program")
    kept = []

    def update():
        kept.append(x.sinh_())
        spmd.sync()

    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(update)
        assert held.has_come.wait(WAIT_S)
        assert torch.ones(2).to("xla").mul(4).tolist() == [4.0] * 2
        held.may_go.set()
        with pytest.raises(spmd.errors.ProgramError, match="no such program"):
            found.result(WAIT_S)
    assert x.tolist() == pytest.approx(torch.sinh(torch.ones(3)).tolist())


def test_an_interruption_while_compiling_leaves_everything_pending(held, monkeypatch):
    x = torch.ones(3).to("xla")
    spmd.sync()
    x.sinh_()
    held.error = KeyboardInterrupt()
    held.may_go.set()
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        spmd.sync()
    assert not lock._is_owned()
    assert x._handle.value.data is None and x._handle in pending()
    assert x.tolist() == pytest.approx(torch.sinh(torch.ones(3)).tolist())


def test_a_cut_ends_whatever_comes_between_its_attempts(held, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    held.may_go.set()
    x, run = torch.ones(3).to("xla"), compile_cache.run
    spmd.sync()
    y = torch.sinh(x)
    extra, attempts = [], []

    def adding(compilations):
        run(compilations)
        attempts.append(len(compilations))
        extra.append(x * 2)

    monkeypatch.setattr(compile_cache, "run", adding)
    spmd.sync()
    assert attempts == [1] * execution._MOST_WITHOUT_LOCK
    assert y._handle.value.data is not None
    assert y.tolist() == pytest.approx(torch.sinh(torch.ones(3)).tolist())


def test_a_program_of_former_devices_is_not_kept(held):
    x = torch.ones(3).to("xla")
    spmd.sync()
    with elsewhere(lambda: torch.sinh(x).tolist()) as found:
        assert held.has_come.wait(WAIT_S)
        compile_cache.clear()  # as an exchange of the devices does
        held.may_go.set()
    assert found.result() == pytest.approx(torch.sinh(torch.ones(3)).tolist())
    assert held.names == [{"aten::sinh"}] * 2


def test_groups_of_a_failed_program_compile_at_the_same_time(monkeypatch):
    compile_cache.clear()
    both, build = threading.Barrier(2, timeout=WAIT_S), compile_cache.build
    compile_lowered = build.__kwdefaults__["compiler"]
    lines = []

    def compiler(lowered):
        if len(lowered.graph.outputs) > 1:
            raise spmd.errors.ProgramError("too large")
        lines.append(user_line())
        both.wait()
        return compile_lowered(lowered)

    monkeypatch.setattr(
        compile_cache, "build", lambda graph, name: build(graph, name, compiler=compiler)
    )
    x, y = torch.ones(3).to("xla"), torch.ones(4).to("xla")
    a, b = x * 2, torch.exp(y) * 0
    before = spmd.metrics.counter("cuts_run_apart")
    spmd.sync()
    assert spmd.metrics.counter("cuts_run_apart") == before + 1
    assert a.tolist() == [2.0] * 3 and b.tolist() == [0.0] * 4
    assert len(lines) == 2 and all(__file__ in line for line in lines)


def test_a_region_of_compile_compiles_beside_others(held):
    x = torch.ones(3).to("xla")
    spmd.sync()

    @spmd.compile(full_graph=True, max_different_graphs=1, name="beside")
    def step():
        return torch.sinh(x) + 1

    with elsewhere(step) as found:
        assert held.has_come.wait(WAIT_S)
        assert (x * 7).tolist() == [7.0] * 3
        held.may_go.set()
    assert found.result().tolist() == pytest.approx(torch.sinh(torch.ones(3)).add(1).tolist())
    assert [p.name for p in spmd.metrics.programs()][-1].startswith(("beside", "spmd"))


def test_threads_train_models_of_their_own(monkeypatch):
    compile_cache.clear()

    def train(seed, device):
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(4, 4, generator=generator).to(device).requires_grad_()
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        x = torch.randn(8, 4, generator=generator).to(device)
        for _ in range(5):
            optimizer.zero_grad()
            (x @ w).tanh().square().mul(seed).mean().backward()
            optimizer.step()
            if device == "xla":
                spmd.sync()
        return w.detach().cpu()

    expected = [train(seed, "cpu") for seed in range(1, 5)]
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda seed: train(seed, "xla"), range(1, 5))]
    torch.testing.assert_close(found, expected)
