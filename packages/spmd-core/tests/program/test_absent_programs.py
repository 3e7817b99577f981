"""While XLA compiles what a cut lacks, other threads record, run, and compile their own."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import spmd_core as spmd
from spmd_core.program import absent_programs, compile_cache

counter = spmd.metrics.counter
NUM = 8  # so many tensors that are drawn alike have a program of their own
MOST_S = 100


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(spmd.config, "bound_growing_sizes", False)
    spmd.sync()
    compile_cache.clear()


@pytest.fixture
def worker():
    """Runs functions in another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(MOST_S)


@pytest.fixture
def compiling(monkeypatch):
    """Has functions called when a compilation begins, each in one."""
    original, waiting = absent_programs.compile_lowered, []

    def compile_lowered(lowered, record=None):
        if waiting:
            waiting.pop(0)()
        return original(lowered, record)

    monkeypatch.setattr(absent_programs, "compile_lowered", compile_lowered)
    return waiting


def is_pending(x):
    return x._handle.value.data is None


def test_threads_compile_at_the_same_time(compiling, mesh_1d):
    meet = threading.Barrier(2, timeout=MOST_S)
    compiling += [meet.wait, meet.wait]

    def run(size):
        x = spmd.mark_sharding(torch.arange(float(size)).to("xla"), mesh_1d, ("x",))
        return (x * 3 + 1).sin().tolist()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, (16, 24)))
    expected = [(torch.arange(float(size)) * 3 + 1).sin() for size in (16, 24)]
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(torch.tensor(ours), theirs)
    assert compiling == []


def test_a_program_that_two_threads_need_is_compiled_once(compiling, monkeypatch):
    waits, original = threading.Event(), absent_programs._wait

    def wait(event):
        waits.set()
        original(event)

    monkeypatch.setattr(absent_programs, "_wait", wait)
    compiling.append(lambda: waits.wait(MOST_S))
    before = counter("compiles")

    def run(first):
        return (torch.arange(first, first + 5.0, device="cpu").to("xla") * 3 + 1).tolist()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, (0, 7)))
    assert found == [[3 * (first + i) + 1 for i in range(5)] for first in (0, 7)]
    assert waits.is_set() and counter("compiles") - before == 1


def test_others_write_read_and_mark_what_is_being_compiled(compiling, worker, mesh_1d):
    """The cut is planned again, with what they left."""
    data = torch.arange(16.0)
    w, other = data.to("xla"), (data + 5).to("xla")
    spmd.sync()
    w.mul_(2)  # whose buffer the program takes over
    read, marked, written = other * 3, other * 4, other - 1
    seen = []

    def change():
        seen.append((w + 1).tolist())
        seen.append(read.tolist())
        spmd.mark_sharding(marked, mesh_1d, ("x",))
        written.add_(10)

    compiling.append(lambda: worker(change))
    spmd.sync()
    assert seen == [(data * 2 + 1).tolist(), ((data + 5) * 3).tolist()]
    assert not any(map(is_pending, (w, read)))  # the others are the pending work of the worker
    assert w.tolist() == (data * 2).tolist()
    assert marked.tolist() == ((data + 5) * 4).tolist()
    assert marked.sharding is not None
    assert written.tolist() == (data + 14).tolist()


def test_a_train_step_while_another_one_compiles(compiling, worker, mesh_1d):
    """Both train on, with the values of eager torch."""

    def train(device, width, steps=3):
        generator = torch.Generator().manual_seed(width)
        w = torch.randn(8, width, generator=generator, dtype=torch.float64)
        x = torch.randn(16, 8, generator=generator, dtype=torch.float64).to(device)
        w = w.to(device).requires_grad_()
        if device == "xla":
            spmd.mark_sharding(w, mesh_1d, ("x", None))
        optimizer = torch.optim.AdamW([w], lr=1e-2)
        losses = []
        for _ in range(steps):
            loss = (x @ w).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            spmd.sync()
            losses.append(loss.item())
        return losses

    found = []
    compiling.append(lambda: found.append(worker(train, "xla", 6)))
    found.append(train("xla", 8))
    assert found == [pytest.approx(train("cpu", width)) for width in (6, 8)]


def test_a_failure_affects_only_its_tensors(compiling):
    def fail():
        raise spmd.errors.ProgramError("the compiler is gone")

    compiling.append(fail)
    a, b = torch.ones(3, device="xla") * 2, torch.ones(5, device="xla") * 3
    apart = counter("cuts_run_apart")
    spmd.sync()  # each by a program of its own
    assert counter("cuts_run_apart") - apart == 1
    assert not is_pending(a) and not is_pending(b)
    compiling.append(fail)
    c = torch.ones(7, device="xla") * 4
    with pytest.raises(spmd.errors.ProgramError, match="the compiler is gone"):
        spmd.sync()
    assert (a.tolist(), b.tolist(), c.tolist()) == ([2] * 3, [3] * 5, [4] * 7)


def test_nobody_waits_for_a_compilation_that_fails(compiling, worker, monkeypatch):
    waits, original = threading.Event(), absent_programs._wait

    def wait(event):
        waits.set()
        original(event)

    def fail():
        assert waits.wait(MOST_S)
        raise spmd.errors.ProgramError("the compiler is gone")

    monkeypatch.setattr(absent_programs, "_wait", wait)
    compiling.append(fail)

    def run(number):
        x = torch.ones(3, device="xla") * number
        try:
            return x.tolist()
        except spmd.errors.ProgramError:
            return "failed"

    with ThreadPoolExecutor(2) as pool:
        found = sorted(map(str, pool.map(run, (2, 2))))
    assert found == ["[2.0, 2.0, 2.0]", "failed"]


def test_kinds_of_draws_compile_at_once(compiling, monkeypatch):
    monkeypatch.setattr(absent_programs.os, "cpu_count", lambda: 2)
    sizes = (3, 5)
    torch.manual_seed(1)
    expected = [torch.randn(size, device="xla").tolist() for size in sizes for _ in range(NUM)]
    meet = threading.Barrier(2, timeout=MOST_S)
    compile_cache.clear()
    compiling += [meet.wait, meet.wait]
    torch.manual_seed(1)
    drawn = [torch.randn(size, device="xla") for size in sizes for _ in range(NUM)]
    before = counter("compiles")
    spmd.sync()
    assert counter("compiles") - before == len(sizes)
    assert [x.tolist() for x in drawn] == expected
    sources = {record.source for record in spmd.metrics.programs(since=before)}
    assert len(sources) == 1 and "test_absent_programs.py" in sources.pop()


def test_an_interruption_of_a_wait_leaves_all_pending(monkeypatch):
    monkeypatch.setattr(absent_programs.os, "cpu_count", lambda: 2)

    def interrupted(future):
        raise KeyboardInterrupt

    drawn = [torch.randn(size, device="xla") for size in (3, 5) for _ in range(NUM)]
    with monkeypatch.context() as patched:
        patched.setattr(absent_programs, "_result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            spmd.sync()
    assert all(map(is_pending, drawn)) and not absent_programs._in_work
    spmd.sync()
    assert not any(map(is_pending, drawn))


def test_inside_of_an_operation_nothing_is_released(compiling, worker):
    """A read under the lock compiles under it: others must not see a half of the operation."""
    free = []
    compiling.append(lambda: free.append(worker(absent_programs.lock.acquire, False)))
    x = torch.ones(3, device="xla") * 2
    with absent_programs.lock:
        assert x.tolist() == [2, 2, 2]
    assert free == [] and len(compiling) == 1
