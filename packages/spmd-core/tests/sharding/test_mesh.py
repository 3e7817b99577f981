"""Mesh as a value: arguments, copies, text form, and the global mesh."""

import copy
import itertools
import math
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from error_texts import message_of
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd_core as spmd
from spmd_core.errors import MeshError
from spmd_core.sharding.mesh import (
    Mesh,
    check_devices,
    get_global_mesh,
    given_or_global,
    set_global_mesh,
)

# the value


@pytest.mark.parametrize(
    "ids",
    [
        range(8),
        list(range(8)),
        tuple(range(8)),
        np.arange(8),
        np.arange(8, dtype=np.int32).reshape(4, 2),
    ],
)
@pytest.mark.parametrize("shape", [(4, 2), [4, 2], np.array([4, 2])])
@pytest.mark.parametrize("names", [("data", "model"), ["data", "model"]])
def test_every_spelling_of_the_arguments_makes_the_same_mesh(ids, shape, names):
    mesh = Mesh(ids, shape, names)
    assert mesh == Mesh(range(8), (4, 2), ("data", "model"))
    assert mesh.mesh_shape == (4, 2)
    assert all(type(size) is int for size in mesh.mesh_shape)
    assert mesh.axis_names == ("data", "model")
    assert mesh.device_ids.shape == (8,)
    assert mesh.device_ids.dtype == np.int64
    assert mesh.size() == 8


def test_ids_are_placed_in_row_major_order():
    logical = Mesh([5, 3, 1, 0, 2, 4], (2, 3)).get_logical_mesh()
    assert logical.tolist() == [[5, 3, 1], [0, 2, 4]]


def test_shape_maps_names_to_sizes_in_mesh_order():
    assert Mesh(range(8), (4, 2), ("y", "x")).shape() == OrderedDict([("y", 4), ("x", 2)])


def test_shape_of_an_unnamed_mesh_is_keyed_by_index():
    assert Mesh(range(8), (4, 2)).shape() == OrderedDict([(0, 4), (1, 2)])


def test_a_submesh_may_use_any_devices():
    mesh = Mesh([1000, 7], (2,), ("pair",))
    assert mesh.device_ids.tolist() == [1000, 7]


def test_a_mesh_of_1024_devices():
    mesh = Mesh(range(1024), (4, 16, 16), ("a", "b", "c"))
    assert mesh.get_logical_mesh()[3, 15, 15] == 1023
    assert Mesh.from_str(str(mesh)) == mesh
    assert len(repr(mesh)) < 100


def test_axis_index_takes_names_and_indices():
    mesh = Mesh(range(8), (2, 2, 2), ("x", "y", "z"))
    assert [mesh.axis_index(axis) for axis in ("x", "z", 0, 2, -1, -3, np.int32(1))] == [
        0,
        2,
        0,
        2,
        2,
        0,
        1,
    ]
    assert mesh.get_axis_name_idx("y") == 1


def test_equal_meshes_hash_alike_and_different_ones_differ():
    mesh = Mesh(range(8), (4, 2), ("x", "y"))
    others = [
        Mesh(range(8), (2, 4), ("x", "y")),
        Mesh(range(8), (4, 2), ("x", "z")),
        Mesh(range(8), (4, 2)),
        Mesh(range(7, -1, -1), (4, 2), ("x", "y")),
        Mesh(range(8), (4, 2, 1), ("x", "y", "z")),
    ]
    assert hash(mesh) == hash(Mesh(np.arange(8), (4, 2), ("x", "y")))
    assert len({mesh, *others}) == 6
    assert mesh != (4, 2)


def test_a_mesh_keeps_no_hold_on_the_callers_array():
    ids = np.arange(4)
    mesh = Mesh(ids, (4,))
    ids[0] = 9
    assert mesh.device_ids.tolist() == [0, 1, 2, 3]


def test_a_mesh_cannot_be_changed():
    mesh = Mesh(range(4), (4,))
    with pytest.raises(
        AttributeError, match=r"immutable; got an assignment to 'mesh_shape'\. Build another Mesh"
    ):
        mesh.mesh_shape = (2, 2)
    with pytest.raises(
        AttributeError, match=r"immutable; got a deletion of 'mesh_shape'\. Build another Mesh"
    ):
        del mesh.mesh_shape
    with pytest.raises(ValueError, match="read-only"):
        mesh.device_ids[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        mesh.get_logical_mesh()[0] = 1


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda mesh: pickle.loads(pickle.dumps(mesh))]
)
def test_copies_are_equal_and_still_read_only(duplicate):
    mesh = Mesh([3, 1, 2, 0], (2, 2), ("x", "y"))
    again = duplicate(mesh)
    assert again == mesh
    assert hash(again) == hash(mesh)
    assert not again.device_ids.flags.writeable


def test_a_pickle_from_another_process_hashes_as_here():
    # str hashes are salted per process, so a hash inside the pickle would be wrong here.
    code = (
        "import pickle, sys; from spmd_core.sharding.mesh import Mesh; "
        "sys.stdout.buffer.write(pickle.dumps(Mesh([1, 0], (2,), ('x',))))"
    )
    source = Path(spmd.__file__).parents[1]
    made = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        env={"PYTHONPATH": source, "PYTHONHASHSEED": "7"},
    )
    assert pickle.loads(made.stdout) in {Mesh([1, 0], (2,), ("x",))}


class SlicedMesh(Mesh):
    """A mesh with other constructor arguments, as a hybrid mesh has."""

    def __init__(self, *, num_slices: int) -> None:
        super().__init__(range(num_slices * 2), (num_slices, 2), ("slice", "chip"))


def test_a_subclass_with_its_own_constructor_copies_and_compares_as_a_mesh():
    mesh = SlicedMesh(num_slices=3)
    assert type(copy.deepcopy(mesh)) is SlicedMesh
    assert mesh == Mesh(range(6), (3, 2), ("slice", "chip"))
    assert SlicedMesh.from_str(str(mesh)) == mesh


@pytest.mark.parametrize(
    "mesh",
    [Mesh(range(2, 6), (4,)), Mesh([3, 1, 2, 0], (2, 2), ("x", "y")), Mesh([7], (1,), ("one",))],
)
def test_the_repr_of_a_small_mesh_builds_it(mesh):
    assert eval(repr(mesh)) == mesh


def test_the_repr_of_a_large_permuted_mesh_is_short():
    assert repr(Mesh(range(99, -1, -1), (100,))) == "Mesh([99, 98, 97, ..., 0], (100,))"


@pytest.mark.parametrize(
    "mesh",
    [Mesh(range(4), (4,)), Mesh([3, 1, 2, 0], (2, 2), ("x", "it's")), Mesh([7], (1,), ("one",))],
)
def test_text_round_trip(mesh):
    assert Mesh.from_str(str(mesh)) == mesh


def test_text_is_a_dict_literal():
    assert (
        str(Mesh(range(2), (2,), ("x",)))
        == "{'device_ids': [0, 1], 'mesh_shape': (2,), 'axis_names': ('x',)}"
    )


# helpers


@pytest.mark.usefixtures("no_global_mesh")
def test_the_global_mesh_is_none_until_set():
    assert get_global_mesh() is None
    mesh = Mesh(range(4), (4,))
    set_global_mesh(mesh)
    assert get_global_mesh() is mesh
    set_global_mesh(None)
    assert get_global_mesh() is None


def test_check_devices_accepts_what_exists():
    check_devices(Mesh([7, 0], (2,)), 8)
    check_devices(Mesh([0], (1,)), 1)


def test_check_devices_shortens_a_long_list():
    assert "got 8, 9, 10, 11 and 1012 more in" in message_of(
        lambda: check_devices(Mesh(range(1024), (1024,)), 8)
    )


# any mesh


@settings(deadline=None)  # slow examples are no failure
@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_any_mesh_keeps_its_placement_through_text_and_pickle(data, shape):
    size = math.prod(shape)
    ids = data.draw(st.lists(st.integers(0, 2000), min_size=size, max_size=size, unique=True))
    names = data.draw(
        st.none()
        | st.lists(
            st.text(min_size=1, max_size=5), min_size=len(shape), max_size=len(shape), unique=True
        )
    )
    mesh = Mesh(ids, shape, names)
    for again in (Mesh.from_str(str(mesh)), pickle.loads(pickle.dumps(mesh))):
        assert again == mesh
        assert hash(again) == hash(mesh)
    logical = mesh.get_logical_mesh()
    for device_id, position in zip(
        ids, itertools.product(*(range(axis_size) for axis_size in shape)), strict=True
    ):
        assert logical[position] == device_id


def test_a_given_mesh_comes_before_the_global_one(no_global_mesh):
    own, shared = Mesh([0], (1,), ("own",)), Mesh([0], (1,), ("shared",))
    with pytest.raises(MeshError, match=r"a loader needs a mesh; got None, and no global mesh"):
        given_or_global(None, "a loader")
    set_global_mesh(shared)
    assert given_or_global(own, "a loader") is own
    assert given_or_global(None, "a loader") is shared
    with pytest.raises(MeshError, match=r"a loader needs a mesh; got int. Pass mesh="):
        given_or_global(3, "a loader")
