"""Tests torch_xla.core.xla_model: devices, steps, data, random state, collectives."""

import collections

import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

N = xr.global_runtime_device_count()
IDS = list(range(N))


# Devices.


def test_devices():
    assert xm.xla_device() == xm.xla_device(0) == torch.device(
        "xla:0"
    ) and xm.get_xla_supported_devices() == ["xla:0"]
    assert (
        xm.xla_real_devices()
        == xm.xla_real_devices([torch_xla.device()])
        == xm.xla_replication_devices(["xla:0"])
        == ["CPU:0"]
    )
    assert (
        xm.xla_real_devices([f"CPU:{i}" for i in IDS]) == torch_xla.real_devices()
        and xm.xla_device_hw(xm.xla_device()) == "CPU"
    )
    with pytest.raises(RuntimeError, match=r"a device is xla:0 or one of CPU:0.*; got TPU:0"):
        xm.xla_real_devices(["TPU:0"])
    assert isinstance(xm.xla_device_kind(), str)
    assert xm.is_xla_tensor(torch.ones(1, device="xla")) and not xm.is_xla_tensor(torch.ones(1))
    assert xm.get_ordinal() == xm.get_local_ordinal() == 0 and xm.xrt_world_size() == 1
    with pytest.raises(
        IndexError, match=r"there is one logical device, with index 0; got 3\. Call xla_device\(\)"
    ):
        xm.xla_device(3)


def test_the_master_prints(capsys):
    assert xm.is_master_ordinal() and xm.is_master_ordinal(local=False)
    xm.master_print("epoch", 1, flush=True)
    assert capsys.readouterr().out == "epoch 1\n"


def test_memory_of_emulated_devices_is_not_counted():
    with pytest.raises(NotImplementedError, match="the cpu platform counts nothing"):
        xm.get_memory_info(xm.xla_device())


# Steps.


def test_ends_of_steps():
    met.clear_all()
    x = torch.ones(3, device="xla") + 1
    xm.mark_step()
    xm.wait_device_ops()
    assert met.counter_value("MarkStep") == 1 and x.tolist() == [2.0] * 3
    y = x * 2
    xm.unlazy([y])
    assert met.counter_value("ExecuteReplicated") == 2


def test_step_closures_run_at_the_end_of_the_step():
    seen = []
    loss = torch.ones(4, device="xla").sum()
    xm.add_step_closure(lambda step, value: seen.append((step, value.item())), args=(1, loss))
    assert seen == []
    torch_xla.sync()
    assert seen == [(1, 4.0)]


def test_an_asynchronous_closures_error_comes_with_the_next():
    def fails():
        raise ValueError("in the closure")

    def steps():
        for _ in range(1000):
            xm.add_step_closure(lambda: None, run_async=True)
            torch_xla.sync()

    xm.add_step_closure(fails, run_async=True)
    with pytest.raises(RuntimeError, match="raised ValueError: in the closure"):
        steps()


def test_the_optimizers_step():
    model = torch.nn.Linear(4, 2).to("xla")
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    met.clear_all()
    model(torch.ones(3, 4, device="xla")).sum().backward()
    xm.optimizer_step(optimizer, barrier=True, optimizer_args={})
    assert met.counter_value("MarkStep") == 1
    torch.testing.assert_close(model.weight.detach().cpu(), before.cpu() - 0.5 * 3)
    xm.reduce_gradients(optimizer)
    assert len(xm._fetch_gradients(optimizer)) == 2


def test_a_barrier_keeps_the_values():
    tensors = [torch.ones(2, device="xla") + i for i in range(2)]
    ids = [id(t) for t in tensors]
    xm.optimization_barrier_(tensors)
    assert "opt-barrier" in torch_xla._XLAC._get_xla_tensors_hlo(tensors)
    assert [id(t) for t in tensors] == ids and [t.tolist() for t in tensors] == [
        [1.0] * 2,
        [2.0] * 2,
    ]


def test_rates():
    tracker = xm.RateTracker(smooth_factor=0.0)
    tracker.add(10)
    assert tracker.rate() > 0 and tracker.global_rate() > 0


# Data.


def test_data_to_the_device():
    Pair = collections.namedtuple("Pair", "a b")
    mesh = xs.get_1d_mesh("data")
    sent = xm.send_cpu_data_to_device(
        {"x": (torch.ones(N, 2), "name"), "y": [torch.ones(N)], "z": Pair(torch.ones(2), 3)},
        torch_xla.device(),
        xs.ShardingSpec(mesh, ("data", None)),
    )
    assert (
        isinstance(sent["x"], list)
        and sent["x"][1] == "name"
        and isinstance(sent["z"], Pair)
        and sent["z"].b == 3
    )
    assert (
        sent["x"][0].partition_spec == ("data", None)
        and sent["y"][0].sharding_spec == "{replicated}"
    )
    assert xm.send_cpu_data_to_device(torch.ones(2), "xla").device.type == "xla"
    (number,) = xm.send_cpu_data_to_device(
        [torch.ones(2, 2)], torch_xla.device(), input_sharding=xs.ShardingSpec(mesh, ("data", None))
    )
    assert (number / 0.5).tolist() == [[2.0, 2.0]] * 2


@pytest.mark.skipif(N == 1, reason="one device divides everything")
def test_a_mini_batch_divides_by_the_devices():
    spec = xs.ShardingSpec(xs.get_1d_mesh("data"), ("data", None), minibatch=True)
    with pytest.raises(
        RuntimeError,
        match=rf"must be divisible by local runtime device count. "
        rf"Per host input data shape is \({N + 1}, 2\)",
    ):
        xm.send_cpu_data_to_device(torch.ones(N + 1, 2), torch_xla.device(), spec)


def test_saving(tmp_path):
    layer = torch.nn.Linear(2, 2).to("xla")
    xm.save({"model": layer.state_dict(), "epoch": 3}, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert loaded["epoch"] == 3 and loaded["model"]["weight"].device.type == "cpu"
    assert torch.equal(loaded["model"]["weight"], layer.weight.detach().cpu())


def test_stablehlo():
    x = torch.ones(2, device="xla") * 3
    assert (
        "stablehlo.multiply" in xm.get_stablehlo([x]) and "stablehlo.multiply" in xm.get_stablehlo()
    )
    with pytest.raises(
        NotImplementedError,
        match=r"get_stablehlo_bytecode returns StableHLO in PyTorch/XLA's byte form.*"
        r"Use get_stablehlo",
    ):
        xm.get_stablehlo_bytecode([x])


# Random state.


def test_random_state():
    xm.set_rng_state(11)
    first = torch.rand(3, device="xla").tolist()
    state = xm.get_rng_state()
    second = torch.rand(3, device="xla").tolist()
    xm.set_rng_state(11)
    assert torch.rand(3, device="xla").tolist() == first
    xm.set_rng_state(state)
    with xm.fork_rng():
        torch.rand(3, device="xla").tolist()
    assert torch.rand(3, device="xla").tolist() == second


# Collectives.


def test_collectives_of_one_replica():
    x = torch.arange(4.0, device="xla")
    reduced = xm.all_reduce(xm.REDUCE_SUM, x, scale=0.5, groups=[[0]])
    assert reduced.tolist() == [0.0, 0.5, 1.0, 1.5] and xm.all_reduce(xm.REDUCE_MAX, x) is not x
    assert xm.all_reduce(xm.REDUCE_SUM, [x.clone()], scale=2.0) is None
    assert xm.all_gather(x).tolist() == xm.all_to_all(x, 0, 0, 1).tolist() == x.tolist()
    assert xm.reduce_scatter(xm.REDUCE_SUM, x, 2.0, 0, 1).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert (
        xm.collective_permute(x, [(0, 0)]).tolist() == x.tolist()
        and xm.collective_permute(x, []).tolist() == [0.0] * 4
    )
    xm.collective_broadcast([x])
    xm.broadcast_master_param(torch.nn.Linear(2, 2))
    assert (
        xm.rendezvous("tag", b"payload") == [b"payload"] and xm.mesh_reduce("tag", 3.0, sum) == 3.0
    )
    assert (
        xm.do_on_ordinals(lambda a: a + 1, (1,)) == 2
        and xm.do_on_ordinals(lambda: 1, (), (1,)) is None
    )
    xm.check_view_sharing([x])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: xm.all_reduce("median", x),
            "a reduction is one of sum, mul, and, or, min, max; got 'median'",
        ),
        (
            lambda x: xm.all_reduce(xm.REDUCE_SUM, x, groups=[[0, 1]]),
            "groups name replicas, and in SPMD mode there is one",
        ),
        (
            lambda x: xm.reduce_scatter(xm.REDUCE_SUM, x, 1.0, 0, 2),
            "there is one replica in SPMD mode; got shard_count=2",
        ),
        (
            lambda x: xm.all_to_all(x, 0, 0, 2),
            "there is one replica in SPMD mode; got split_count=2",
        ),
        (
            lambda x: xm.collective_permute(x, [(0, 1)]),
            "there is one replica in SPMD mode, number 0",
        ),
        (
            lambda x: xm.collective_broadcast([x], root_ordinal=1),
            "there is one replica in SPMD mode, number 0; got root_ordinal=1",
        ),
    ],
)
def test_other_replicas_do_not_exist(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(4, device="xla"))


@pytest.fixture
def block():
    """A tensor of ones that each device of a manual region holds in full."""
    xs.set_global_mesh(xs.Mesh(IDS, (1, N)))
    return xs.enable_manual_sharding(torch.ones(8, 8, device="xla"), (None, None))


def whole(local, shape, spec=(None, None)):
    return xs.disable_manual_sharding(local, spec, shape).global_tensor.cpu()


@pytest.mark.parametrize("groups", [None, [IDS]])
def test_reductions_over_the_devices_of_a_region(block, groups):
    assert torch.equal(
        whole(xm.all_reduce(xm.REDUCE_SUM, block, groups=groups), (8, 8)),
        torch.full((8, 8), float(N)),
    )
    assert torch.equal(
        whole(xm.all_reduce(xm.REDUCE_SUM, block, scale=1 / N, groups=groups), (8, 8)),
        torch.ones(8, 8),
    )
    assert torch.equal(
        whole(xm.all_reduce(xm.REDUCE_MAX, block, groups=groups), (8, 8)), torch.ones(8, 8)
    )
    part = xm.reduce_scatter(xm.REDUCE_SUM, block, 1.0, 0, N, groups)
    assert torch.equal(whole(part, (8 // N, 8)), torch.full((8 // N, 8), float(N)))


def test_exchanges_between_the_devices_of_a_region():
    xs.set_global_mesh(xs.Mesh(IDS, (N,)))
    x = torch.randn(8, 8)
    local = xs.enable_manual_sharding(x.to("xla"), (0, None))
    assert torch.equal(whole(xm.all_gather(local, 0, groups=[IDS]), (8, 8)), x)
    assert torch.equal(whole(xm.all_to_all(local, 1, 0, N), (8, 8), (None, 0)), x)
    inputs = [local + 1]
    assert xm.all_reduce(xm.REDUCE_SUM, inputs) is None
    torch.testing.assert_close(whole(inputs[0], (8 // N, 8)), (x + 1).reshape(N, -1, 8).sum(0))


@pytest.mark.skipif(N != 8, reason="groups of eight devices")
def test_groups_along_an_axis_of_a_region():
    mesh = xs.Mesh(IDS, (2, 4))
    x = torch.randn(8, 8)
    local = xs.enable_manual_sharding(x.to("xla"), (0, 1), mesh=mesh)
    rows = xs.disable_manual_sharding(
        xm.all_reduce(xm.REDUCE_SUM, local, groups=[[0, 1, 2, 3], [4, 5, 6, 7]]),
        (0, None),
        (8, 2),
        mesh=mesh,
    )
    torch.testing.assert_close(rows.cpu(), x.reshape(8, 4, 2).sum(1))
    columns = xs.disable_manual_sharding(
        xm.all_reduce(xm.REDUCE_SUM, local, groups=[[0, 4], [1, 5], [2, 6], [3, 7]]),
        (None, 1),
        (4, 8),
        mesh=mesh,
    )
    torch.testing.assert_close(columns.cpu(), x.reshape(2, 4, 8).sum(0))
    with pytest.raises(
        ValueError,
        match="the groups of a collective are the devices along axes of the region's mesh",
    ):
        xm.all_reduce(xm.REDUCE_SUM, local, groups=[[0, 1], [2, 3, 4, 5, 6, 7]])


@pytest.mark.skipif(N == 1, reason="one device has one part")
def test_what_collectives_of_a_region_refuse(block):
    with pytest.raises(
        ValueError,
        match=f"reduce_scatter sums over a group and gives each of its {N} devices a part; "
        "got 'sum' and shard_count=3",
    ):
        xm.reduce_scatter(xm.REDUCE_SUM, block, 1.0, 0, 3)
    with pytest.raises(
        ValueError,
        match=f"all_to_all gives each device of a group a part; got split_count=3 for {N} devices",
    ):
        xm.all_to_all(block, 0, 0, 3)
    with pytest.raises(
        ValueError, match="in a manual region values are reduced by sum, min, max; got 'mul'"
    ):
        xm.all_reduce(xm.REDUCE_MUL, block)


def test_the_library_of_operators_is_open():
    xm.XLA_LIB.define("defined_by_a_test(Tensor x) -> Tensor")
    xm.XLA_LIB.impl("defined_by_a_test", lambda x: x + 1, "CompositeImplicitAutograd")
    assert torch.ops.xla.defined_by_a_test(torch.ones(2, device="xla")).tolist() == [2.0, 2.0]
