"""A mesh and a text as PyTorch/XLA's own tests have them."""

import pytest

import torch_xla.distributed.spmd as xs


@pytest.fixture
def row(num_devices: int) -> xs.Mesh:
    """All devices along the second of two axes, `x` and `y`, as in PyTorch/XLA's tests."""
    return xs.Mesh(range(num_devices), (1, num_devices), ("x", "y"))


@pytest.fixture
def ids(num_devices: int) -> str:
    """The ids of all devices, as in the text of a sharding."""
    return ",".join(map(str, range(num_devices)))
