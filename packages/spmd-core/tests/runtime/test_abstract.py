"""Arrays of devices that are not there: the bytes of those that are alive."""

from pathlib import Path

import jax
import numpy as np
import pytest

from spmd_core.runtime import abstract
from spmd_core.runtime.abstract import AbstractArray, Run

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.fixture
def run(monkeypatch):
    run = Run(Path("unused"), lambda program, arguments: None, lambda: None)
    monkeypatch.setattr(abstract, "_run", run)
    return run


def made(size):
    return AbstractArray((size,), np.float32, SHARDING)


def test_live_bytes(run):
    arrays = [made(size) for size in (1, 10, 100, 1000)]
    arrays[1].delete()
    del arrays[0]
    assert run.live_bytes(besides=()) == 4 * 1100
    assert run.live_bytes(besides=arrays[:2]) == 4 * 1000


def test_arrays_that_are_made_while_others_are_counted(run):
    """As the threads of a loader do."""
    later = []

    class Making(AbstractArray):
        def is_deleted(self):
            later.append(made(1))
            return super().is_deleted()

    arrays = [Making((10,), np.float32, SHARDING) for _ in range(3)]
    assert run.live_bytes(besides=()) == 4 * 30 and len(later) == len(arrays)
    assert run.live_bytes(besides=arrays) == 4 * 3
