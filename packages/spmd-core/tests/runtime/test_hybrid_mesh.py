"""Hybrid meshes: slices as the major part of an axis, torus order inside a slice, and errors."""

import pickle
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import spmd_core as spmd
from spmd_core.runtime.hybrid_mesh import HybridMesh, arrange

NUM_DEVICES = spmd.global_runtime_device_count()
needs_8 = pytest.mark.skipif(NUM_DEVICES != 8, reason="the shapes are those of 8 devices")


@dataclass(frozen=True)
class Chip:
    """The attributes of a TPU device that jax's mesh utilities read."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v4"
    core_on_chip: int = 0
    process_index: int = 0


def torus(shape: tuple[int, int, int], *, num_slices: int = 1) -> list[Chip]:
    places = [place for _ in range(num_slices) for place in np.ndindex(*shape)]
    size = int(np.prod(shape))
    return [Chip(i, tuple(map(int, place)), i // size) for i, place in enumerate(places)]


@needs_8
def test_positional_as_documented():
    mesh = HybridMesh((1, 4, 1), (2, 1, 1), ("data", "fsdp", "tensor"))
    assert mesh.shape() == OrderedDict([("data", 2), ("fsdp", 4), ("tensor", 1)])
    assert mesh.get_logical_mesh().tolist() == [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]
    assert (mesh.ici_mesh_shape, mesh.dcn_mesh_shape) == ((1, 4, 1), (2, 1, 1))


@needs_8
def test_by_keyword_and_without_dcn():
    mesh = HybridMesh(ici_mesh_shape=(4, 2), axis_names=("a", "b"))
    assert mesh == spmd.Mesh(range(8), (4, 2), ("a", "b"))
    assert HybridMesh(
        ici_mesh_shape=[2, 2], dcn_mesh_shape=[1, 2], num_slices=2
    ).get_logical_mesh().tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


@needs_8
def test_a_tensor_over_it():
    mesh = HybridMesh((2, 2), (2, 1), ("data", "model"))
    x = torch.arange(32.0).reshape(8, 4)
    t = spmd.mark_sharding(x.to("xla"), mesh, ("data", "model"))
    assert torch.equal((t * 2).cpu(), x * 2)
    assert t.local_shards[5].indices == [slice(4, 6, 1), slice(2, 4, 1)]


def test_pickled_as_the_mesh_that_it_is():
    mesh = HybridMesh((NUM_DEVICES,), axis_names=("all",))
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh
    assert again.axis_names == ("all",)


def test_slices_of_the_hardware_are_the_major_part():
    placed = arrange(torus((2, 2, 1), num_slices=2), (1, 4), (2, 1))
    assert placed.shape == (2, 4)
    assert {int(i) // 4 for i in placed[0]} == {0}
    assert {int(i) // 4 for i in placed[1]} == {1}
    assert sorted(placed.reshape(-1).tolist()) == list(range(8))


def test_slices_along_a_minor_axis():
    placed = arrange(torus((2, 2, 1), num_slices=2), (2, 2), (1, 2))
    assert placed.shape == (2, 4)
    assert {int(i) // 4 for i in placed[:, :2].reshape(-1)} == {0}
    assert {int(i) // 4 for i in placed[:, 2:].reshape(-1)} == {1}


@pytest.mark.parametrize("shape", [(4, 4), (2, 8), (16,), (2, 2, 2, 2), (8, 2)])
def test_every_chip_once_also_where_a_physical_axis_is_split(shape):
    placed = arrange(torus((4, 2, 2)), shape, (1,) * len(shape))
    assert placed.shape == shape and sorted(placed.reshape(-1).tolist()) == list(range(16))


def test_an_axis_of_the_mesh_follows_a_physical_one():
    chips = torus((4, 2, 2))
    placed = arrange(chips, (4, 4), (1, 1))
    # One mesh axis is the physical axis of size 4, the other combines the two of size 2.
    along = [{chips[int(i)].coords[0] for i in line} for line in (placed[0], placed[:, 0])]
    assert sorted(map(len, along)) == [1, 4]


def test_simulated_slices_on_hardware_without_any():
    placed = arrange(torus((2, 2, 2)), (4,), (2,), num_slices=2)
    assert [sorted(placed[:4].tolist()), sorted(placed[4:].tolist())] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_several_slices_need_a_dcn_shape():
    with pytest.raises(
        spmd.errors.MeshError,
        match=r"must say which axes go between slices; got 2 slices .* for instance \(2, 1\)",
    ):
        arrange(torus((2, 2, 1), num_slices=2), (8, 1), (1, 1))


def test_a_single_slice_takes_no_dcn_shape():
    with pytest.raises(
        spmd.errors.MeshError,
        match=r"got \(2, 1\) with product 2, and there is a single slice\. .*num_slices=2",
    ):
        arrange(torus((2, 2, 1)), (2, 1), (2, 1))


def test_wrong_number_of_slices():
    with pytest.raises(spmd.errors.MeshError, match=r"product 3, and there are 2 slices"):
        arrange(torus((2, 2, 1), num_slices=2), (4,), (3,))


def test_wrong_number_of_devices_in_a_slice():
    with pytest.raises(
        spmd.errors.MeshError, match=r"got \(3,\) with product 3, and 2 slices of 4 devices"
    ):
        arrange(torus((2, 2, 1), num_slices=2), (3,), (2,))


def test_a_shape_that_the_torus_cannot_take():
    with pytest.raises(
        spmd.errors.MeshError, match=r"must form a mesh of shape ici_mesh_shape; got \(3, 3\)"
    ):
        arrange([*(Chip(i, (i, 0, 0)) for i in range(8)), Chip(8, (0, 1, 0))], (3, 3), (1, 1))


def test_uneven_simulated_slices():
    with pytest.raises(spmd.errors.MeshError, match=r"equal size; got 4 devices for 3 slices"):
        arrange(torus((2, 2, 1)), (1,), (3,), num_slices=3)


def test_shapes_of_different_rank():
    with pytest.raises(
        spmd.errors.MeshError,
        match=r"one size for each axis; got \(1, 4\) with 2 and \(2,\) with 1",
    ):
        HybridMesh((1, 4), (2,))


@pytest.mark.parametrize("shape", [(), 8, (0, 8), ("8",), (True, 8), None])
def test_what_is_no_shape(shape):
    with pytest.raises(spmd.errors.MeshError, match="ici_mesh_shape must be a tuple"):
        HybridMesh(shape)
