"""Programs that are dropped from memory are freed, and those that stay still run."""

import gc

import jax
import pytest
import torch

import spmd_core as spmd
from spmd_core.program import compile_cache


@pytest.fixture(autouse=True)
def a_program_for_each_size(monkeypatch):
    monkeypatch.setattr(spmd.config, "bound_growing_sizes", False)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """No programs, in this project's cache and in jax's."""
    compile_cache.clear()
    jax.clear_caches()
    compile_cache._num_dropped = 0


def run(size):
    """Compiles a program of its own for each size."""
    x = torch.arange(float(size)).to("xla")
    torch.testing.assert_close((x * 3).cumsum(0).cpu(), (torch.arange(float(size)) * 3).cumsum(0))


def num_loaded():
    """The programs that are loaded: jax has one such object for each."""
    gc.collect()
    return sum(type(x).__name__ == "MeshExecutable" for x in gc.get_objects())


def test_dropped_programs_are_freed(monkeypatch):
    monkeypatch.setattr(spmd.config, "max_programs", 2)
    monkeypatch.setattr(compile_cache, "_MAX_DROPPED", 2)
    before = num_loaded()
    for i in range(6):
        run(1001 + 2 * i)
    assert num_loaded() - before == 2


def test_dropped_programs_are_freed_at_once_where_memory_is_short(monkeypatch):
    before = num_loaded()
    for i in range(4):
        run(2001 + 2 * i)
    assert num_loaded() - before == 4
    monkeypatch.setattr(compile_cache.devices, "free_memory_maps", lambda: 100)
    run(2010)
    assert num_loaded() - before == 3


@pytest.mark.parametrize("keeps", [True, False])
def test_jax_s_caches_are_cleared_only_where_they_keep_programs(monkeypatch, keeps):
    cleared = []
    clear = jax.clear_caches
    monkeypatch.setattr(jax, "clear_caches", lambda: (cleared.append(1), clear()))
    monkeypatch.setattr(compile_cache, "_jax_keeps_programs", lambda: keeps)
    monkeypatch.setattr(compile_cache, "_MAX_DROPPED", 2)
    monkeypatch.setattr(spmd.config, "max_programs", 1)
    for i in range(5):  # the first is not dropped
        run(3001 + 2 * i)
    assert len(cleared) == (2 if keeps else 0)
    hits = spmd.metrics.counter("cache_hits")
    run(3009)  # is in use: it runs on
    assert spmd.metrics.counter("cache_hits") == hits + 1


def test_whether_jax_keeps_programs_is_found_out():
    compile_cache._jax_keeps_programs.cache_clear()
    before = num_loaded()
    jax.jit(lambda x: x + 1, keep_unused=True).lower(jax.ShapeDtypeStruct((), "f4")).compile()
    kept = num_loaded() - before
    assert kept in (0, 1) and compile_cache._jax_keeps_programs() is bool(kept)
