"""Tests the arithmetic of parts: any mesh of up to 4 axes, 1 to 1,024 processes, no devices."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spmd_core.errors import DataError
from spmd_data.parts import BatchPart, parts_of_processes

powers = st.sampled_from([1, 2, 4, 8])
sizes = st.lists(st.integers(1, 8), min_size=1, max_size=4)


def blocks_by_loop(grid: np.ndarray, axes: list[int], process_of: list[int]) -> dict[int, set[int]]:
    """The blocks of each process, one device at a time."""
    found: dict[int, set[int]] = {}
    for index in np.ndindex(grid.shape):
        block = 0
        for axis in axes:
            block = block * grid.shape[axis] + index[axis]
        found.setdefault(process_of[grid[index]], set()).add(block)
    return found


def check(grid: np.ndarray, axes: list[int], process_of: list[int]) -> None:
    """Parts are exhaustive, disjoint, equal, and alike exactly for processes with equal blocks."""
    held = blocks_by_loop(grid, axes, process_of)
    parts = parts_of_processes(grid, axes, process_of)
    assert {process: set(part.blocks) for process, part in parts.items()} == held
    (num_parts,) = {part.num_parts for part in parts.values()}
    by_number = {part.number: part.blocks for part in parts.values()}
    assert sorted(by_number) == list(range(num_parts))
    assert all(part.blocks == by_number[part.number] for part in parts.values())
    every = [block for blocks in by_number.values() for block in blocks]
    assert sorted(every) == list(range(math.prod(grid.shape[axis] for axis in axes)))
    assert len({len(blocks) for blocks in by_number.values()}) == 1
    firsts = [by_number[number][0] for number in range(num_parts)]
    assert firsts == sorted(firsts)


@given(st.lists(powers, min_size=1, max_size=4), st.integers(0, 10), st.data())
def test_processes_with_consecutive_devices(
    shape: list[int], log_processes: int, data: st.DataObject
) -> None:
    """As on most clusters: the mesh has the devices in order, each process 2^n of them."""
    num_devices = math.prod(shape)
    num_processes = 2**log_processes
    assume(num_processes <= num_devices)
    axes = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(0, len(shape)))]
    process_of = (np.arange(num_devices) * num_processes // num_devices).tolist()
    check(np.arange(num_devices).reshape(shape), axes, process_of)


@given(sizes, sizes, st.data())
def test_processes_with_a_box_of_the_mesh(
    inner: list[int], outer: list[int], data: st.DataObject
) -> None:
    """As a hybrid mesh: each process has an equal box, whose device ids are in any order."""
    ndim = min(len(inner), len(outer))
    inner, outer = inner[:ndim], outer[:ndim]
    assume(math.prod(inner) * math.prod(outer) <= 4096 and math.prod(outer) <= 1024)
    shape = [a * b for a, b in zip(inner, outer)]
    grid = np.random.default_rng(0).permutation(math.prod(shape)).reshape(shape)
    axes = data.draw(st.permutations(range(ndim)))[: data.draw(st.integers(0, ndim))]
    process_of = [0] * grid.size
    for index in np.ndindex(*shape):
        box = [i // a for i, a in zip(index, inner)]
        process_of[grid[index]] = int(np.ravel_multi_index(box, outer))
    check(grid, axes, process_of)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7, 64, 1000, 1024])
def test_the_batch_over_all_devices(num_processes: int) -> None:
    process_of = np.repeat(np.arange(num_processes), 4).tolist()
    parts = parts_of_processes(np.arange(4 * num_processes).reshape(-1, 2, 2), [0, 1], process_of)
    assert {process: part.number for process, part in parts.items()} == {
        process: process for process in range(num_processes)
    }


def test_blocks_of_a_process_need_not_be_consecutive() -> None:
    grid = np.array([0, 2, 1, 3])  # the processes take turns
    assert parts_of_processes(grid, [0], [0, 0, 1, 1]) == {
        0: BatchPart(0, 2, (0, 2)),
        1: BatchPart(1, 2, (1, 3)),
    }


def test_processes_along_another_axis_have_the_same_part() -> None:
    grid = np.arange(8).reshape(2, 4)
    parts = parts_of_processes(grid, [1], [0] * 4 + [1] * 4)
    assert parts[0] == parts[1] == BatchPart(0, 1, (0, 1, 2, 3))


def test_a_process_without_devices_in_the_mesh_has_no_part() -> None:
    assert list(parts_of_processes(np.arange(2), [0], [0, 0, 1, 1])) == [0]


def test_blocks_that_overlap_in_part() -> None:
    grid = np.arange(6).reshape(3, 2)
    with pytest.raises(DataError, match=r"same blocks of the batch, or none in common; got"):
        parts_of_processes(grid, [0], [0, 0, 0, 1, 1, 1])
    # The advice: split over the other axis too, or other devices.
    assert parts_of_processes(grid, [0, 1], [0, 0, 0, 1, 1, 1])[1] == BatchPart(1, 2, (3, 4, 5))


def test_unequal_numbers_of_blocks() -> None:
    with pytest.raises(DataError, match=r"equally many blocks of the batch; got 1 on process 1"):
        parts_of_processes(np.arange(3), [0], [0, 0, 1])
    assert parts_of_processes(np.arange(2), [0], [0, 1, 1])[1].num_parts == 2


def test_an_axis_that_is_named_twice() -> None:
    with pytest.raises(DataError, match=r"an axis splits the batch once; got the axes \[0, 0\]"):
        parts_of_processes(np.arange(4).reshape(2, 2), [0, 0], [0] * 4)
