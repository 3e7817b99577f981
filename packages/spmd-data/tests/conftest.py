"""A mesh for the loader's tests."""

import pytest

import spmd_core as spmd


@pytest.fixture
def mesh(num_devices: int) -> spmd.Mesh:
    """All devices on the axis `data`."""
    return spmd.Mesh(range(num_devices), (num_devices,), ("data",))
