"""torch's FSDP1 on meshes of device type xla."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

import spmd_core as spmd
from spmd_core.modules.fsdp_unit import unit_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.second(self.first(x).relu())


def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def mesh(num_devices):
    return init_device_mesh("xla", (num_devices,))


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(16, 16)


def units(model):
    return [name for name, m in model.named_modules() if unit_of(m) is not None]


def train(model, x):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x).square().mean().backward()
    optimizer.step()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def check(model, x):
    expected = train(net(), x)
    found = train(model, x.to("xla"))
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_shards(x, num_devices, strategy):
    mesh_2d = init_device_mesh("xla", (min(2, num_devices), num_devices // min(2, num_devices)))
    model = FSDP(net(), device_mesh=mesh_2d, sharding_strategy=ShardingStrategy[strategy])
    assert model.first.weight.partition_spec == (1, None)
    assert unit_of(model).reshard_after_forward == (strategy == "HYBRID_SHARD")
    check(model, x)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, [""]),
        (ModuleWrapPolicy({nn.Linear}), ["", "first", "second"]),
        (CustomPolicy(lambda m: isinstance(m, nn.Linear) and m.in_features == 16), ["", "first"]),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=300), ["", "first"]),
    ],
)
def test_policies_choose_the_units(x, mesh, policy, expected):
    model = FSDP(
        net(),
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=True,
        device_id=0,
        sync_module_states=True,
        device_mesh=mesh,
    )
    assert sorted(units(model)) == expected
    assert not unit_of(model).reshard_after_forward
    check(model, x)


def test_without_a_mesh_and_with_ignored_parameters(x):
    model = net()
    model = FSDP(model, ignored_states=[model.second.bias])
    assert model.second.bias.sharding.is_replicated
    check(FSDP(net(), ignored_modules=[]), x)
    check(model, x)
    assert unit_of(copy.deepcopy(model)) is not None


def test_mixed_precision(x, mesh):
    seen = []
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    inner = net()
    inner.second.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    model = FSDP(
        inner, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=mixed,
        device_mesh=mesh,
    )  # fmt: skip
    assert unit_of(model).precision.cast_forward_inputs
    assert not unit_of(model.first).precision.cast_forward_inputs
    output = model(x.to("xla"))
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16 and seen == [torch.bfloat16]
    assert model.first.weight.grad.dtype == torch.float32
    torch.testing.assert_close(output.float().cpu(), net()(x), rtol=0.05, atol=0.05)


def test_methods(x, mesh):
    model = FSDP(net(), device_mesh=mesh)
    with model.no_sync():
        model(x.to("xla")).sum().backward()
    expected = net()
    expected(x).sum().backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
    torch.testing.assert_close(model.clip_grad_norm_(0.5).cpu(), norm)
    torch.testing.assert_close(model.first.weight.grad.cpu(), expected.first.weight.grad)
    assert model.module is model
    with FSDP.summon_full_params(model), torch.no_grad():
        model.first.bias.zero_()
    assert not model.first.bias.any()
    with pytest.raises(spmd.errors.UnsupportedOpError, match="register_post_accumulate_grad_hook"):
        model.register_comm_hook(None, print)
    with (
        pytest.raises(spmd.errors.UnsupportedOpError, match=r"parameter\.detach\(\)\.cpu\(\)"),
        FSDP.summon_full_params(model, writeback=False),
    ):
        pass


def test_the_units_of_a_model_are_listed(mesh):
    model = nn.Sequential(net(), net())
    for each in model:
        FSDP(each, device_mesh=mesh)
    assert not isinstance(model[0], FSDP) and hasattr(model[0], "set_reshard_after_forward")
    assert FSDP.fsdp_modules(model) == [*model] == FSDP.fsdp_modules(model, root_only=True)
    whole = FSDP(model, device_mesh=mesh)
    assert FSDP.fsdp_modules(whole) == [whole, *model]
    assert FSDP.fsdp_modules(whole, root_only=True) == [whole]


def test_state_dict_types(mesh):
    model, expected = FSDP(net(), device_mesh=mesh), net().state_dict()
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)
    ):
        assert FSDP.get_state_dict_type(model).state_dict_config.offload_to_cpu
        full = model.state_dict()
    assert all(type(full[name]) is torch.Tensor for name in expected)
    torch.testing.assert_close(dict(full), dict(expected))
    assert not FSDP.get_state_dict_type(model).state_dict_config.offload_to_cpu
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            state = model.state_dict()
        assert list(state) == list(expected) and state["first.weight"].device.type == "xla"
    model.load_state_dict(full)
    with pytest.raises(RuntimeError, match=r"takes a FullStateDictConfig; got a LocalSt.*Pass Fu"):
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, LocalStateDictConfig())
    for kind, config, message in (
        (StateDictType.LOCAL_STATE_DICT, None, r"Use StateDictType\.FULL_STATE_DICT"),
        (
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=True),
            "read shards",
        ),
    ):
        with pytest.raises(spmd.errors.UnsupportedOpError, match=message):
            FSDP.set_state_dict_type(model, kind, config)
    with pytest.raises(spmd.errors.UnsupportedOpError, match="get_optimizer_state_dict"):
        FSDP.optim_state_dict(model, torch.optim.SGD(model.parameters(), 0.1))


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.norm = nn.BatchNorm1d(8)


REFUSED = {
    "process_group": ({"process_group": object()}, "without groups"),
    "cpu_offload": ({"cpu_offload": CPUOffload(True)}, r"spmd\.save_on_host\(\)"),
    "param_init_fn": ({"param_init_fn": print}, r"reset_parameters\(\)"),
    "device_id": ({"device_id": torch.device("cpu")}, "one program drives all devices"),
    "gradients": (
        {"mixed_precision": MixedPrecision(keep_low_precision_grads=True)},
        "a gradient has the dtype of its parameter",
    ),
    "buffers": (
        {"mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16)},
        r"the buffers scale, .*Leave buffer_dtype out, and cast them",
    ),
    "classes": (
        {
            "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
            "auto_wrap_policy": ModuleWrapPolicy({nn.Linear}),
        },
        r"'norm', a BatchNorm1d, .*_module_classes_to_ignore=\(\)",
    ),
    "policy": (
        {"auto_wrap_policy": CustomPolicy(lambda m: {"limit_all_gathers": False})},
        r"returns \['limit_all_gathers'\] for a .* Return True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_values_is_refused(mesh, name):
    options, message = REFUSED[name]
    with pytest.raises(spmd.errors.UnsupportedOpError, match=message):
        FSDP(Scaled(), device_mesh=mesh, **options)
    FSDP(Scaled(), device_mesh=mesh, cpu_offload=CPUOffload(False))  # nothing else is in the way


def test_a_mesh_has_as_many_dimensions_as_the_strategy(mesh):
    for given in (None, mesh):
        with pytest.raises(
            spmd.errors.MeshError, match=r"HYBRID_SHARD takes a device_mesh of 2 dimensions, \(rep"
        ):
            FSDP(net(), device_mesh=given, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    hybrid = init_device_mesh("xla", (1, mesh.size()))
    with pytest.raises(spmd.errors.MeshError, match=r"FULL_SHARD takes a device_mesh of 1 dimens"):
        FSDP(net(), device_mesh=hybrid)


def test_a_subclass_is_refused(mesh):
    class Own(FSDP):
        pass

    with pytest.raises(spmd.errors.WrapError, match=r"got its subclass Own\. Call spmd\.fully_sh"):
        Own(net(), device_mesh=mesh)
