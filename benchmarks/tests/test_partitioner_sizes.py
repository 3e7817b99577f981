"""The sweep over sizes that vary: what it draws, and that a wrong value is found."""

import random
from dataclasses import replace

import pytest
import torch

import spmd_core as spmd
from benchmarks.partitioner import sizes
from benchmarks.partitioner.layouts import AXES, CALLS


@pytest.fixture
def mesh() -> spmd.Mesh:
    return spmd.Mesh(range(4), (2, 2), AXES)


def test_one_size_varies_in_any_order() -> None:
    orders = [list(sizes.varied(random.Random(seed), 1)) for seed in range(20)]
    assert all({b for b, _, _ in order} == {8} for order in orders)
    assert all(len({t for _, t, _ in order}) > 3 for order in orders)
    assert any(sorted(order) != order for order in orders)


def test_calls_are_right_and_share_programs(mesh: spmd.Mesh) -> None:
    for name in ("merge_dims", "linear"):
        found = sizes.examine(CALLS[name], 1, mesh, (), "0")
        assert found.runs == sizes.RUNS and found.programs <= 4 and not found.wrong


def test_a_wrong_value_is_found(mesh: spmd.Mesh) -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return a.sum(1) + (a.device.type == "xla") * (a.shape[1] > 9)

    call = replace(CALLS["sum"], function=function)
    found = sizes.examine(call, 1, mesh, (), "0")
    assert found.wrong and "seed '0'" in found.wrong[0]
    assert torch.is_grad_enabled()
