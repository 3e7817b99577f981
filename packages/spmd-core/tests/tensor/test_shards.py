"""Shards of local devices, written block by block: padding, copies, views, what is refused."""

import pytest
import torch

import spmd_core as spmd
from spmd_core.tensor.shards import XLAShard

NUM_DEVICES = spmd.global_runtime_device_count()
needs_several = pytest.mark.skipif(NUM_DEVICES == 1, reason="one device holds the whole tensor")


@needs_several
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
)
@pytest.mark.parametrize(
    ("shape", "spec"),
    [((16, 4), ("a", "b")), ((7, 5), ("b", None)), ((7, 5), ("a", "b")), ((9,), (("b", "a"),))],
)
def test_blocks_written_are_the_tensor(mesh_2d, dtype, shape, spec):
    old, new = (
        torch.zeros(shape, dtype=dtype),
        torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(dtype),
    )
    t = spmd.mark_sharding(old.to("xla"), mesh_2d, spec)
    row = t[0]
    shards = t.local_shards
    for shard in shards:
        shard.unpadded_data = new[tuple(shard.indices)]
    assert t.load_local_shards_(shards) is t
    for shard in shards:
        shard.data.zero_()  # the device has a copy
    assert torch.equal(t.cpu(), new)
    assert torch.equal(row.cpu(), new[0])  # a view shows the new values
    assert t.partition_spec == tuple(spec)
    assert torch.equal((t.to(torch.complex64) * 2).cpu(), new.to(torch.complex64) * 2)


@needs_several
def test_a_pending_value_is_replaced(mesh_1d):
    t = spmd.mark_sharding(torch.ones(NUM_DEVICES * 2, device="xla"), mesh_1d, ("x",))
    shards = t.local_shards
    t.add_(1)
    t.load_local_shards_(shards)
    t.mul_(3)
    assert t.tolist() == [3.0] * (NUM_DEVICES * 2)


@needs_several
def test_parameters_are_loaded_without_gradients(mesh_1d):
    p = torch.nn.Parameter(
        spmd.mark_sharding(torch.ones(NUM_DEVICES, device="xla"), mesh_1d, ("x",))
    )
    shards = p.local_shards
    with pytest.raises(
        RuntimeError, match=r"got load_local_shards_ on one\. Call it under torch\.no_grad"
    ):
        p.load_local_shards_(shards)
    saved = (p * p).sum()
    with torch.no_grad():
        p.load_local_shards_(shards)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_only_a_tensor_that_is_split(mesh_1d):
    t = torch.ones(8, device="xla")
    with pytest.raises(
        spmd.errors.SpmdError, match=r"load_local_shards_ needs a tensor with a sharding"
    ):
        t.load_local_shards_([])
    spmd.mark_sharding(t, mesh_1d, ())
    with pytest.raises(spmd.errors.SpmdError, match=r"this one is replicated.*Use copy_"):
        t.load_local_shards_(t.local_shards)


@needs_several
def test_one_block_for_each_device_as_it_is_stored(mesh_1d):
    t = spmd.mark_sharding(torch.ones(NUM_DEVICES + 1, device="xla"), mesh_1d, ("x",))
    shards = t.local_shards
    with pytest.raises(
        ValueError, match=r"one shard for each local device .*CPU:0, CPU:1.*; got shards for CPU:1"
    ):
        t.load_local_shards_(shards[1:2])
    with pytest.raises(ValueError, match="got shards for none"):
        t.load_local_shards_([])
    with pytest.raises(
        ValueError,
        match=r"padding included, of shape \(2,\) and dtype torch\.float32; got shape \(1,\)",
    ):
        t.load_local_shards_(
            [XLAShard(s.data[:1], s.indices, s.shard_device, s.replica_id) for s in shards]
        )
    with pytest.raises(ValueError, match=r"and dtype torch\.float64 for CPU:0"):
        t.load_local_shards_(
            [XLAShard(s.data.double(), s.indices, s.shard_device, s.replica_id) for s in shards]
        )
    assert t.tolist() == [1.0] * (NUM_DEVICES + 1)


@pytest.mark.skipif(NUM_DEVICES != 8, reason="two copies of each block on 8 devices")
def test_copies_of_a_block_stay_copies(mesh_2d):
    t = spmd.mark_sharding(torch.full((8,), torch.nan, device="xla"), mesh_2d, ("a",))
    shards = t.local_shards
    t.load_local_shards_(shards)  # NaNs of equal bits are equal
    shards[1].data.zero_()
    with pytest.raises(
        ValueError,
        match=r"different data for CPU:0 and CPU:1, which both hold \[slice\(0, 2, None\)\]",
    ):
        t.load_local_shards_(shards)
