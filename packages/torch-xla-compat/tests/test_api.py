"""Tests torch_xla.distributed.spmd.api: DTensor's functions on an xla mesh."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    parallel,
)

import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

N = xr.global_runtime_device_count()


@pytest.fixture
def mesh():
    return DeviceMesh("xla", list(range(N)))


def test_a_mesh_of_torch(mesh):
    converted = xs.convert_to_xla_mesh(init_device_mesh("xla", (1, N), mesh_dim_names=("a", "b")))
    assert (
        type(converted) is xs.Mesh
        and converted.mesh_shape == (1, N)
        and converted.axis_names == ("a", "b")
    )
    assert xs.convert_to_xla_mesh(mesh).device_ids.tolist() == list(range(N))
    with pytest.raises(AssertionError, match="a mesh of device type 'xla' is needed; got str"):
        xs.convert_to_xla_mesh("cpu")


def test_placements_as_a_spec():
    t = torch.ones(4, 4, 4)
    assert xs.convert_to_xla_partition_spec(t, [Shard(0), Shard(2)]) == (0, None, 1)
    assert xs.convert_to_xla_partition_spec(t, [Replicate()]) == (None, None, None)
    assert xs.convert_to_xla_partition_spec(t, [Shard(1), Shard(1)]) == (None, (0, 1), None)
    with pytest.raises(ValueError, match=r"Unsupported placement type: .*Partial"):
        xs.convert_to_xla_partition_spec(t, [Partial()])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("distribute", [xs.xla_distribute_tensor, distribute_tensor])
def test_a_tensor_distributed(mesh, distribute, requires_grad):
    given = torch.randn(3 * N, 3, requires_grad=requires_grad)
    t = distribute(given, mesh, [Shard(0)])
    assert (
        type(t).__name__ == "XLAShardedTensor"
        and t.shape == (3 * N, 3)
        and t.is_leaf
        and t.requires_grad is requires_grad
    )
    assert t.local_shards[0].data.shape == (3, 3) and torch.equal(t.detach().cpu(), given.detach())
    assert distribute(torch.ones(4), mesh).sharding_spec == "{replicated}"


@pytest.mark.skipif(N == 1, reason="one device has nothing to split")
def test_what_distributing_a_tensor_refuses(mesh):
    with pytest.raises(
        AssertionError,
        match="placements must have one entry for each dimension of the mesh, 1; got 2",
    ):
        xs.xla_distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    with pytest.raises(AssertionError, match="a mesh of device type 'xla' is needed"):
        xs.xla_distribute_tensor(torch.ones(4), "cpu")
    with pytest.raises(AssertionError, match="distribute_tensor marks a tensor once"):
        xs.xla_distribute_tensor(
            xs.xla_distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]), mesh, [Shard(1)]
        )
    with pytest.raises(ValueError, match="sharded or replicated along each axis; got Partial"):
        xs.xla_distribute_tensor(torch.ones(4), mesh, [Partial()])

    class FromElsewhere(torch.Tensor):
        _local_tensor, device_mesh = None, "mesh"

    with pytest.raises(ValueError, match="distribute_tensor takes a plain tensor; got a DTensor"):
        xs.xla_distribute_tensor(torch.ones(4).as_subclass(FromElsewhere), mesh)


@pytest.mark.parametrize("distribute", [xs.xla_distribute_module, distribute_module])
def test_a_module_distributed(mesh, distribute):
    def shard(name, module, device_mesh):
        if isinstance(module, torch.nn.Linear):
            for key, parameter in module.named_parameters(recurse=False):
                module.register_parameter(
                    key,
                    torch.nn.Parameter(
                        distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
                    ),
                )

    seen = []
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    x = torch.randn(4, 8)
    right = net(x).detach()
    result = distribute(
        net,
        mesh,
        shard,
        lambda m, inputs, dm: seen.append("in"),
        lambda m, outputs, dm: seen.append("out"),
    )
    assert (
        result is net
        and net[0].weight.placements == (Shard(0),)
        and net[1].weight.sharding_spec == "{replicated}"
    )
    torch.testing.assert_close(net(x.to("xla")).detach().cpu(), right, rtol=1e-4, atol=1e-5)
    assert seen == ["in", "out"]


def test_what_distributing_a_module_refuses(mesh):
    with pytest.raises(ValueError, match="input_fn takes three arguments"):
        xs.xla_distribute_module(torch.nn.Linear(2, 2), mesh, None, lambda: None)
    with pytest.warns(FutureWarning, match="two arguments are deprecated"):
        xs.xla_distribute_module(torch.nn.Linear(2, 2), mesh, None, lambda inputs, mesh: None)


def test_torchs_tensor_parallelism(mesh):
    right = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    plan = {
        "0": parallel.ColwiseParallel(output_layouts=Shard(0)),
        "1": parallel.SequenceParallel(sequence_dim=0),
        "2": parallel.RowwiseParallel(input_layouts=Shard(0)),
    }
    x = torch.randn(16, 8)
    ours = parallel.parallelize_module(copy.deepcopy(right), mesh, plan)
    torch.testing.assert_close(ours(x.to("xla")).detach().cpu(), right(x).detach())
    whole = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    assert (whole @ whole).full_tensor().tolist() == [[8.0] * 8] * 8
