"""Host data on its way to devices and back: padding and blocks."""

import numpy as np
import pytest
import torch

from spmd_core import dtypes
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


def test_reading_a_large_array_leaves_no_copy_on_the_host(mesh_1d, monkeypatch):
    monkeypatch.setattr(buffers, "_KEPT_BYTES", 0)
    sharding = named_sharding(Sharding.of(mesh_1d, ("x",), 1))
    array = buffers.upload(torch.arange(16.0), sharding, (16,))
    read = buffers.download(array, (16,))
    assert array._npy_value is None  # where jax keeps it
    read.add_(1)
    assert buffers.download(array, (16,)).tolist() == list(range(16))


def test_a_copy_has_memory_of_its_own(mesh_1d, num_devices):
    """Also one of the same dtype, which jax could hand on: programs take copies over."""
    whole, split = (named_sharding(Sharding.of(mesh_1d, s, 1)) for s in ((), ("x",)))
    source = buffers.upload(torch.arange(2.0 * num_devices) / 3, whole, (2 * num_devices,))
    single = np.dtype(np.float32)
    for sharding in (whole, split):
        copy = buffers.copied(source, (single,), sharding)
        addresses = [
            {s.data.unsafe_buffer_pointer() for s in x.addressable_shards} for x in (source, copy)
        ]
        assert not addresses[0] & addresses[1] and copy.sharding == sharding
        copy.delete()
    narrow = buffers.copied(source, (dtypes.to_jax(torch.bfloat16), single), whole)
    assert torch.equal(
        buffers.download(narrow, source.shape),
        (torch.arange(2.0 * num_devices) / 3).bfloat16().float(),
    )


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (700, 800)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_host_blocks_are_zeros_that_can_be_written(shape, dtype):
    block = buffers.host_block(shape, dtype)
    assert block.shape == shape and block.dtype == dtype and not block.any()
    assert block.data_ptr() % 64 == 0 or block.nbytes == 0
    block.fill_(1)
    assert block.all()
