"""The programs whose compile times are compared have layouts that fit their tensors."""

import pytest

import spmd_core as spmd
from benchmarks.split_programs import NUM_DEVICES, PROGRAMS, seconds
from spmd_core.sharding.sharding import Sharding


@pytest.mark.parametrize("name", PROGRAMS)
def test_layouts_split_tensors_of_the_program(name: str) -> None:
    program = PROGRAMS[name]
    tensors, others = program.make(1), program.make(2)
    assert [x.shape for x in tensors] != [x.shape for x in others], "each round compiles"
    for axes, specs in program.layouts:
        mesh = spmd.Mesh(range(NUM_DEVICES), axes, ("a", "b")[: len(axes)])
        assert len(specs) == len(tensors)
        marks = [Sharding.of(mesh, s, x.dim()) for x, s in zip(tensors, specs) if s is not None]
        assert marks and not any(mark.is_replicated for mark in marks)


def test_a_first_step_takes_time() -> None:
    if spmd.global_runtime_device_count() != NUM_DEVICES:
        pytest.skip(f"the layouts are for {NUM_DEVICES} devices")
    program = PROGRAMS["cumsum, dim 1"]
    for axes, specs in (program.layouts[0], ((NUM_DEVICES,), [None])):
        assert seconds(program, axes, specs, 1) > 0
