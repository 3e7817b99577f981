"""torch's own data parallelism on modules of the device: it works, or its message's line does."""

import contextlib
import copy
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.amp import GradScaler
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import spmd_core as spmd
from spmd_core import releases
from spmd_core.modules import fsdp_methods, torch_data_parallel
from spmd_core.modules.fully_shard import SpmdFullyShardedDataParallel
from spmd_core.runtime.processes import get_1d_mesh

with warnings.catch_warnings():
    # Its package compiles functions by torch.jit.script, which warns.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.second(self.first(x).relu())


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(16, 16)


def net(device="xla"):
    torch.manual_seed(0)
    return Net().to(device)


def train(model, x):
    """Two accumulated backwards, a step, and the parameters on the CPU."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for part in x.chunk(2):
        if isinstance(next(model.parameters()), spmd.XLAShardedTensor):
            part = part.to("xla")
        model(part).square().mean().backward()
    optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def check(model, x):
    for found, expected in zip(train(model, x), train(net("cpu"), x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def specs(model):
    return [p.partition_spec for p in model.parameters()]


# --- fully_shard ----------------------------------------------------------------------------------


@pytest.mark.one_device
@pytest.mark.parametrize("device", ["xla", "cpu"])
def test_fully_shard_without_a_mesh_is_this_projects(x, device):
    model = net(device)
    for block in (model.first, model.second):
        assert fully_shard(block) is block
    assert fully_shard(model) is model
    assert next(model.parameters()).device.type == "xla"
    assert specs(model)[0] == ("fsdp", None)
    assert not any(name.startswith("_composable") for name in vars(model))
    check(model, x)


def test_fully_shard_takes_the_global_mesh(x, mesh_2d, num_devices):
    named = spmd.Mesh(range(num_devices), mesh_2d.mesh_shape, ("fsdp", "tensor"))
    spmd.set_global_mesh(named)
    model = fully_shard(net())
    assert model.first.weight.sharding.mesh == named and specs(model)[0] == ("fsdp", None)
    check(model, x)
    spmd.set_global_mesh(spmd.Mesh(range(num_devices), (num_devices,)))
    assert fully_shard(net()).first.weight.sharding is not None
    spmd.set_global_mesh(spmd.Mesh(range(num_devices), mesh_2d.mesh_shape, ("a", "b")))
    with pytest.raises(
        spmd.errors.MeshError, match=r"Name one of its axes 'fsdp', or pass a slice of"
    ):
        fully_shard(net())
    # Both pieces of advice.
    mesh = spmd.dtensor.to_device_mesh(spmd.get_global_mesh())
    check(fully_shard(net(), mesh=mesh["b"]), x)


def test_fully_shard_over_device_meshes(x, num_devices):
    mesh = spmd.dtensor.init_device_mesh("xla", (num_devices,), mesh_dim_names=("dp",))
    check(fully_shard(net(), mesh=mesh), x)
    hybrid = spmd.dtensor.init_device_mesh("xla", (2, num_devices // 2), mesh_dim_names=("r", "s"))
    model = fully_shard(net("cpu"), mesh=hybrid, reshard_after_forward=False)
    assert specs(model)[0] == ("s", None)
    check(model, x)


def test_fully_shard_has_torchs_arguments(x):
    model = net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(
        [model.first, model.second], offload_policy=OffloadPolicy(),
        ignored_params={model.second.bias},
    )  # fmt: skip
    assert specs(model) == [("fsdp", None), ("fsdp",), (None, "fsdp"), (None,)]
    check(model, x)
    assert fully_shard(net(), mp_policy=policy)(x.to("xla")).dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_placement_fn": lambda p: Shard(1)}, r"spmd\.mark_sharding\(parameter, mesh"),
        ({"offload_policy": CPUOffloadPolicy()}, r"Leave it out.*save_on_host\(\)"),
        ({"reshard_after_forward": 2}, r"got reshard_after_forward=2\. Pass True, or False"),
    ],
)
def test_arguments_without_a_meaning_are_refused_and_lose_nothing(options, message, x):
    model = net()
    with pytest.raises(spmd.errors.UnsupportedOpError, match=message):
        fully_shard(model, **options)
    check(fully_shard(model), x)


def test_a_parameter_marked_before_keeps_its_mark(x, num_devices):
    model, mesh = net(), spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    spmd.mark_sharding(model.first.weight, mesh, (None, "fsdp"))
    check(fully_shard(model), x)
    assert specs(model)[0] == (None, "fsdp")


def test_fully_shard_twice_and_outside_of_spmd_mode(monkeypatch):
    model = fully_shard(net())
    with pytest.raises(spmd.errors.WrapError, match="a module is sharded once"):
        fully_shard(model)
    monkeypatch.setattr(spmd.runtime.devices._state, "spmd", False)
    with pytest.raises(spmd.errors.NotInSpmdModeError, match=r"Call spmd\.use_spmd"):
        fully_shard(net())


@contextlib.contextmanager
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_modules_of_the_cpu_stay_torchs(x):
    with one_process():
        model = fully_shard(net("cpu"))
        assert isinstance(model, FSDPModule) and fully_shard.state(model) is not None
        assert DDP(net("cpu"))(x).device.type == "cpu"
        # A module of the device is this project's, with a process group, too.
        assert fully_shard(net()).first.weight.partition_spec == ("fsdp", None)
        with pytest.raises(spmd.errors.WrapError, match="got DistributedDataParallel"):
            DDP(net())
    assert nn.DataParallel(net("cpu"))(x).shape == (16, 8)


# --- FSDPModule's methods -------------------------------------------------------------------------


def test_every_method_of_torchs_module_is_there():
    public = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert public <= set(fsdp_methods.NAMES)


def test_methods_that_say_when_to_communicate_change_no_value(x):
    model = net()
    blocks = [spmd_shard(model.first), spmd_shard(model.second)]
    spmd_shard(model)
    model.set_requires_gradient_sync(False)
    model.set_requires_all_reduce(False, recurse=False)
    model.set_reshard_after_backward(False)
    model.set_is_last_backward(False)
    model.set_unshard_in_backward(True)
    model.set_modules_to_forward_prefetch(blocks)
    model.set_modules_to_backward_prefetch(blocks)
    model.set_gradient_divide_factor(1.0)
    model.set_reduce_scatter_divide_factor(1)
    model.set_reduce_scatter_unused_params(False)
    model.set_post_optim_event(None)
    model.reset_iter_state()
    model.set_keep_unsharded_storage(True)
    model.set_manual_backward_finalization(True)
    assert model.finalize_backward() is None
    model.finalize_backward(async_op=True).wait()
    assert model.unshard() is None and model.unshard(async_op=True).wait() is None
    model.reshard()
    with model.no_sync():
        model.set_requires_gradient_sync(True)
    check(model, x)
    check(copy.deepcopy(spmd_shard(net())), x)


def spmd_shard(module):
    count = spmd.global_runtime_device_count()
    return spmd.fully_shard(module, spmd.Mesh(range(count), (count,), ("fsdp",)))


def test_resharding_is_set_for_all_units():
    model = net()
    for block in (model.first, model.second, model):
        fully_shard(block)
    model.set_reshard_after_forward(False, recurse=False)
    assert [m.forward.reshard_after_forward for m in (model, model.first)] == [False, True]
    model.set_reshard_after_forward(False)
    assert not model.first.forward.reshard_after_forward
    wrapped = SpmdFullyShardedDataParallel(net(), get_1d_mesh("fsdp"))
    wrapped.set_reshard_after_forward(False)
    assert not wrapped.module.forward.reshard_after_forward


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("set_gradient_divide_factor", (4.0,), r"Divide the loss: \(loss / 4\.0\)\.backward\(\)"),
        ("set_reduce_scatter_divide_factor", (2,), r"Divide the loss: \(loss / 2\)"),
        ("set_reduce_scatter_unused_params", (True,), "zeros_like"),
        ("set_all_reduce_hook", (print,), "register_post_accumulate_grad_hook"),
        ("set_custom_all_gather", (None,), "compiler_options"),
        ("set_custom_reduce_scatter", (None,), "compiler_options"),
        ("set_separate_reduce_scatter_group", (), "compiler_options"),
        ("set_symm_mem_for_comm", (), "compiler_options"),
    ],
)
def test_methods_that_would_change_values_are_refused(name, args, message):
    model = fully_shard(net())
    with pytest.raises(spmd.errors.UnsupportedOpError, match=message):
        getattr(model, name)(*args)


def test_arguments_of_methods():
    model = fully_shard(net())
    for name in ("set_requires_gradient_sync", "set_reshard_after_forward", "set_is_last_backward"):
        with pytest.raises(TypeError, match=rf"{name} takes True or False; got 2\. Write {name}"):
            getattr(model, name)(2)
    with pytest.raises(
        spmd.errors.WrapError, match=r"got a Linear that is none\. Call fully_shard"
    ):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])


# --- Wrappers -------------------------------------------------------------------------------------

REFUSED = {
    "DDP": (lambda m: DDP(m), "mark_sharding(x, mesh, ('data',))"),
    "replicate": (lambda m: replicate(m), "mark_sharding(x, mesh, ('data',))"),
    "replicate with fsdp": (lambda m: replicate_with_fsdp(m), "Use the model as it is"),
    "no shards": (
        lambda m: FSDP(m, sharding_strategy=ShardingStrategy.NO_SHARD),
        "Use the model as it is",
    ),
    "stage": (
        lambda m: PipelineStage(m, 0, 2, torch.device("xla")),
        "Write spmd.pipeline(model, mesh, num_microbatches=8)",
    ),
    "pipeline": (
        lambda m: pipeline(m, (torch.ones(2, 16),), split_spec={"second": SplitPoint.BEGINNING}),
        "Write spmd.pipeline(model, mesh, num_microbatches=8)",
    ),
    "zero": (
        lambda m: ZeroRedundancyOptimizer(m.parameters(), torch.optim.SGD, lr=0.1),
        "use the optimizer itself: torch.optim.AdamW(model.parameters())",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrappers_are_refused_with_the_line_to_write(name, x):
    wrap, advice = REFUSED[name]
    model = net()
    with pytest.raises(spmd.errors.WrapError, match=re.escape(advice)) as caught:
        wrap(model)
    assert "in SPMD mode one program drives all devices" in str(caught.value)
    check(model, x)  # nothing was changed


def test_what_the_refusals_advise(x, num_devices):
    hybrid = spmd.Mesh(range(num_devices), (2, num_devices // 2), ("data", "fsdp"))
    check(spmd.fully_shard(net(), hybrid, extra_data_axis="data"), x)
    mesh, model = get_1d_mesh("data"), net()
    expected = net("cpu")
    expected(x).square().mean().backward()
    split = spmd.mark_sharding(x.to("xla"), mesh, ("data",))
    model(split).square().mean().backward()
    torch.testing.assert_close(model.first.weight.grad.cpu(), expected.first.weight.grad)


def test_data_parallel_calls_the_module_and_says_so(x):
    with pytest.warns(UserWarning, match=r"calls a module of device 'xla' as it is\. Use the mod"):
        model = nn.DataParallel(net())
    torch.testing.assert_close(model(x.to("xla")).cpu(), net("cpu")(x), rtol=1e-5, atol=1e-6)


# --- Neighbours that work -------------------------------------------------------------------------


def test_functions_without_a_mesh_take_the_global_one(num_devices):
    with pytest.raises(
        spmd.errors.MeshError, match=r"without a mesh needs a mesh.*set_global_mesh"
    ):
        parallelize_module(net(), None, {"first": ColwiseParallel()})
    spmd.set_global_mesh(get_1d_mesh("tensor"))
    model = parallelize_module(net(), None, {"first": ColwiseParallel()})
    assert model.first.weight.partition_spec == ("tensor", None)
    assert distribute_tensor(torch.ones(16), None, [Shard(0)]).partition_spec == ("tensor",)


def test_synchronised_statistics_are_those_of_the_whole_batch(x):
    def run(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if device == "xla" else model
        model.to(device)(x.to(device)).square().sum().backward()
        return model[1].running_mean.cpu(), model[0].weight.grad.cpu()

    for found, expected in zip(run("xla"), run("cpu")):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overflows", [False, True])
def test_a_gradient_scaler(x, overflows):
    def run(device):
        model, scaler = net(device), GradScaler(device, init_scale=4.0, growth_interval=1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = model(x.to(device)).square().mean() * (torch.inf if overflows else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return torch.tensor(scaler.get_scale()), model.first.weight.detach().cpu()

    for found, expected in zip(run("xla"), run("cpu")):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_distributed_checkpoints(tmp_path, x):
    model = fully_shard(net())
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "now")
    with one_process():
        dcp.async_save(model.state_dict(), checkpoint_id=tmp_path / "later").result()
    for name in ("now", "later"):
        other = fully_shard(Net())
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / name)
        assert specs(other)[0] == ("fsdp", None)
        check(other, x)


def test_a_function_that_contract_no_longer_decorates_is_left_alone_and_listed(monkeypatch):
    monkeypatch.setattr(releases, "_absent", {})

    def plain(module):
        return module

    torch_data_parallel._replace_in_contract(plain, print)
    assert plain(1) == 1
    (text,) = spmd.debugging.versions().absent.values()
    assert "torch's own fully_shard and replicate run" in text
