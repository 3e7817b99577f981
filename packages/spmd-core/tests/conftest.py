"""Meshes for any number of devices; tests whose programs hold nothing of earlier tests."""

import gc

import pytest

import spmd_core as spmd


@pytest.fixture(autouse=True)
def shapes_in_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests loop over shapes that share no program: that is their subject."""
    monkeypatch.setattr(spmd.config, "warn_of_recompiles", False)


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


@pytest.fixture
def nothing_pending() -> None:
    """Frees what earlier tests left in reference cycles, which a test's programs would compute."""
    gc.collect()
    spmd.sync()
