"""torch's DTensor functions on meshes of device type xla."""

import importlib.util
import subprocess
import sys

import pytest
import torch
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import spmd_core as spmd


@pytest.fixture
def mesh(num_devices):
    return init_device_mesh("xla", (num_devices,), mesh_dim_names=("x",))


@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "rand", "randn", "full"])
def test_factories_create_in_shards(mesh, name):
    args = ((16, 4), 3.0) if name == "full" else (16, 4)
    torch.manual_seed(3)
    made = getattr(dt, name)(
        *args, dtype=torch.float64, requires_grad=True, device_mesh=mesh, placements=[Shard(0)]
    )
    assert isinstance(made, spmd.XLAShardedTensor) and made.placements == (Shard(0),)
    assert made.requires_grad and made.is_leaf and made.dtype == torch.float64
    if name != "empty":
        torch.manual_seed(3)
        expected = getattr(torch, name)(*args, dtype=torch.float64, device="xla")
        torch.testing.assert_close(made.detach().cpu(), expected.cpu())
    with mesh:
        assert dt.ones(2, 2).placements == (Replicate(),)


def test_a_factory_checks_its_placements(mesh):
    with pytest.raises(ValueError, match="one placement for each dimension of the mesh"):
        dt.zeros(4, device_mesh=mesh, placements=[Shard(0), Shard(0)])


def test_from_local_of_blocks_and_of_whole_tensors(mesh, num_devices):
    whole = torch.arange(4.0 * num_devices).reshape(num_devices, 4)
    split = dt.distribute_tensor(whole, mesh, [Shard(0)])
    back = DTensor.from_local(split.to_local(), mesh, [Shard(0)], shape=whole.shape)
    assert back.placements == (Shard(0),) and torch.equal(back.full_tensor().cpu(), whole)
    total = DTensor.from_local(split.to_local(), mesh, [Partial()])
    torch.testing.assert_close(total.cpu(), whole.sum(0, keepdim=True))
    x = whole.clone().requires_grad_()
    same = DTensor.from_local(x, mesh, run_check=False)
    assert same.placements == (Replicate(),)
    same.redistribute(mesh, [Shard(0)]).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    with pytest.raises(spmd.errors.ShardError, match=r"got shape=\(3, 4\)\. Leave shape out"):
        DTensor.from_local(split.to_local(), mesh, [Shard(0)], shape=(3, 4))


def test_from_local_of_a_part_of_a_process(mesh, num_devices):
    whole = torch.randn(num_devices, 4)
    if num_devices == 1:
        assert torch.equal(DTensor.from_local(whole, mesh, [Shard(0)]).cpu(), whole)
        return
    message = rf"a process here drives {num_devices} devices; got one tensor of shape"
    with pytest.raises(spmd.errors.ShardError, match=message) as caught:
        DTensor.from_local(whole, mesh, [Shard(0)])
    # Both pieces of advice.
    assert "distribute_tensor(tensor, mesh, placements)" in str(caught.value)
    assert torch.equal(dt.distribute_tensor(whole, mesh, [Shard(0)]).cpu(), whole)
    over = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    spec = spmd.ShardingSpec(over, ("x",), minibatch=True)
    assert torch.equal(spmd.from_process_local(whole, spec).cpu(), whole)


def test_methods_that_are_called_as_functions_of_the_class(mesh):
    t = dt.ones(8, 4, device_mesh=mesh, placements=[Shard(0)])
    assert DTensor.redistribute(t, mesh, [Replicate()]).placements == (Replicate(),)
    assert DTensor.full_tensor(t).shape == (8, 4)
    assert DTensor.to_local(t).shape == t.to_local().shape


def test_a_factory_without_a_mesh_takes_the_global_one(mesh):
    with pytest.raises(spmd.errors.MeshError, match=r"got None, and no global mesh is set\. Pass"):
        dt.zeros(4, 4)
    spmd.set_global_mesh(spmd.Mesh(range(mesh.size()), (mesh.size(),), ("x",)))
    assert dt.zeros(4, 4).placements == (Replicate(),)


def test_without_the_alias_package_torchs_functions_call_ours(mesh, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch_xla" else find(name)
    )
    assert dt.distribute_tensor(torch.ones(16, 4), mesh, [Shard(0)]).placements == (Shard(0),)
    module = dt.distribute_module(nn.Linear(4, 4), mesh)
    assert module.weight.placements == (Replicate(),)


@pytest.mark.slow
def test_names_that_were_imported_first_are_changed_too():
    program = """
from torch.distributed._tensor import DTensor, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import parallelize_module
import inspect, torch
import spmd_core as spmd
spmd.simulate(2), spmd.use_spmd()
mesh = spmd.dtensor.init_device_mesh("xla", (2,))
assert zeros(4, device_mesh=mesh, placements=[Shard(0)]).placements == (Shard(0),)
assert distribute_tensor(torch.ones(4), mesh, [Shard(0)]).partition_spec == (0,)
assert not isinstance(distribute_tensor(torch.ones(4), mesh, [Shard(0)]), DTensor)
assert "device_mesh" in inspect.signature(parallelize_module).parameters
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
