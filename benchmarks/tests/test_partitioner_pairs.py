"""A slice of the programs whose tensors are marked over different axes; a wrong value is found."""

import pytest

import spmd_core as spmd
from benchmarks.partitioner import pairs
from benchmarks.partitioner.layouts import Call
from benchmarks.partitioner.sweeps import Kind

pytestmark = pytest.mark.skipif(
    spmd.global_runtime_device_count() < 8, reason="the meshes are over 8 devices"
)


# Their gradients had the padding of the table's rows, or could not be added up for it.
@pytest.mark.parametrize("name", ["embedding", "tied"])
def test_a_part_of_the_programs(name: str) -> None:
    marks = (("y", None), ("x", "y"), None)
    programs = [pairs.Program("uneven D", marks, variant) for variant in pairs.Variant]
    assert list(pairs.failures(pairs.CALLS[name], programs, pairs.mesh_of("4x2"))) == []


@pytest.mark.parametrize("mesh", pairs.MESHES)
def test_what_is_drawn_splits_tensors_over_different_axes(mesh: str) -> None:
    programs = pairs.draw("tied", mesh, 0)
    assert programs == pairs.draw("tied", mesh, 0)
    for program in programs:
        assert pairs.is_pair(program.marks[:-1], len(pairs.MESHES[mesh]))


def test_a_wrong_value_is_found() -> None:
    wrong = Call(
        lambda ids, a: a[ids] * (2 if a.device.type == "xla" else 1),
        lambda b, t, d: [(d, (b,)), (d, t)],
    )
    program = pairs.Program("even", (("x",), ("y", None), None), pairs.Variant.ONCE)
    (found,) = pairs.failures(wrong, [program], pairs.mesh_of("4x2"))
    assert found.kind is Kind.WRONG and "an error of" in found.text


def test_columns_over_two_axes_and_a_bias_over_one_of_them() -> None:
    marks = (("z", "x"), (None, None), ("z", ("x", "y")), ("y",), None)
    program = pairs.Program("even", marks, pairs.Variant.ONCE)
    mesh = pairs.mesh_of("2x2x2")
    assert list(pairs.failures(pairs.CALLS["embedding_linear"], [program], mesh)) == []
