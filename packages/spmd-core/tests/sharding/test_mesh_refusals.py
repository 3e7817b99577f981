"""What a mesh refuses, with the rule, what was got, and advice that works."""

import re

import numpy as np
import pytest
from error_texts import message_of

from spmd_core.errors import PartitionSpecError
from spmd_core.sharding.mesh import (
    Mesh,
    check_devices,
    set_global_mesh,
)

# The call, and of its message the rule, the value and the advice; a right call.
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
