"""Configures the tests: SPMD mode, eight emulated devices or SPMD_TEST_DEVICES, no disk cache."""

import os

NUM_DEVICES = int(os.environ.get("SPMD_TEST_DEVICES", "8"))
os.environ.setdefault("SPMD_CACHE_DIR", "")

import pytest  # noqa: E402
import torch  # noqa: E402

import spmd_core as spmd  # noqa: E402
import torch_xla.distributed.spmd as xs  # noqa: E402

spmd.simulate(NUM_DEVICES)
spmd.use_spmd()


@pytest.fixture
def num_devices() -> int:
    return NUM_DEVICES


@pytest.fixture
def row() -> xs.Mesh:
    """All devices along the second of two axes, `x` and `y`, as in PyTorch/XLA's tests."""
    return xs.Mesh(range(NUM_DEVICES), (1, NUM_DEVICES), ("x", "y"))


@pytest.fixture
def ids() -> str:
    """The ids of all devices, as in the text of a sharding."""
    return ",".join(map(str, range(NUM_DEVICES)))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    yield
    spmd.set_global_mesh(None)
