"""The device guard: what torch calls in functions that must not throw is not Python."""

import torch

from spmd_core.torch_backend import device_guard


def test_a_node_of_autograd_asks_no_python_for_its_stream(monkeypatch):
    asked = []

    def type_() -> torch._C._autograd.DeviceType:
        asked.append(1)
        return torch._C._autograd.DeviceType.XLA

    monkeypatch.setattr(device_guard._XlaGuard, "type_", staticmethod(type_))
    x = torch.ones(2, 2, device="xla", requires_grad=True)
    asked.clear()
    loss = (x @ x).relu().sum()
    assert asked == [] and loss.grad_fn is not None
    assert torch.zeros(1).to("xla").device == torch.device("xla:0") and asked != []


def test_the_header_lists_the_functions_of_guards():
    names = device_guard.virtual_functions()
    assert names[:6] == [
        "type",
        "exchangeDevice",
        "getDevice",
        "setDevice",
        "uncheckedSetDevice",
        "getStream",
    ]


def test_without_the_header_there_are_none(monkeypatch, tmp_path):
    monkeypatch.setattr(device_guard, "_FOLDER", tmp_path)
    assert device_guard.virtual_functions() == []
