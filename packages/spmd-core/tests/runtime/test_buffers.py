"""Host data on its way to devices and back: padding, blocks, and programs in flight."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import torch

import spmd_core as spmd
from spmd_core.runtime import buffers
from spmd_core.runtime.jax_sharding import named_sharding
from spmd_core.sharding.sharding import Sharding


def test_padding_comes_behind_the_elements(mesh_1d, num_devices):
    size = 2 * num_devices + 1
    sharding = Sharding.of(mesh_1d, ("x",), 1)
    padded = sharding.padded_shape((size,))
    array = buffers.upload(torch.arange(1.0, size + 1), named_sharding(sharding), padded)
    whole = np.zeros(padded, np.float32)
    whole[:size] = np.arange(1, size + 1)
    assert np.asarray(array).tolist() == whole.tolist()
    assert buffers.download(array, (size,)).tolist() == whole[:size].tolist()


def test_a_reshard_pads_behind_the_elements(mesh_1d, num_devices):
    sharding = Sharding.of(mesh_1d, ("x",), 1)
    replicated = named_sharding(Sharding.of(mesh_1d, (), 1))
    array = buffers.upload(torch.arange(1.0, 4.0), replicated, (3,))
    moved = buffers.reshard(array, named_sharding(sharding), (3,), sharding.padded_shape((3,)))
    assert np.asarray(moved)[:3].tolist() == [1, 2, 3] and not np.asarray(moved)[3:].any()


def test_too_many_programs_wait_for_the_oldest():
    waited = []

    class Token:
        def __init__(self, number: int) -> None:
            self.number = number

        def block_until_ready(self) -> None:
            waited.append(self.number)

    spmd.config.max_in_flight_cpu = 2
    in_flight = buffers.InFlight()
    for number in range(4):
        in_flight.add(Token(number), lambda error: error)
    assert waited == [0, 1] and in_flight.has_started
    in_flight.wait_all()
    assert waited == [0, 1, 2, 3]


def test_an_interrupted_wait_forgets_no_program():
    waited = []

    class Token:
        def __init__(self, number):
            self.number, self.is_interrupted = number, number == 1

        def block_until_ready(self):
            waited.append(self.number)
            if self.is_interrupted:
                self.is_interrupted = False
                raise KeyboardInterrupt
            if self.number == 2:
                raise jax.errors.JaxRuntimeError("it failed")

    in_flight = buffers.InFlight()
    for number in range(3):
        in_flight.add(Token(number), lambda error: spmd.errors.ProgramError(f"explained: {error}"))
    with pytest.raises(KeyboardInterrupt):
        in_flight.wait_all()
    with pytest.raises(spmd.errors.ProgramError, match="explained: it failed"):
        in_flight.wait_all()
    assert waited == [0, 1, 1, 2]


def test_reading_a_large_array_leaves_no_copy_on_the_host(mesh_1d, monkeypatch):
    monkeypatch.setattr(buffers, "_KEPT_BYTES", 0)
    sharding = named_sharding(Sharding.of(mesh_1d, ("x",), 1))
    array = buffers.upload(torch.arange(16.0), sharding, (16,))
    read = buffers.download(array, (16,))
    assert array._npy_value is None  # where jax keeps it
    read.add_(1)
    assert buffers.download(array, (16,)).tolist() == list(range(16))


def test_a_failure_is_raised_in_the_thread_that_started_the_program():
    class Broken:
        def block_until_ready(self) -> None:
            raise ValueError("INTERNAL: it failed")

    in_flight = buffers.InFlight()
    with ThreadPoolExecutor(1) as pool:

        def explain(error: Exception) -> Exception:
            return spmd.errors.ProgramError(f"theirs: {error}")

        pool.submit(in_flight.add, Broken(), explain).result()
        in_flight.wait_all()  # by a thread that has started nothing
        with pytest.raises(spmd.errors.ProgramError, match="theirs: INTERNAL: it failed"):
            pool.submit(in_flight.wait_all).result()
        pool.submit(in_flight.wait_all).result()  # says it once
        pool.submit(in_flight.add, Broken(), explain).result()
        in_flight.wait_all()
    with pytest.raises(spmd.errors.ProgramError, match="theirs: INTERNAL: it failed"):
        in_flight.wait_all()  # of a thread that has ended
