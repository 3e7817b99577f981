"""Tests FSDPv2, wrap policies, gradient checkpointing, and FSDPv1 in SPMD mode."""

import copy
import functools

import pytest
import torch
from torch import nn

import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.distributed import fsdp
from torch_xla.distributed.fsdp.utils import checkpoint_module
from torch_xla.distributed.fsdp.wrap import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    recursive_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)
from torch_xla.utils.checkpoint import checkpoint

text = torch_xla._XLAC._get_xla_sharding_spec
N = xr.global_runtime_device_count()
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16)

    def forward(self, x):
        return self.fc2(self.relu(self.fc1(x)))


@pytest.fixture
def mesh():
    return xs.Mesh(range(N), (N, 1), ("fsdp", "tensor"))


def on_host(net, x):
    loss = net(x).square().sum()
    loss.backward()
    return loss.item(), [parameter.grad for parameter in net.parameters()]


@pytest.mark.parametrize("how", ["by hand", "policy", "policy and checkpoint"])
def test_values_shardings_and_barriers(mesh, ids, how):
    reference = Net()
    net, x = copy.deepcopy(reference), torch.randn(16, 128)
    right, gradients = on_host(reference, x)
    if how == "by hand":
        net = net.to("xla")
        net.fc1, net.fc2 = FSDPv2(net.fc1, mesh=mesh), FSDPv2(net.fc2, mesh=mesh)
    else:
        wrapper = (
            (lambda m, *args, **kwargs: FSDPv2(checkpoint_module(m), *args, **kwargs))
            if "checkpoint" in how
            else None
        )
        net = FSDPv2(net, mesh=mesh, auto_wrap_policy=policy, auto_wrapper_callable=wrapper)
        assert type(net.fc1) is type(net.fc2) is FSDPv2 and isinstance(net.module, Net)
    data = xs.mark_sharding(x.to("xla"), mesh, ("fsdp", None))
    output = net(data)
    loss = output.square().sum()
    loss.backward()
    if N > 1:
        assert (
            text(net.fc1.module.weight)
            == text(net.fc2.module.weight)
            == f"{{devices=[1,{N}]{ids}}}"
        )
        assert text(output) == f"{{devices=[{N},1]{ids}}}"
        assert "opt-barrier" in torch_xla._XLAC._get_xla_tensors_hlo([net.fc1.module.weight.grad])
    torch_xla.sync()
    assert loss.item() == pytest.approx(right, rel=1e-4)
    for parameter, gradient in zip(net.parameters(), gradients):
        torch.testing.assert_close(parameter.grad.cpu(), gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(N != 8, reason="two slices of four devices")
def test_several_slices():
    mesh = xs.Mesh(range(8), (2, 4, 1), ("data", "fsdp", "tensor"))
    net = Net()
    net.fc1, net.fc2 = (
        FSDPv2(net.fc1, mesh=mesh, extra_data_axis="data"),
        FSDPv2(net.fc2, mesh=mesh, extra_data_axis="data"),
    )
    x = xs.mark_sharding(torch.randn(16, 128).to("xla"), mesh, (("data", "fsdp"), None))
    assert text(net(x)) == text(x) == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    assert text(net.fc1.module.weight) == "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"


def test_the_global_mesh_is_the_default(mesh):
    xs.set_global_mesh(mesh)
    assert FSDPv2(nn.Linear(8, 8)).weight.partition_spec is not None
    assert FSDPv2(nn.Linear(8, 8), mesh).weight.partition_spec is not None


def test_outputs(mesh):
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), "more"

    class Other(nn.Linear):
        def forward(self, x):
            return "text", super().forward(x)

    x = torch.randn(8, 8, device="xla")
    assert FSDPv2(Two(8, 8), mesh=mesh)(x)[0].partition_spec == ("fsdp", None)
    with pytest.raises(
        RuntimeError,
        match="by default a unit returns a tensor, a tuple or list whose first element is one",
    ):
        FSDPv2(Other(8, 8), mesh=mesh)(x)
    own = FSDPv2(
        Other(8, 8),
        mesh=mesh,
        shard_output=lambda output, m: xs.mark_sharding(output[1], m, ("fsdp", None)),
    )
    assert own(x)[1].partition_spec == ("fsdp", None)


def test_what_it_refuses(mesh):
    with pytest.raises(ValueError, match="The provided ddp axis is not in the mesh"):
        FSDPv2(nn.Linear(8, 8), mesh=mesh, extra_data_axis="ddp")
    with pytest.raises(
        ValueError, match="sharding needs a mesh; got None, and no global mesh is set"
    ):
        FSDPv2(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="the mesh needs an axis 'fsdp'"):
        FSDPv2(nn.Linear(8, 8), mesh=xs.Mesh(range(N), (N,), ("data",)))
    with pytest.raises(RuntimeError, match="a module is wrapped once"):
        FSDPv2(FSDPv2(nn.Linear(8, 8), mesh=mesh), mesh=mesh)
    with pytest.raises(RuntimeError, match="has no forward of its own"):
        FSDPv2(nn.ModuleList([nn.Linear(8, 8)]), mesh=mesh)
    with pytest.raises(ValueError, match="a wrap policy starts from modules that are not sharded"):
        FSDPv2(
            nn.Sequential(FSDPv2(nn.Linear(8, 8), mesh=mesh)), mesh=mesh, auto_wrap_policy=policy
        )


def test_policies_are_the_same_at_both_paths():
    for one in (
        always_wrap_policy,
        lambda_auto_wrap_policy,
        recursive_wrap,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    ):
        assert getattr(fsdp, one.__name__) is one
    assert fsdp.checkpoint_module is checkpoint_module


def test_the_first_fsdp_is_fully_shard():
    reference = Net()
    x = torch.randn(16, 128)
    right, gradients = on_host(copy.deepcopy(reference), x)
    net = fsdp.XlaFullyShardedDataParallel(
        reference, auto_wrap_policy=policy, flatten_parameters=False, disable_reshard_on_root=True
    )
    assert isinstance(net.fc1, fsdp.XlaFullyShardedDataParallel)
    assert net.fc1.weight.partition_spec == (None, "fsdp")
    loss = net(x.to("xla")).square().sum()
    loss.backward()
    assert loss.item() == pytest.approx(right, rel=1e-5)
    for parameter, gradient in zip(net.parameters(), gradients):
        torch.testing.assert_close(parameter.grad.cpu(), gradient, rtol=1e-3, atol=1e-3)
    norm = net.clip_grad_norm_(1.0)
    assert norm.item() == pytest.approx(torch.stack([g.norm() for g in gradients]).norm().item())


def test_the_first_fsdp_computes_in_other_dtypes():
    net = nn.BatchNorm1d(16)
    net = fsdp.XlaFullyShardedDataParallel(
        net, False, compute_dtype=torch.bfloat16, fp32_reduce_scatter=True
    )
    assert net.running_mean.dtype == torch.bfloat16 and net.weight.dtype == torch.float32
    output = net(torch.randn(16, 16, device="xla"))
    output.sum().backward()
    assert output.dtype == torch.bfloat16 and net.weight.grad.dtype == torch.float32


def test_the_first_fsdp_refuses_parts_of_a_replica():
    with pytest.raises(
        NotImplementedError,
        match=r"XlaFullyShardedDataParallel\(sharding_groups=\.\.\.\) shards one process's.*"
        r"mark_sharding\(parameter, mesh, \(\)\)",
    ):
        fsdp.XlaFullyShardedDataParallel(nn.Linear(2, 2), sharding_groups=[[0]])
    with pytest.raises(TypeError, match=r"has no argument 'compute'; got 1\. Leave it out"):
        fsdp.XlaFullyShardedDataParallel(nn.Linear(2, 2), compute=1)
    with pytest.raises(NotImplementedError, match=r"get_shard_metadata shards.*Save state_dict"):
        fsdp.XlaFullyShardedDataParallel(nn.Linear(2, 2)).get_shard_metadata()
    with pytest.raises(
        NotImplementedError, match=r"consolidate_sharded_model_checkpoints joins.*state_dict"
    ):
        fsdp.consolidate_sharded_model_checkpoints("prefix")


def test_gradient_checkpointing_replays_randomness():
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to("xla")
    x = torch.randn(4, 8, device="xla", requires_grad=True)
    torch_xla.manual_seed(3)
    plain = layer(x)
    plain.sum().backward()
    expected, x.grad = x.grad.cpu(), None
    torch_xla.manual_seed(3)
    again = checkpoint(layer, x)
    again.sum().backward()
    assert torch.equal(again.detach().cpu(), plain.detach().cpu()) and torch.allclose(
        x.grad.cpu(), expected
    )


def test_what_checkpoint_refuses():
    with pytest.raises(
        ValueError, match=r"torch_xla\.utils\.checkpoint is reentrant; got use_reentrant=False"
    ):
        checkpoint(torch.sin, torch.ones(2, device="xla"), use_reentrant=False)
    with pytest.raises(
        ValueError,
        match="checkpoint passes positional arguments to the function; got the keywords out",
    ):
        checkpoint(torch.sin, torch.ones(2, device="xla"), out=None)
