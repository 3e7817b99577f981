"""There is one logical device: every way to name another one is refused, and 'xla' is advised."""

import io
import re

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.tensor.logical_device import as_device


def load(location):
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    return torch.load(file, map_location=location)


WAYS = {
    "zeros": lambda d: torch.zeros(2, device=d),
    "empty_strided": lambda d: torch.empty_strided((2,), (1,), device=d),
    "arange": lambda d: torch.arange(2, device=d),
    "randperm": lambda d: torch.randperm(2, device=d),
    "tril_indices": lambda d: torch.tril_indices(2, 2, device=d),
    "kaiser_window": lambda d: torch.kaiser_window(2, device=d),
    "tensor": lambda d: torch.tensor([1.0], device=d),
    "as_tensor": lambda d: torch.as_tensor([1.0], device=d),
    "zeros_like on the CPU": lambda d: torch.zeros_like(torch.ones(2), device=d),
    "zeros_like on the device": lambda d: torch.zeros_like(torch.ones(2, device="xla"), device=d),
    "new_zeros": lambda d: torch.ones(2, device="xla").new_zeros(2, device=d),
    "to from the CPU": lambda d: torch.ones(2).to(d),
    "to from the device": lambda d: torch.ones(2, device="xla").to(d),
    "to with a dtype": lambda d: torch.ones(2, device="xla").to(device=d, dtype=torch.float64),
    "layer": lambda d: nn.Linear(2, 2, device=d).weight,
    "module": lambda d: nn.Linear(2, 2).to(d).weight,
    "to_empty": lambda d: nn.Linear(2, 2, device="meta").to_empty(device=d).weight,
    "generator": lambda d: torch.Generator(device=d),
    "load": load,
}


@pytest.mark.parametrize("way", WAYS)
def test_another_index_is_refused(way):
    message = re.escape(
        "one logical device, which stands for all devices; got 'xla:9'. Write 'xla'"
    )
    with pytest.raises(spmd.errors.DeviceMismatchError, match=message):
        WAYS[way]("xla:9")


@pytest.mark.parametrize("way", WAYS)
def test_what_the_refusal_advises(way):
    for device in ("xla", "xla:0"):
        assert WAYS[way](device).device == torch.device("xla:0")


def test_the_device_module_has_one_device():
    for refused in (torch.xla.set_device, torch.xla.device):
        for device in (1, "xla:1", torch.device("xla:1")):
            with pytest.raises(spmd.errors.DeviceMismatchError, match=r"got 'xla:1'\. Write 'xla'"):
                refused(device)
    torch.xla.set_device(0)
    with torch.xla.device("xla"):
        assert torch.ones(1, device="xla").item() == 1


def test_an_argument_that_names_no_device_is_refused():
    for value in (None, 5.5, True, b"xla", "zz", "xla:x", "xla:3", torch.device("xla:1")):
        with pytest.raises((TypeError, RuntimeError), match=r"; got .*[.] Write .*'xla'"):
            as_device("device", value)
    for value in ("xla", "xla:0", torch.device("xla"), "cpu"):
        assert as_device("device", value) == torch.device(value)
    with pytest.raises(ValueError, match=r"this process's devices, .*; got 'xla:3'. Pass one of"):
        spmd.metrics.memory_stats("xla:3")
