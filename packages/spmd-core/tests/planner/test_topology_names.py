"""planner/topology_names.py: the names of topologies."""

import math

import pytest

import spmd_core as spmd
from spmd_core.planner.topology_names import parse

# The shapes in Google Cloud's tables of configurations.
PUBLISHED = {
    "v3-8": ("v3", (2, 2)),
    "v4-8": ("v4", (2, 2, 1)),
    "v4-16": ("v4", (2, 2, 2)),
    "v4-32": ("v4", (2, 2, 4)),
    "v4-64": ("v4", (2, 4, 4)),
    "v4-128": ("v4", (4, 4, 4)),
    "v4-512": ("v4", (4, 8, 8)),
    "v4-1024": ("v4", (8, 8, 8)),
    "v5e-1": ("v5e", (1, 1)),
    "v5e-4": ("v5e", (2, 2)),
    "v5e-8": ("v5e", (2, 4)),
    "v5litepod-16": ("v5e", (4, 4)),
    "v5e-256": ("v5e", (16, 16)),
    "v5p-8": ("v5p", (2, 2, 1)),
    "v5p-512": ("v5p", (4, 8, 8)),
    "v6e-8": ("v6e", (2, 4)),
    "v6e-256": ("v6e", (16, 16)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_as_people_write_them(name):
    version, shape = PUBLISHED[name]
    found = parse(name)
    assert (found.version, found.shape, found.num_chips) == (version, shape, math.prod(shape))
    assert parse(str(found)) == found
    assert parse(f"TPU-{name.upper()}") == found


def test_names_as_libtpu_writes_them():
    assert parse("v4:2x2x4").shape == (2, 2, 4)
    assert parse("v6e:2x4").num_chips == 8
    assert parse("v4:4x4x12").num_chips == 192


def test_a_chip_of_v4_is_one_device_and_slices_multiply():
    assert parse("v4-8").chip_config == "megacore"
    assert parse("v5e-8").chip_config is None
    assert parse("v5e-8", num_slices=4).num_chips == 32
    assert str(parse("v5e-8", num_slices=4)) == "4 slices of v5e:2x4"


def test_emulated_devices():
    assert parse("cpu-64").num_chips == 64
    assert str(parse("cpu-64")) == "cpu-64"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v4-17", "v4-16, v4-32, v4-8, v4-64"),
        ("v5e-2", "v5e-1, v5e-4, v5e-8, v5e-16"),
        ("v9-4", "v6e-4"),
        ("v5p:3x3", "v5p"),
        ("v5e:0x4", "v5e"),
        ("hello", "v"),
        ("", "v"),
    ],
)
def test_unknown_names_list_near_ones(name, near):
    with pytest.raises(spmd.errors.PlanError, match=f"got '{name}'. Similar names: .*{near}"):
        parse(name)


@pytest.mark.parametrize(("name", "slices"), [("cpu-0", 1), ("cpu-99999", 1), ("cpu-4", 2)])
def test_emulated_devices_have_one_slice(name, slices):
    with pytest.raises(
        spmd.errors.PlanError, match="emulated devices are one slice of 1 to 2048; got"
    ):
        parse(name, num_slices=slices)


def test_at_least_one_slice():
    with pytest.raises(spmd.errors.PlanError, match=r"at least one slice; got 0. Pass --slices 1"):
        parse("v4-8", num_slices=0)


def test_at_most_as_many_chips_as_exist():
    with pytest.raises(
        spmd.errors.PlanError,
        match=r"at most 65536 chips; got 10+ slices of 4\. Pass --slices 16384 or",
    ):
        parse("v4-8", num_slices=10**6)
    assert parse("v4-8", num_slices=16384).num_chips == 65536
