"""A slice of the layouts of common calls, and that a wrong value is found."""

import pytest
import torch
from tiers import crossed

import spmd_core as spmd
from benchmarks.partitioner.layouts import CALLS, SIZES, Call, failures, layouts, specs
from benchmarks.partitioner.sweeps import Kind

pytestmark = pytest.mark.skipif(
    spmd.global_runtime_device_count() < 8, reason="the mesh is over 4 of 8 devices"
)


@pytest.fixture
def mesh() -> spmd.Mesh:
    return spmd.Mesh(range(4), (2, 2), ("x", "y"))


def test_specs_are_all_ways_to_split() -> None:
    assert list(specs(1)) == [(None,), ("y",), ("x",), (("x", "y"),)]
    assert len(set(specs(3))) == 16
    assert len(layouts([2, 2], 0)) == 81 and len(layouts([2, 2], 10)) == 10


# These were wrong before a lowering or a rule was changed.
@pytest.mark.parametrize(
    ("size", "name"), crossed([*SIZES], ["conv", "conv_transpose", "bmm", "cumprod", "circular"])
)
def test_a_part_of_the_layouts(name: str, size: str, mesh: spmd.Mesh) -> None:
    operands = CALLS[name].operands(size)
    ndims = [*(x.dim() for x in operands), CALLS[name].function(*operands).dim()]
    assert list(failures(CALLS[name], size, mesh, layouts(ndims, 16))) == []


def test_a_wrong_value_is_found(mesh: spmd.Mesh) -> None:
    wrong = Call(lambda a: a * (2 if a.device.type == "xla" else 1), lambda b, t, d: [(b, d)])
    found = list(failures(wrong, "even", mesh, layouts([2, 2], 3)))
    assert [failure.kind for failure in found] == [Kind.WRONG] * 3
    assert all("errors" in failure.text for failure in found)


def test_the_same_operands_at_each_call() -> None:
    for call in CALLS.values():
        for first, second in zip(call.operands("uneven"), call.operands("uneven")):
            assert torch.equal(first, second)


def test_a_nan_in_another_place_is_found(mesh: spmd.Mesh) -> None:
    calls = {
        "kept": Call(lambda a: a.flip(0).flip(0), lambda b, t, d: [(b, d)]),
        "moved": Call(
            lambda a: a.flip(0) if a.device.type == "xla" else a, lambda b, t, d: [(b, d)]
        ),
    }
    found = {
        name: list(failures(call, "even", mesh, layouts([2, 2], 3), has_nonfinite=True))
        for name, call in calls.items()
    }
    assert found["kept"] == [] and len(found["moved"]) == 3
