"""Meshes for any number of devices."""

import pytest

import spmd_core as spmd


@pytest.fixture
def mesh_1d(num_devices: int) -> spmd.Mesh:
    """All devices on axis `x`."""
    return spmd.Mesh(range(num_devices), (num_devices,), ("x",))


@pytest.fixture
def mesh_2d(num_devices: int) -> spmd.Mesh:
    """All devices on axes `a` and `b`; 4 x 2 of eight devices."""
    b = 2 if num_devices % 2 == 0 else 1
    return spmd.Mesh(range(num_devices), (num_devices // b, b), ("a", "b"))


@pytest.fixture
def hybrid(num_devices: int) -> spmd.Mesh:
    """Axes `replicate` (2) and `fsdp` (the rest)."""
    if num_devices % 2:
        pytest.skip("hybrid sharding needs an even number of devices")
    return spmd.Mesh(range(num_devices), (2, num_devices // 2), ("replicate", "fsdp"))
