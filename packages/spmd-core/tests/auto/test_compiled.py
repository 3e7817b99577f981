"""auto/compiled.py: two programs are compiled at a time, and the chosen one only once."""

import itertools
import os
import signal
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import jax
import pytest
import torch
from auto_steps import training, words

import spmd_core as spmd
from spmd_core.auto import compiled as module
from spmd_core.auto import mode
from spmd_core.errors import DeviceMemoryError
from spmd_core.planner import memory_program, topology

LIBTPU = pytest.mark.skipif(
    topology.libtpu_version() is None, reason="libtpu is not installed: pip install libtpu"
)
ABSENT = SimpleNamespace(request={"platform": "tpu"})


class Compilations:
    """Stands in for `Compilation`: each ends when its number is in `done`."""

    def __init__(self):
        self.running, self.most, self.done, self.refused = set(), 0, set(), {}
        self.are_large = False

    def __call__(self, lowered, topology, *, machine_code):
        assert not machine_code
        self.running.add(lowered)
        self.most = max(self.most, len(self.running))
        return SimpleNamespace(
            is_done=lambda: lowered in self.done,
            result=lambda: self._result(lowered),
            end=lambda: self.running.discard(lowered),
            is_large=self.are_large,
        )

    def _result(self, lowered):
        self.running.discard(lowered)
        if lowered in self.refused:
            raise jax.errors.JaxRuntimeError(self.refused[lowered])
        return f"program of {lowered}"


@pytest.fixture
def compilations(monkeypatch):
    def building(graph, name, names):
        again = f"{graph} with more of it replicated"
        try:
            program = yield graph
        except jax.errors.JaxRuntimeError as error:
            if "memory" in str(error):
                raise DeviceMemoryError("it does not fit") from error
            program = yield again
        return program

    found = Compilations()
    monkeypatch.setattr(module, "Compilation", found)
    monkeypatch.setattr(module, "building", building)
    monkeypatch.setattr(
        module, "program_plan", lambda graph, name, *_, program, **__: (name, program)
    )
    return found


def all_of(count, **options):
    graphs = [lambda i=i: f"graph {i}" for i in range(count)]
    return module.compiled(graphs, ABSENT, names={}, starting=lambda i: None, **options)


def test_at_most_two_at_a_time_and_each_as_it_ends(compilations):
    found = all_of(4)
    compilations.done |= {"graph 1"}
    assert next(found) == (1, ("auto_2", "program of graph 1"))
    compilations.done |= {"graph 0", "graph 2", "graph 3"}
    assert sorted(found) == [(i, (f"auto_{i + 1}", f"program of graph {i}")) for i in (0, 2, 3)]
    assert compilations.most == 2
    assert not compilations.running


def test_large_programs_are_compiled_one_by_one(compilations):
    compilations.are_large = True
    compilations.done |= {f"graph {i}" for i in range(3)}
    assert [number for number, _ in all_of(3)] == [0, 1, 2]
    assert compilations.most == 1


def test_what_is_not_wanted_any_more_is_not_compiled(compilations):
    ended = []
    found = all_of(4, wanted=lambda i: i != 2 or not ended)
    compilations.done |= {f"graph {i}" for i in range(4)}
    for number, _ in found:
        ended.append(number)
    assert sorted(ended) == [0, 1, 3]


def test_refusals(compilations):
    again = "graph 0 with more of it replicated"
    compilations.done |= {"graph 0", "graph 1", again}
    compilations.refused = {"graph 0": "[hlo verifier]", "graph 1": "out of memory"}
    found = dict(all_of(2))
    assert found[0] == ("auto_1", f"program of {again}")
    assert isinstance(found[1], DeviceMemoryError)


def test_an_interruption_ends_all(compilations):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        while len(compilations.running) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt), closing(all_of(3)) as found:
            next(found)
    finally:
        signal.signal(signal.SIGINT, before)
    assert compilations.most == 2
    assert not compilations.running


@LIBTPU
@pytest.mark.one_device
def test_what_is_chosen_is_compiled_once(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # at which libtpu ends
    monkeypatch.setattr(mode, "_MOST_COMPILED", 2)
    started, begin = [], memory_program._Child.__init__

    def counted(self, folder, **options):
        started.append(folder)
        begin(self, folder, **options)

    monkeypatch.setattr(memory_program._Child, "__init__", counted)

    def train():
        spmd.use_spmd()
        with torch.device("xla"):
            model, batch = words(vocabulary=512, width=256, inner=1024, batch=16)
        own = training(model.to("xla"), fused=True)
        spmd.sync()
        inputs = [x.to("xla") for x in batch]
        while True:
            own.step(*inputs)
            spmd.sync()

    made = spmd.plan(train, topology="v4-8", auto=True)
    assert len(started) == 2  # the candidates, of which the step is one
    numbers = itertools.count()
    monkeypatch.setattr(memory_program, "_key", lambda *args: str(next(numbers)))
    again = spmd.plan(train, topology="v4-8", auto=True)
    assert len(started) == 2 + 1  # an equal search was made before
    assert again.step.parts == made.step.parts
    assert again.step.costs == made.step.costs
