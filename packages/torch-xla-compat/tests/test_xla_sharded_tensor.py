"""Tests XLAShard and XLAShardedTensor."""

import math

import pytest
import torch
from torch.distributed.tensor import DeviceMesh, Partial, Replicate, Shard

import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

N = xr.global_runtime_device_count()
several = pytest.mark.skipif(N == 1, reason="one device has nothing to split")


def sharded(size, spec=(0,)):
    return xs.mark_sharding(torch.arange(float(size)).to("xla"), xs.Mesh(range(N), (N,)), spec)


@several
@pytest.mark.parametrize("size", [N, N + 1])
def test_shards_of_a_split_tensor(size):
    shards = sharded(size).local_shards
    block = math.ceil(size / N)
    assert len(shards) == N
    for i, shard in enumerate(shards):
        start, stop = min(i * block, size), min((i + 1) * block, size)
        assert isinstance(shard.indices, list) and shard.indices == [slice(start, stop, 1)]
        assert (
            shard.data.device.type == "cpu"
            and shard.data.shape == (block,)
            and shard.replica_id == 0
            and shard.shard_device == f"CPU:{i}"
        )
        assert torch.equal(shard.unpadded_data, torch.arange(float(size))[start:stop])


def test_shards_of_a_replicated_tensor():
    for i, shard in enumerate(sharded(5, (None,)).local_shards):
        assert (
            shard.indices is ...
            and shard.replica_id == i
            and torch.equal(shard.unpadded_data, torch.arange(5.0))
            and shard.data.shape == (5,)
        )


@pytest.mark.skipif(N < 4, reason="a mesh of 2 x 2 at least")
def test_shards_of_a_partly_replicated_tensor():
    mesh = xs.Mesh(range(N), (2, N // 2))
    shards = xs.mark_sharding(torch.randn(4, 4).to("xla"), mesh, (0, None)).local_shards
    assert [shard.replica_id for shard in shards] == [i % (N // 2) for i in range(N)]
    assert torch.equal(shards[0].data, shards[1].data) and not torch.equal(
        shards[0].data, shards[-1].data
    )


@several
def test_loading_shards():
    t = sharded(N)
    shards = t.local_shards
    for shard in shards:
        shard.unpadded_data = shard.unpadded_data * 10
    assert t.load_local_shards_(shards) is t or t.load_local_shards_(shards) is None
    assert torch.equal(t.cpu(), torch.arange(float(N)) * 10)


@several
def test_what_loading_shards_refuses():
    t = sharded(N + 1)
    shards = t.local_shards
    with pytest.raises(RuntimeError, match="needs one shard for each local device"):
        t.load_local_shards_(shards[:-1])
    with pytest.raises(RuntimeError, match="the block as stored, padding included"):
        t.load_local_shards_(
            [
                xs.XLAShard(s.unpadded_data[:1], s.indices, s.shard_device, s.replica_id)
                for s in shards
            ]
        )
    whole = sharded(4, (None,))
    with pytest.raises(RuntimeError, match="Use copy_ with the whole tensor"):
        whole.load_local_shards_(whole.local_shards)
    plain = torch.ones(4).to("xla")
    with pytest.raises(RuntimeError, match="load_local_shards_ needs a tensor with a sharding"):
        plain.load_local_shards_(shards)
    with pytest.raises(RuntimeError, match="local_shards needs a tensor with a sharding"):
        _ = plain.local_shards


def test_what_a_tensor_says(row, ids):
    t = torch.randn(10, 20).to("xla")
    assert torch_xla._XLAC._get_xla_sharding_type(t) is None and t.sharding_spec == ""
    with pytest.raises(ValueError, match="sharding_type needs a tensor with a sharding"):
        _ = t.sharding_type
    marked = xs.mark_sharding(t, row, (0, 1))
    assert marked.sharding_type == (xs.ShardingType.TILED if N > 1 else xs.ShardingType.REPLICATED)
    assert marked.sharding_spec == (f"{{devices=[1,{N}]{ids}}}" if N > 1 else "{replicated}")
    assert str(marked).startswith("XLAShardedTensor(tensor(") and str(
        torch.ones(2).to("xla")
    ).startswith("tensor(")
    assert marked.global_tensor.shape == (10, 20) and isinstance(t + 1, xs.XLAShardedTensor)


@several
def test_what_a_result_says(row, ids):
    t = xs.mark_sharding(torch.ones(8, 2 * N).to("xla"), row, (0, 1))
    result = t + 1
    assert isinstance(result, xs.XLAShardedTensor) and isinstance(result.sum(), xs.XLAShardedTensor)
    assert result.mesh_shape is result.partition_spec is None and result.sharding_spec == ""
    with pytest.raises(ValueError, match="sharding_type needs a tensor with a sharding"):
        _ = result.sharding_type
    with pytest.raises(ValueError, match="placements needs a tensor with a sharding"):
        _ = result.placements
    torch_xla.sync()
    assert result.sharding_spec == f"{{devices=[1,{N}]{ids}}}"
    assert result.sharding_type is xs.ShardingType.TILED and result.global_tensor is result
    assert str(result).startswith("XLAShardedTensor(tensor([[2., 2.,")
    assert str(result).endswith(f", device='xla:0'), sharding='{{devices=[1,{N}]{ids}}}')")
    assert str(result.sum()).startswith("tensor(")


def test_a_scalar(row):
    t = xs.mark_sharding(torch.tensor(1.0).to("xla"), row, ())
    assert t.sharding_type is xs.ShardingType.REPLICATED and t.sharding_spec == "{replicated}"
    assert [(s.data.item(), s.indices, s.replica_id) for s in t.local_shards] == [
        (1.0, ..., i) for i in range(N)
    ]


def test_the_constructor():
    t = xs.XLAShardedTensor(torch.arange(float(N)), (N,), (0,), True)
    assert t.requires_grad and t.is_leaf and t.partition_spec == (0,) and t.mesh_shape == (N,)
    assert torch.equal(t.detach().cpu(), torch.arange(float(N)))


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_the_spec_of_torchs_dtensor(placement):
    mesh = DeviceMesh("xla", list(range(N)))
    t = xs.xla_distribute_tensor(torch.randn(8, 50), mesh, [placement])
    spec = t._spec
    assert (
        spec.mesh.device_type == "xla"
        and spec.mesh.shape == mesh.shape
        and spec.placements == t.placements == (placement,)
    )
    assert (
        spec.tensor_meta.shape == (8, 50)
        and spec.tensor_meta.dtype == torch.float32
        and t._spec is spec
    )
    t.invalidate_spec_cache()
    assert t._spec is not spec and t._spec == spec
    assert (t + 1)._spec is not None


@several
def test_redistribute():
    mesh = DeviceMesh("xla", list(range(N)))
    t = xs.xla_distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    moved = t.redistribute(mesh, [Shard(1)], async_op=True)
    assert moved.placements == (Shard(1),) and torch.equal(moved.cpu(), t.cpu())
    with pytest.raises(
        ValueError, match="there must be one placement for each dimension of the mesh"
    ):
        t.redistribute(mesh, [Shard(0), Shard(1)])
    with pytest.raises(NotImplementedError, match=r"Use Shard\(dim\) or Replicate\(\)"):
        t.redistribute(mesh, [Partial()])
    with pytest.raises(IndexError, match="Shard names a dim of the tensor; got dim 2"):
        t.redistribute(mesh, [Shard(2)])


def test_gradients_are_plain_attributes():
    t = xs.XLAShardedTensor(torch.ones(4), requires_grad=True)
    (t * 3).sum().backward()
    assert t.grad.tolist() == [3.0] * 4
