"""A recipe's mesh: a number of devices that the CPU does not have is to be emulated."""

import re

import pytest

import spmd_core as spmd
from examples.training.command import mesh_of, start_devices
from examples.training.knobs import KnobError


def test_a_mesh_of_more_devices_names_the_option_that_emulates_them(num_devices: int) -> None:
    assert mesh_of(f"x={num_devices}", num_devices, num_emulated=0).size() == num_devices
    plural = "s" if num_devices > 1 else ""
    other = f", or let the sizes multiply to {num_devices}" if num_devices > 1 else ""
    got = f"got 'x=4,y=4', which takes 16, and {num_devices} CPU device{plural}. "
    for given, verb in ((0, "Add"), (num_devices, "Pass")):
        message = re.escape(f"{got}{verb} --devices 16, which emulates them{other}.")
        with pytest.raises(KnobError, match=message):
            mesh_of("x=4,y=4", num_devices, num_emulated=given)
    # As it says.
    assert mesh_of("x=4,y=4", 16, num_emulated=16).size() == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "a number of at least 1, or * for the rest of the devices; got 'x' in 'x'. Write"),
        ("x=16,x=2", "names each axis once; got 'x' twice in 'x=16,x=2'. Rename"),
        ("x=3,y=*", "which takes a multiple of 3, and 8 CPU devices. Add --devices 9, or let"),
    ],
)
def test_what_is_no_mesh_of_any_devices(text: str, message: str) -> None:
    with pytest.raises(KnobError, match=re.escape(message)):
        mesh_of(text, 8, num_emulated=0)


def test_devices_that_are_not_emulated_are_a_matter_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spmd.distributed, "device_type", lambda: "TPU")
    with pytest.raises(
        spmd.errors.MeshError, match="start the program with another number of devices"
    ):
        mesh_of("x=16", 8, num_emulated=0)


@pytest.mark.parametrize("number", ["many", "0", "-2", "2.5", ""])
def test_a_number_of_processes_that_is_none(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", number)
    message = rf"WORLD_SIZE is the number of processes.*; got '{number}'\. Correct it, or unset it"
    with pytest.raises(KnobError, match=message):
        start_devices(None)
