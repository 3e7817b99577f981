"""Meshes over some of the devices, for tests that need so many."""

import pytest

import spmd_core as spmd


def axis(count: int) -> spmd.Mesh:
    """A mesh of one axis over the first devices."""
    if spmd.global_runtime_device_count() < count:
        pytest.skip(f"needs {count} devices")
    return spmd.Mesh(range(count), (count,), ("a",))


def two_axes(shape: tuple[int, int] = (4, 2)) -> spmd.Mesh:
    """A mesh of two axes over eight devices."""
    if spmd.global_runtime_device_count() < 8:
        pytest.skip("needs 8 devices")
    return spmd.Mesh(range(8), shape, ("x", "y"))
