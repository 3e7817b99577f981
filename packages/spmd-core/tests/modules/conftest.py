"""Meshes of the tests of modules."""

import pytest

import spmd_core as spmd


@pytest.fixture
def mesh(num_devices):
    """Axes `data` and `tensor`; 2 x 4 of eight devices."""
    data = 2 if num_devices > 2 else 1
    return spmd.Mesh(range(num_devices), (data, num_devices // data), ("data", "tensor"))


@pytest.fixture
def eight(num_devices):
    """Skips the test where the numbers of its collectives are others."""
    if num_devices != 8:
        pytest.skip("counts collectives over 2 x 4 devices")
