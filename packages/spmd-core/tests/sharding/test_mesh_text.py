"""Meshes from a command line: texts, and errors whose advice fits the devices."""

import math
import re
from collections import OrderedDict

import pytest
from error_texts import message_of
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_core.sharding.mesh_text import parse_mesh


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("data=8", {"data": 8}),
        ("data=2,fsdp=4", {"data": 2, "fsdp": 4}),
        ("fsdp=4,data=2", {"fsdp": 4, "data": 2}),
        (" data = 2 , fsdp = 4 ", {"data": 2, "fsdp": 4}),
        ("data=-1", {"data": 8}),
        ("data=*,fsdp=4", {"data": 2, "fsdp": 4}),
        ("data=2,fsdp=-1,seq=2", {"data": 2, "fsdp": 2, "seq": 2}),
        ("data=8,fsdp=*", {"data": 8, "fsdp": 1}),
        ("data=08", {"data": 8}),
    ],
)
def test_parse_mesh(text, shape):
    mesh = parse_mesh(text, 8)
    assert mesh.shape() == OrderedDict(shape)
    assert mesh.device_ids.tolist() == list(range(8))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "data",
        "=8",
        "data=",
        "data=0",
        "data=-2",
        "data=2.0",
        "data=²",
        "data=8,",
        "data:8",
        "data=x",
        "data=" + "9" * 5000,
    ],
)
def test_parse_mesh_refuses_other_grammar(text):
    message = message_of(lambda: parse_mesh(text, 8))
    assert "axes 'name=size' separated by commas" in message
    assert f"in {text!r}" in message
    assert parse_mesh(advised_mesh(message), 8).size() == 8


@pytest.mark.parametrize(
    ("text", "num_devices", "rule", "got", "advised"),
    [
        (
            "data=2,fsdp=4",
            4,
            "must multiply to the number of devices, 4",
            "got 'data=2,fsdp=4', whose product is 8",
            "data=2,fsdp=2",
        ),
        (
            "data=2,fsdp=2",
            8,
            "must multiply to the number of devices, 8",
            "got 'data=2,fsdp=2', whose product is 4",
            "data=2,fsdp=4",
        ),
        (
            "data=3,fsdp=4",
            8,
            "must multiply to the number of devices, 8",
            "whose product is 12",
            "data=2,fsdp=4",
        ),
        (
            "data=3,fsdp=5",
            8,
            "must multiply to the number of devices, 8",
            "whose product is 15",
            "data=8,fsdp=1",
        ),
        (
            "data=3,fsdp=*",
            8,
            "must divide the number of devices, 8",
            "got 'data=3,fsdp=*', whose product is 3",
            "data=8,fsdp=1",
        ),
        (
            "data=-1,fsdp=*",
            8,
            "at most one axis may take the rest",
            "got 'data', 'fsdp' in 'data=-1,fsdp=*'",
            "data=1,fsdp=8",
        ),
        ("data=2,data=4", 8, "must be named once", "got 'data=2,data=4'", "data=8,model=1"),
    ],
)
def test_parse_mesh_explains_and_gives_an_example_that_fits(text, num_devices, rule, got, advised):
    message = message_of(lambda: parse_mesh(text, num_devices))
    assert rule in message
    assert got in message
    assert advised_mesh(message) == advised
    assert parse_mesh(advised, num_devices).size() == num_devices


def test_parse_mesh_without_devices():
    assert (
        "at least 1 device; got 0 devices for 'data=*'. Start the program with devices."
        in message_of(lambda: parse_mesh("data=*", 0))
    )


def advised_mesh(message: str) -> str:
    return re.findall(r"'([^',]+=\d[^']*)'", message)[-1]


@settings(deadline=None)  # slow examples are no failure
@given(
    sizes=st.lists(
        st.one_of(st.integers(1, 6), st.sampled_from(["*", "-1"])), min_size=1, max_size=4
    ),
    num_devices=st.integers(1, 64),
)
def test_parse_mesh_fits_or_advises_what_fits(sizes, num_devices):
    text = ",".join(f"a{index}={size}" for index, size in enumerate(sizes))
    known = math.prod(size for size in sizes if isinstance(size, int))
    num_free = sum(not isinstance(size, int) for size in sizes)
    fits = num_devices == known if num_free == 0 else num_free == 1 and num_devices % known == 0
    if fits:
        mesh = parse_mesh(text, num_devices)
        assert mesh.size() == num_devices
        assert all(
            size in ("*", "-1") or size == made
            for size, made in zip(sizes, mesh.mesh_shape, strict=True)
        )
    else:
        advised = parse_mesh(
            advised_mesh(message_of(lambda: parse_mesh(text, num_devices))), num_devices
        )
        assert advised.axis_names == tuple(f"a{index}" for index in range(len(sizes)))
