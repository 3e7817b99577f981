"""Copies in host memory: by threads, into memory of the save before."""

import ml_dtypes
import numpy as np
import pytest

from spmd_core.checkpoint import staging
from spmd_core.checkpoint.staging import Memory, Views


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    large = rng.standard_normal((300, 70))
    return [
        large,
        large[10:200, 3:50],  # with gaps
        large.T,
        large[:0],
        np.array(3, np.int32),
        np.arange(7, dtype=ml_dtypes.bfloat16),
        np.arange(5) % 2 == 0,
    ]


@pytest.mark.parametrize("copy_bytes", [100, 4 << 20])
def test_copies_are_whole_and_their_own(monkeypatch, arrays, copy_bytes):
    monkeypatch.setattr(staging, "_COPY_BYTES", copy_bytes)
    memory = Memory()
    for _ in range(3):
        given = [array.copy() for array in arrays]
        copies = [memory.copy(array) for array in given]
        memory.finish()
        for array in given:
            array[...] = 0
        for copy, right in zip(copies, arrays):
            assert copy.dtype == right.dtype and copy.flags.c_contiguous
            assert np.array_equal(copy, right)
        memory.reuse()


def test_memory_is_used_again_after_a_save_alone():
    memory, data = Memory(), np.ones(5000)
    first, second = memory.copy(data), memory.copy(data)
    memory.finish()
    assert not np.shares_memory(first, second)
    memory.reuse()
    third = memory.copy(data + 1)
    assert np.shares_memory(third, first) or np.shares_memory(third, second)
    memory.finish()
    assert (third == 2).all()


def test_what_failed_is_not_copied_by_the_next_save():
    memory = Memory()
    copy = memory.copy(np.ones(3))
    memory.reuse()
    memory.finish()
    assert not copy.any()  # new memory has zeros


def planned(shape, dtype=np.float32):
    index = tuple(slice(0, n) for n in shape)
    return staging._Plan(shape, np.dtype(dtype), shape, (staging._Block(None, None, None, index),))


def save(memory, plans, data):
    memory.expect(plans)
    found = {name: memory.array(name, plan, [data[name]]) for name, plan in plans.items()}
    memory.finish()
    memory.reuse()
    return {name: array.blocks[0][1] for name, array in found.items()}


def test_an_array_of_the_same_plan_has_the_memory_of_the_save_before():
    memory, plans = Memory(), {"a": planned((10, 3)), "b": planned((10, 3))}
    first = save(memory, plans, {"a": np.ones((10, 3)), "b": np.zeros((10, 3))})
    second = save(memory, plans, {"a": np.full((10, 3), 2), "b": np.full((10, 3), 3)})
    for name, value in (("a", 2), ("b", 3)):
        assert second[name] is first[name] and (second[name] == value).all()


def test_a_tree_that_changes_takes_over_the_memory_of_what_it_lacks():
    memory = Memory()
    first = save(memory, {"a": planned((10, 3))}, {"a": np.ones((10, 3), np.float32)})["a"]
    # Another name, shape and dtype, of as many bytes; then the name with another plan.
    plan = planned((15,), np.float64)
    second = save(memory, {"b": plan}, {"b": np.full(15, 5.0)})["b"]
    assert np.shares_memory(first, second) and second.dtype == np.float64 and (second == 5).all()
    third = save(memory, {"b": planned((30,))}, {"b": np.full(30, 7, np.float32)})["b"]
    assert np.shares_memory(second, third) and third.shape == (30,) and (third == 7).all()


def test_views_copy_nothing():
    data = np.ones(3)
    views = Views()
    assert views.copy(data) is data
    views.finish()
