"""Eight emulated devices (or SPMD_TEST_DEVICES of them) in SPMD mode, and a mesh for any number of devices."""

import os

import pytest
import torch

import spmd_core as spmd

NUM_DEVICES = int(os.environ.get("SPMD_TEST_DEVICES", "8"))
spmd.config.cache_dir = os.environ.get("SPMD_CACHE_DIR") or None
spmd.simulate(NUM_DEVICES)
spmd.use_spmd()


@pytest.fixture(scope="session", autouse=True)
def devices() -> None:
    assert spmd.global_runtime_device_count() == NUM_DEVICES


@pytest.fixture
def num_devices() -> int:
    return NUM_DEVICES


@pytest.fixture
def mesh_1d() -> spmd.Mesh:
    """All devices on axis `x`."""
    return spmd.Mesh(range(NUM_DEVICES), (NUM_DEVICES,), ("x",))


@pytest.fixture
def mesh_2d() -> spmd.Mesh:
    """All devices on axes `a` and `b`; 4 x 2 of eight devices."""
    b = 2 if NUM_DEVICES % 2 == 0 else 1
    return spmd.Mesh(range(NUM_DEVICES), (NUM_DEVICES // b, b), ("a", "b"))


@pytest.fixture
def hybrid(num_devices):
    """Axes `replicate` (2) and `fsdp` (the rest)."""
    if num_devices % 2:
        pytest.skip("hybrid sharding needs an even number of devices")
    return spmd.Mesh(range(num_devices), (2, num_devices // 2), ("replicate", "fsdp"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
