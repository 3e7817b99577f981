"""Tests `upload_sharded`: values, shards, strides; nothing is copied twice, nothing is shared."""

import pytest
import torch

import spmd_core as spmd
from spmd_core.marks.upload import upload_sharded
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@pytest.mark.parametrize(
    "host",
    [
        torch.arange(48.0).reshape(16, 3),
        torch.arange(48).reshape(3, 16).t(),  # in another order
        torch.arange(96.0).reshape(16, 6)[:, ::2],  # with gaps
        torch.arange(15.0).reshape(5, 3),  # uneven
        torch.arange(960.0).reshape(16, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(0, 3),
        torch.tensor(2.0),
        torch.arange(48).reshape(16, 3).to(torch.bfloat16),
        torch.complex(torch.ones(16, 3), torch.ones(16, 3)).conj(),
    ],
)
@pytest.mark.parametrize("entries", [("a", "b"), (("a", "b"),), (None, "a"), ()])
def test_values_shards_and_strides(host, entries, mesh_2d):
    entries = entries[: host.ndim]
    x = upload_sharded(host, spmd.ShardingSpec(mesh_2d, entries))
    as_before = spmd.mark_sharding(host.to("xla"), mesh_2d, entries)
    assert isinstance(x, XLAShardedTensor) and torch.equal(x.cpu(), host)
    assert x.dtype == host.dtype and x.stride() == as_before.stride()
    assert x.sharding == as_before.sharding
    for ours, theirs in zip(x.local_shards, as_before.local_shards):
        assert ours.indices == theirs.indices
        assert torch.equal(ours.data, theirs.data)


def test_the_memory_is_the_callers_again(mesh_1d):
    host = torch.zeros(16, 64)
    x = upload_sharded(host, spmd.ShardingSpec(mesh_1d, ("x", None)))
    host.fill_(1.0)
    assert x.sum().item() == 0.0
    x.add_(2.0)
    assert x.sum().item() == 2048.0 and host.sum().item() == 1024.0


def test_the_upload_counts_once_and_the_tensor_is_like_any_other(mesh_1d):
    before = spmd.metrics.counter("uploaded_bytes")
    x = upload_sharded(torch.ones(16, 64), spmd.ShardingSpec(mesh_1d, ("x", None)))
    assert spmd.metrics.counter("uploaded_bytes") - before == 4096
    x.requires_grad_()
    (x * 3.0).sum().backward()
    assert x.grad.sum().item() == 3072.0 and x.grad.sharding == x.sharding
    assert spmd.metrics.counter("uploaded_bytes") - before <= 4096 + 64


def test_a_tensor_on_the_device_is_copied_and_marked(mesh_1d):
    x = torch.ones(16, device="xla")
    y = upload_sharded(x, spmd.ShardingSpec(mesh_1d, ("x",)))
    assert y.sharding == Sharding.of(mesh_1d, ("x",), 1) and y.sum().item() == 16.0


def test_errors_are_those_of_a_mark(mesh_1d):
    with pytest.raises(spmd.errors.PartitionSpecError):
        upload_sharded(torch.ones(4), spmd.ShardingSpec(mesh_1d, (None, "x")))
    num = spmd.global_runtime_device_count()
    elsewhere = spmd.Mesh(range(num, 2 * num), (num,), ("x",))
    with pytest.raises(spmd.errors.MeshError):
        upload_sharded(torch.ones(4), spmd.ShardingSpec(elsewhere, ("x",)))
