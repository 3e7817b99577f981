"""Tests loaders of two processes: parts of global batches, padding, resume, different batches."""

import importlib.util
from pathlib import Path
from typing import Any

import launched
import pytest
import torch

import spmd_core as spmd

PROGRAM = Path(__file__).with_name("processes_program.py")
_spec = importlib.util.spec_from_file_location("loader_processes_program", PROGRAM)
assert _spec is not None and _spec.loader is not None
program = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(program)

pytestmark = [
    pytest.mark.slow,  # two processes start
    pytest.mark.skipif(
        spmd.global_runtime_device_count() != 8, reason="compares with one process of 8 devices"
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found: one launch for all tests."""
    folder = tmp_path_factory.mktemp("processes")
    launched.succeed(2, lambda rank, port: [PROGRAM, folder, port, rank, 2])
    return [torch.load(folder / f"{process}.pt", weights_only=True) for process in range(2)]


def test_each_process_gives_its_part_of_the_global_batches(found: list[dict[str, Any]]) -> None:
    alone = [spmd.to_cpu(list(batch)) for batch in program.loader_of(1, 0, uneven_batch="pad")]
    for process in found:
        assert len(process["batches"]) == 6  # three, by one transfer thread and by three
        for number, (x, y, mask) in enumerate(process["batches"]):
            expected_x, expected_y, expected_mask = alone[number % 3]
            assert torch.equal(x[:, 0], 2 * y) and mask.sum() == expected_mask.sum()
            assert sorted(y[mask].tolist()) == sorted(expected_y[expected_mask].tolist())
            assert x.shape == expected_x.shape == (16, 2)
        assert process["dropped"] == 2


def test_the_state_is_alike_and_fits_one_process(found: list[dict[str, Any]]) -> None:
    assert found[0]["states"] == found[1]["states"]
    state = found[0]["states"][1]
    assert (state["samples"], state["batches"]) == (32, 2)
    loader = program.loader_of(1, 0, uneven_batch="pad")
    loader.load_state_dict(state)
    ((_, y, mask),) = [spmd.to_cpu(list(batch)) for batch in loader]
    _, expected, expected_mask = found[0]["batches"][2]
    assert sorted(y[mask].tolist()) == sorted(expected[expected_mask].tolist())


def test_batches_that_differ_are_named(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert "got from process 0: batch['z'] float32[16]" in process["refusal"]
        assert "from process 1: batch['y'] float32[16]" in process["refusal"]


def test_data_that_ends_before_that_of_others_is_named(found: list[dict[str, Any]]) -> None:
    assert found[0]["end"] == ""
    # A shape that all have known for long is compared where the other process asks.
    assert "number 3 of the data of loop" in found[1]["end"]
    assert (
        "got from process 0: batch float32[16] as ('data',); from process 1: the end"
        in (found[1]["end"])
    )


def test_loaders_may_be_read_together(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert process["together"] == [(16.0, 32.0), (32.0, 48.0), (48.0, 64.0)]


def test_a_loop_is_left_at_once_where_another_process_is_not_as_far(
    found: list[dict[str, Any]],
) -> None:
    assert found[0]["left_after_s"] < 10
