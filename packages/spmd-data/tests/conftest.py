"""Configures the tests: SPMD mode on eight emulated devices, or SPMD_TEST_DEVICES of them."""

import os

import pytest

import spmd_core as spmd

NUM_DEVICES = int(os.environ.get("SPMD_TEST_DEVICES", "8"))
spmd.config.cache_dir = os.environ.get("SPMD_CACHE_DIR") or None
spmd.simulate(NUM_DEVICES)
spmd.use_spmd()


@pytest.fixture
def mesh() -> spmd.Mesh:
    """All devices on the axis `data`."""
    return spmd.Mesh(range(NUM_DEVICES), (NUM_DEVICES,), ("data",))
