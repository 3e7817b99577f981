"""debugging/slices.py: how XLA numbers the devices of TPU programs over several slices."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from tiers import exhaustive

import spmd_core as spmd
from spmd_core.debugging.slices import SliceNumbers
from spmd_core.planner import topology

LIBTPU = pytest.mark.skipif(
    topology.libtpu_version() is None, reason="libtpu is not installed: pip install libtpu"
)


def numbers(ids, *, platform="tpu"):
    """Of devices with these ids, as libtpu numbers them: 100000 and on, 200000 and on."""
    devices = [SimpleNamespace(id=i, slice_index=i // 100000 - 1, platform=platform) for i in ids]
    return SliceNumbers(devices)


TWO = [100000, 100001, 200000, 200001]
MIXED = [200001, 100000, 200000, 100001]


def test_one_slice_is_numbered_as_the_program():
    found = numbers([100000, 100001, 100002])
    assert found.num_devices == 3
    assert found.inside(((0, 2), (1, 0))) == ((0, 2), (1, 0))
    # Only TPU programs are compiled for a slice.
    assert numbers(TWO, platform="gpu").inside(((0, 3),)) == ((0, 3),)


def test_groups_inside_are_those_of_each_slice():
    assert numbers(TWO).num_devices == 2
    assert numbers(TWO).inside(((0, 1),)) == ((0, 1), (2, 3))
    assert numbers(MIXED).inside(((0, 1),)) == ((1, 3), (0, 2))
    assert numbers(TWO).inside(((0, 1), (2, 3))) is None  # no such device of a slice


@pytest.mark.parametrize(
    ("ids", "target", "groups"),
    [
        (TWO, '"{1,2}x{0:1}"', ((0, 2), (1, 3))),
        (MIXED, "{1,2}x{0:1}", ((1, 2), (3, 0))),
        (MIXED, "{2,1}x{1}", ((0, 3),)),
        (TWO, "{{100000,200001},{100001,200000}}", ((0, 3), (1, 2))),
        (MIXED, "{{100000->200000},{200001->100001}}", ((1, 2), (0, 3))),
        (TWO, "{1,3}x{0:1}", None),  # no such slice
        (TWO, "{0,1}x{0:1}", None),
        (TWO, "{1,2}x{0:2}", None),  # no such device
        (TWO, "{{300000,100000}}", None),
        (TWO, "something else", None),
    ],
)
def test_groups_between_slices(ids, target, groups):
    assert numbers(ids).between(target) == groups


@LIBTPU
@pytest.mark.parametrize(
    ("order", "names"),
    [
        exhaustive(range(8), ("slice", "x", "y")),
        exhaustive([0, 2, 1, 3, 4, 6, 5, 7], ("slice", "x", "y")),
        exhaustive([0, 1, 2, 3, 5, 4, 7, 6], ("slice", "x", "y")),
        ([4, 5, 6, 7, 3, 2, 1, 0], ("slice", "x", "y")),
        exhaustive([0, 4, 1, 5, 2, 6, 3, 7], ("x", "y", "slice")),
        ([6, 7, 1, 0, 4, 5, 3, 2], ("x", "slice", "y")),
    ],
)
def test_a_plan_tells_what_goes_over_the_network(order, names):
    """A tensor whose dims are split over the axes is gathered and summed along each."""
    num_bytes = 32 * 128 * 4  # of a shard

    def gather_and_reduce() -> None:
        spmd.use_spmd()
        mesh = spmd.Mesh(order, (2, 2, 2), names)
        split = spmd.mark_sharding(torch.ones(2, 2, 64, 128).to("xla"), mesh, names)
        for dim, axis in enumerate(names):
            spec = tuple(None if name == axis else name for name in names)
            kept.append(spmd.mark_sharding(split + 1, mesh, spec))
            rest = tuple(name for name in names if name != axis)
            kept.append(spmd.mark_sharding((split * 3).sum(dim), mesh, rest))
        spmd.sync()

    kept: list[torch.Tensor] = []
    made = spmd.plan(gather_and_reduce, topology="v4-8", num_slices=2)
    moved = defaultdict(float)
    for c in made.largest.collectives:
        assert c.is_between_slices == ("slice" in c.axes), c
        assert not c.is_part and len(c.axes) == 1, c
        assert all(len({i // 4 for i in group}) == 1 + c.is_between_slices for group in c.groups)
        moved[c.axes] += c.moved_bytes
    assert set(moved) == {("slice",), ("x",), ("y",)}
    assert made.largest.costs.dcn_bytes == moved["slice",] >= num_bytes
    assert made.largest.costs.ici_bytes == moved["x",] + moved["y",]
    assert "over slice, DCN" in str(made) and "over x, ICI" in str(made)
