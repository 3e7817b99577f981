"""Mesh as a value: arguments, error messages, text form, and meshes from a command line."""

import copy
import itertools
import math
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd_core as spmd
from spmd_core.errors import MeshError, PartitionSpecError
from spmd_core.sharding.mesh import (
    Mesh,
    check_devices,
    get_global_mesh,
    given_or_global,
    set_global_mesh,
)


@pytest.fixture
def no_global_mesh():
    before = get_global_mesh()
    set_global_mesh(None)
    yield
    set_global_mesh(before)


def message_of(wrong, error=MeshError) -> str:
    """The text of the error that `wrong()` raises.

    Asserts that it ends with a period, and has no double space or unformatted placeholder.
    """
    with pytest.raises(error) as caught:
        wrong()
    text = str(caught.value)
    assert text.endswith(".")
    assert "  " not in text
    assert not re.search(r"\{[a-z]", text), "an f-string without its f"
    return text


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


# what a mesh refuses: (call, and from its message: the rule, the value, the advice; a right call)

REFUSED = {
    "shape is empty": (
        lambda: Mesh([], ()),
        "one or more ints, each at least 1",
        "got ()",
        "such as (4, 2)",
        lambda: Mesh(range(8), (4, 2)),
    ),
    "shape is an int": (
        lambda: Mesh(range(8), 8),
        "one or more ints",
        "got 8",
        "Write (8,)",
        lambda: Mesh(range(8), (8,)),
    ),
    "shape is 0": (
        lambda: Mesh([], 0),
        "each at least 1",
        "got 0",
        "such as (4, 2)",
        lambda: Mesh(range(8), (4, 2)),
    ),
    "size 0": (
        lambda: Mesh([], (4, 0)),
        "each at least 1",
        "got (4, 0)",
        "such as (4, 2)",
        lambda: Mesh(range(8), (4, 2)),
    ),
    "size is negative": (
        lambda: Mesh([0], (-1, -1)),
        "each at least 1",
        "got (-1, -1)",
        "such as (4, 2)",
        lambda: Mesh(range(8), (4, 2)),
    ),
    "size is a float": (
        lambda: Mesh(range(8), (8 / 2, 2)),
        "ints",
        "got (4.0, 2)",
        "such as (4, 2)",
        lambda: Mesh(range(8), (4, 2)),
    ),
    "size is a bool": (
        lambda: Mesh([0], (True,)),
        "ints",
        "got (True,)",
        "such as (4, 2)",
        lambda: Mesh(range(8), (4, 2)),
    ),
    "shape is a str": (
        lambda: Mesh(range(8), "42"),
        "ints",
        "got '42'",
        "such as (4, 2)",
        lambda: Mesh(range(8), (4, 2)),
    ),
    "shape is a set": (
        lambda: Mesh(range(8), {4, 2}),
        "ints",
        "got {",
        "such as (4, 2)",
        lambda: Mesh(range(8), (4, 2)),
    ),
    "ids are an int": (
        lambda: Mesh(8, (8,)),
        "a list, range or array of ints",
        "got 8",
        "range(8)",
        lambda: Mesh(range(8), (8,)),
    ),
    "ids are None": (
        lambda: Mesh(None, (8,)),
        "a list, range or array of ints",
        "got None",
        "range(8)",
        lambda: Mesh(range(8), (8,)),
    ),
    "id is a float": (
        lambda: Mesh([0, 1.5], (2,)),
        "ints",
        "got 1.5",
        "range(2)",
        lambda: Mesh(range(2), (2,)),
    ),
    "id is a bool": (
        lambda: Mesh([0, True], (2,)),
        "ints",
        "got True",
        "range(2)",
        lambda: Mesh(range(2), (2,)),
    ),
    "id is negative": (
        lambda: Mesh([0, -1], (2,)),
        "from 0 to",
        "got -1",
        "range(2)",
        lambda: Mesh(range(2), (2,)),
    ),
    "id is huge": (
        lambda: Mesh([0, 2**70], (2,)),
        "to 2147483647",
        f"got {2**70}",
        "range(2)",
        lambda: Mesh(range(2), (2,)),
    ),
    "many wrong ids": (
        lambda: Mesh(["seven"] * 6, (6,)),
        "ints",
        "and 2 more",
        "range(6)",
        lambda: Mesh(range(6), (6,)),
    ),
    "too few ids": (
        lambda: Mesh(range(8), (4, 4)),
        "the product of mesh_shape must be the number of device_ids",
        "got mesh_shape (4, 4) with product 16 and 8 ids",
        "Pass 16 ids, or a mesh_shape whose product is 8",
        lambda: (Mesh(range(16), (4, 4)), Mesh(range(8), (4, 2))),
    ),
    "repeated ids": (
        lambda: Mesh([0, 1, 1, 0], (4,)),
        "device_ids must be unique",
        "got 0, 1 more than once",
        "Pass 4 different ids",
        lambda: Mesh([0, 1, 2, 3], (4,)),
    ),
    "names are a str": (
        lambda: Mesh([0], (1,), "x"),
        "must be a tuple",
        "got 'x'",
        "('x',)",
        lambda: Mesh([0], (1,), ("x",)),
    ),
    "names are an int": (
        lambda: Mesh([0], (1, 1), 3),
        "a tuple",
        "got 3",
        "('axis0', 'axis1')",
        lambda: Mesh([0], (1, 1), ("axis0", "axis1")),
    ),
    "a name is empty": (
        lambda: Mesh([0], (1, 1), ("x", "")),
        "a str that is not empty",
        "got ['x', '']",
        "('data', 'model')",
        lambda: Mesh([0], (1, 1), ("data", "model")),
    ),
    "a name is an int": (
        lambda: Mesh([0], (1, 1), (0, 1)),
        "must be a str",
        "got [0, 1]",
        "('data', 'model')",
        lambda: Mesh([0], (1, 1), ("data", "model")),
    ),
    "too few names": (
        lambda: Mesh(range(8), (4, 2), ("x",)),
        "one name for each axis of mesh_shape",
        "got 1 names ['x'] for 2 axes (4, 2)",
        "Pass 2 names, or None",
        lambda: (Mesh(range(8), (4, 2), ("x", "y")), Mesh(range(8), (4, 2), None)),
    ),
    "repeated names": (
        lambda: Mesh(range(8), (4, 2), ("x", "x")),
        "axis names must be unique",
        "got ['x', 'x']",
        "Rename the axis",
        lambda: Mesh(range(8), (4, 2), ("x", "x2")),
    ),
    "text is not a mesh": (
        lambda: Mesh.from_str("garbage"),
        "a dict literal with the keys device_ids, mesh_shape, axis_names",
        "got 'garbage'",
        "Pass a string that str(mesh) returned",
        lambda: Mesh.from_str(str(Mesh([0], (1,)))),
    ),
    "the global mesh is a shape": (
        lambda: set_global_mesh((4, 2)),
        "must be a Mesh or None",
        "got tuple",
        "Mesh(device_ids, mesh_shape, axis_names)",
        lambda: set_global_mesh(Mesh(range(8), (4, 2), ("x", "y"))),
    ),
    "an id beyond the machine": (
        lambda: check_devices(Mesh([0, 9], (2,)), 8),
        "below the number of devices, 8",
        "got 9 in Mesh([0, 9], (2,))",
        "ids in range(8), or start the program with at least 10 devices",
        lambda: (check_devices(Mesh([0, 7], (2,)), 8), check_devices(Mesh([0, 9], (2,)), 10)),
    ),
    "an unknown name": (
        lambda: Mesh(range(8), (4, 2), ("data", "model")).get_axis_name_idx("modle"),
        "must be one of the mesh's axis names",
        "got 'modle' for Mesh(range(0, 8), (4, 2), ('data', 'model'))",
        "Use one of 'data', 'model'",
        lambda: Mesh(range(8), (4, 2), ("data", "model")).get_axis_name_idx("model"),
    ),
    "a name for an unnamed mesh": (
        lambda: Mesh(range(8), (4, 2)).get_axis_name_idx("x"),
        "only where the mesh has axis names",
        "got 'x' for the unnamed Mesh(range(0, 8), (4, 2))",
        "Use one of 0, 1, or pass axis_names to Mesh",
        lambda: (
            Mesh(range(8), (4, 2)).axis_index(1),
            Mesh(range(8), (4, 2), ("x", "y")).get_axis_name_idx("x"),
        ),
    ),
}


@pytest.mark.usefixtures("no_global_mesh")
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_mesh_refuses_is_explained_and_the_advice_works(case):
    wrong, rule, got, advice, right = REFUSED[case]
    text = message_of(wrong)
    assert rule in text
    assert got in text
    assert advice in text
    right()


@pytest.mark.parametrize(
    ("axis", "rule", "got"),
    [
        ("y", "must be one of the mesh's axis names", "got 'y'"),
        (2, "between -2 and 1, as the mesh has 2 axes", "got 2"),
        (-3, "between -2 and 1, as the mesh has 2 axes", "got -3"),
        (True, "by its index (int) or its name (str)", "got True of type bool"),
        (np.True_, "by its index (int) or its name (str)", "of type bool"),
        (0.0, "by its index (int) or its name (str)", "got 0.0 of type float"),
        (None, "by its index (int) or its name (str)", "got None of type NoneType"),
        (np.arange(2), "by its index (int) or its name (str)", "of type ndarray"),
    ],
)
def test_axis_index_refuses_what_is_no_axis_of_the_mesh(axis, rule, got):
    mesh = Mesh(range(8), (4, 2), ("x", "model"))
    text = message_of(lambda: mesh.axis_index(axis), PartitionSpecError)
    assert rule in text
    assert got in text
    assert "Use one of 'x', 'model'" in text
    assert mesh.axis_index("x") == 0
    assert mesh.axis_index("model") == 1


@pytest.mark.parametrize("mesh", [Mesh([0], (1,)), Mesh(range(8), (4, 2))])
def test_axis_index_of_a_name_in_an_unnamed_mesh(mesh):
    text = message_of(lambda: mesh.axis_index("x"), PartitionSpecError)
    assert "got 'x' for the unnamed" in text
    assert mesh.axis_index(0) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        "{}",
        "{'device_ids': [0]}",
        "{'device_ids': [0], 'mesh_shape': (1,), 'axis_names': None, 'more': 1}",
        "__import__('os').getcwd()",
        "(" * 500,
        "x" * 500,
        None,
        7,
    ],
)
def test_text_that_is_no_mesh(text):
    message = message_of(lambda: Mesh.from_str(text))
    assert len(message) < 500
    advised = re.search(r'such as "(.*)"\.$', message).group(1)
    assert Mesh.from_str(advised) == Mesh([0, 1], (2,), ("data",))


def test_text_of_an_impossible_mesh_says_what_is_impossible():
    assert "product 3" in message_of(
        lambda: Mesh.from_str("{'device_ids': [0, 1], 'mesh_shape': (3,), 'axis_names': None}")
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
