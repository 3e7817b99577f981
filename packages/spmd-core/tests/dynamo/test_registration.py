"""What records operations is not traced, and Dynamo is imported by torch.compile alone."""

import copy
import os

import fresh
import pytest
import torch
from torch import nn

import spmd_core as spmd

# torch.compile imports inductor, which decorates methods for torch.jit; Dynamo asks each tensor for
# its gradient.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

IMPORTED = """
import sys
import spmd_core
assert "torch._dynamo" not in sys.modules, "torch.compile imports it, spmd_core need not"
"""


def test_the_import_of_the_package_does_not_import_dynamo():
    result = fresh.run(["-c", IMPORTED], dict(os.environ))
    assert result.returncode == 0, result.stderr


def test_operations_outside_of_the_graphs_are_recorded_as_ever():
    layer = nn.LSTM(3, 3)  # Dynamo traces none, on any device
    on_device, x = copy.deepcopy(layer).to("xla"), torch.randn(2, 3)
    found = torch.compile(on_device)(x.to("xla"))[0]
    torch.testing.assert_close(found.cpu(), layer(x)[0])

    @torch.compile
    def function(x):
        y = x * 2
        spmd.sync()
        return y + float(y.sum())

    assert function(torch.ones(3, device="xla")).tolist() == [8.0] * 3


def test_modules_whose_forward_is_replaced(num_devices):
    torch.manual_seed(0)
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    on_device = copy.deepcopy(model).to("xla")
    for layer in (on_device[0], on_device[2], on_device):
        spmd.fully_shard(layer, mesh)
    compiled = torch.compile(on_device)
    x = torch.randn(8, 16)
    for _ in range(2):
        found, expected = compiled(x.to("xla")), model(x)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
        found.square().mean().backward()
        expected.square().mean().backward()
    for parameter, wanted in zip(on_device.parameters(), model.parameters()):
        torch.testing.assert_close(parameter.grad.cpu(), wanted.grad, rtol=1e-4, atol=1e-5)
