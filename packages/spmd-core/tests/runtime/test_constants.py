"""Arrays of one number each, which programs make together."""

import pytest
import torch

from spmd_core.runtime import buffers, constants
from spmd_core.runtime.constants import Constant, arrays_of
from spmd_core.runtime.jax_sharding import named_sharding
from spmd_core.sharding.sharding import Sharding


@pytest.mark.parametrize("rows", [3, 1 << 17], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_an_array_of_one_number_lies_in_shards(rows, dtype, mesh_1d, num_devices):
    sharding = Sharding.of(mesh_1d, ("x",), 2)
    padded = sharding.padded_shape((rows, 3))
    wanted = Constant(torch.tensor(1, dtype=dtype), padded, named_sharding(sharding))
    (array,) = arrays_of([wanted])
    assert array.shape == padded and array.sharding == named_sharding(sharding)
    assert {s.data.shape for s in array.addressable_shards} == {(padded[0] // num_devices, 3)}
    assert torch.equal(buffers.download(array, (rows, 3)), torch.ones(rows, 3, dtype=dtype))


def test_arrays_of_many_forms_share_programs(mesh_1d, num_devices, monkeypatch):
    """Each has its own number and memory; a second array of all forms needs no other program."""
    monkeypatch.setattr(constants, "_SENT_BYTES", 0)
    constants._program.cache_clear()
    whole, split = (named_sharding(Sharding.of(mesh_1d, s, 1)) for s in ((), ("x",)))
    size = 2 * num_devices
    forms = [(torch.float32, whole), (torch.float32, split), (torch.bfloat16, split)]
    wanted = [
        Constant(torch.tensor(number, dtype=dtype), (size,), sharding)
        for number, (dtype, sharding) in enumerate([*forms, *forms, forms[1]])
    ]
    arrays = arrays_of(wanted)
    for number, (array, one) in enumerate(zip(arrays, wanted, strict=True)):
        assert array.sharding == one.jax_sharding
        expected = torch.full((size,), number, dtype=one.number.dtype)
        assert torch.equal(buffers.download(array, (size,)), expected)
    shards = [s.data.unsafe_buffer_pointer() for x in arrays for s in x.addressable_shards]
    assert len({*shards}) == len(shards)
    made = constants._program.cache_info()
    assert (made.misses, made.hits) == (2, 1)
