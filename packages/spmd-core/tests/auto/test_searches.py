"""auto/searches.py: a search is made once, in this process, in others, and by one of several."""

import json
import os
import sys
from pathlib import Path

import auto_processes
import fresh
import launched
import pytest
import torch
from auto_steps import losses, training, words

import spmd_core as spmd
from spmd_core.auto import searches
from spmd_core.runtime.disk_cache import ProgramCache

# A process that plans the step of `plan_of` with what another one has found.
AGAIN = """
import json, sys
import spmd_core as spmd
from spmd_core.auto import searches

def refused(*args, **options):
    raise AssertionError("searched again")

spmd.simulate(int(sys.argv[1]))
spmd.use_spmd()
import test_searches
searches.decide = refused
print(json.dumps(test_searches.plan_of(candidates=1).table()))
"""


def plan_of(*, batch=8, mark=lambda model: None, **options):
    model, inputs = words(batch=batch)
    own = training(model.to("xla"), fused=True)
    mark(model)
    return spmd.auto_shard(own.step, *(x.to("xla") for x in inputs), **{"candidates": 0, **options})


@pytest.fixture
def count(monkeypatch):
    """The number of searches."""
    decide, calls = searches.decide, []

    def counted(*args, **options):
        calls.append(options)
        return decide(*args, **options)

    monkeypatch.setattr(searches, "decide", counted)
    return lambda: len(calls)


@pytest.fixture
def count_alone(monkeypatch):
    """The number of searches; all but the first take its result, which nobody looks at."""
    decide, found = searches.decide, []

    def counted(*args, **options):
        found.append(found[0] if found else decide(*args, **options))
        return found[0]

    monkeypatch.setattr(searches, "decide", counted)
    return lambda: len(found)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that keeps what is found; only entries of searches are there."""
    monkeypatch.setattr(searches, "_folder", lambda: ProgramCache(tmp_path))
    return tmp_path


def test_an_equal_step_is_not_searched_again(count):
    said = []
    first, second = plan_of(), plan_of(report=said.append)
    assert count() == 1 and said == ["an equal step was searched before"]
    assert second.table() == first.table() and second.code() == first.code()
    name = first.parameters[0].name
    assert second.explain(name) == first.explain(name)


def test_another_step_or_question_is(count_alone):
    num_devices = spmd.global_runtime_device_count()
    mesh = spmd.Mesh(range(num_devices), (num_devices,))
    different = (
        {},
        {"batch": 9},
        {"objective": "memory"},
        {"mesh": mesh},
        {"mark": lambda model: spmd.mark_sharding(model.table.weight, mesh, (None, None))},
        {"memory": 1 << 40},
    )
    for i, options in enumerate(different, 1):
        plan_of(**options)
        assert count_alone() == i
    plan_of(mesh=mesh)
    assert count_alone() == len(different)


def test_what_decides_makes_other_searches(count_alone, monkeypatch):
    for flags, number in (("--xla_a=1", 1), ("--xla_a=2", 2), ("--xla_a=1", 2)):
        monkeypatch.setenv("XLA_FLAGS", flags)
        plan_of()
        assert count_alone() == number


def test_another_process_takes_it_from_disk(count, folder, kept):
    first = plan_of(candidates=1)
    assert count() == 1 and [path.name[:10] for path in folder.iterdir()] == ["shardings-"]
    kept.clear()
    assert plan_of(candidates=1).table() == first.table() and count() == 1
    paths = [Path(__file__).parent, Path(auto_processes.__file__).parent, *filter(None, sys.path)]
    done = fresh.run(
        ["-c", AGAIN, spmd.global_runtime_device_count()],
        {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "SPMD_CACHE_DIR": folder},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == first.table()


def test_a_damaged_entry_is_searched_again(count, folder, kept):
    first = plan_of()
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-50])
    kept.clear()
    with pytest.warns(UserWarning, match="is damaged: it is removed, and made again"):
        assert plan_of().table() == first.table()
    assert count() == 2


def test_what_cannot_be_written_is_said(count, folder, monkeypatch):
    def refused(self, key, value):
        raise OSError("no space")

    monkeypatch.setattr(ProgramCache, "put", refused)
    with pytest.warns(UserWarning, match=r"not kept on disk: no space. Set SPMD_CACHE_DIR"):
        plan_of()
    plan_of()
    assert count() == 1


def test_an_interrupted_search_is_not_kept(kept, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(searches, "decide", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan_of()
    assert not kept


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process found, by `auto_processes`: one launch for all tests."""
    folder = tmp_path_factory.mktemp("auto_processes")
    launched.succeed(
        auto_processes.NUM_PROCESSES,
        lambda rank, port: [auto_processes.__file__, folder, port, rank],
    )
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


of_eight = pytest.mark.skipif(
    spmd.global_runtime_device_count() != 8, reason="compares with one process of 8 devices"
)


@of_eight
def test_process_0_searches_for_all(found):
    first, second = (each["trained"] for each in found)
    alone = auto_processes.train()
    assert (first["searches"], second["searches"]) == (1, 0)
    assert first["specs"] == second["specs"]
    for each in (first, second):
        torch.testing.assert_close(each["losses"], alone["losses"], rtol=1e-6, atol=1e-6)


@of_eight
def test_processes_measure_together(found):
    first, second = (each["measured"] for each in found)
    assert first["seconds"][0] > 0 and first["seconds"] == second["seconds"]
    assert first["specs"] == second["specs"]
    model, batch = words()
    for each in (first, second):
        assert each["losses"] == pytest.approx(losses(training(model).step, batch), rel=2e-5)
        model, batch = words()


@of_eight
def test_processes_that_record_different_steps(found):
    first, second = (each["other steps"] for each in found)
    rule = "ProcessError: all processes must record the same step for automatic sharding; got"
    assert first.startswith(rule) and "in process 1, whose errors say where. Build the" in first
    assert second.startswith(rule) and "[9, 6]" in second and "and not " in second


@of_eight
def test_an_error_of_process_0_is_that_of_all(found):
    first, second = (each["no shardings"] for each in found)
    assert first == "AutoShardingError: nothing fits"
    assert second == "AutoShardingError: process 0 found no shardings: nothing fits"
