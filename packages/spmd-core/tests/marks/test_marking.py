"""Marks: every form of partition spec, re-marking, effects on later operations, refused input."""

import copy

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.marks.marking import start_upload
from spmd_core.program import compile_cache
from spmd_core.runtime import devices
from spmd_core.runtime.processes import get_1d_mesh
from spmd_core.sharding.sharding import Sharding, ShardingType

pytestmark = pytest.mark.one_device


@pytest.mark.parametrize(
    "spec",
    [
        ("a", "b"),
        ("b", "a"),
        (0, 1),
        (-2, -1),
        (("a", "b"), None),
        (None, ("b", "a")),
        ("a",),
        (),
        (None, None),
        (None, "b"),
    ],
)
@pytest.mark.parametrize("state", ["host", "device", "pending"])
def test_values_and_shards_under_every_spec(spec, state, mesh_2d):
    expected = torch.arange(16.0 * 8).view(16, 8)
    x = expected.to("xla")
    if state == "device":
        x = x + 0
        spmd.sync()
    elif state == "pending":
        x = x + 0
    assert spmd.mark_sharding(x, mesh_2d, spec) is x
    assert x.sharding == Sharding.of(mesh_2d, spec, 2)  # visible before anything runs
    torch.testing.assert_close(x.cpu(), expected)
    for shard, index in zip(x.local_shards, x.sharding.indices((16, 8))):
        torch.testing.assert_close(shard.data, expected[index])


def test_spec_text_is_there_at_once(mesh_1d, num_devices):
    x = torch.zeros(8, 4, device="xla")
    assert x.sharding_spec == ""
    spmd.mark_sharding(x, mesh_1d, ("x",))
    ids = ",".join(map(str, range(num_devices)))
    assert x.sharding_spec == (
        f"{{devices=[{num_devices},1]{ids}}}" if num_devices > 1 else "{replicated}"
    )
    assert x.partition_spec == ("x", None) and x.mesh_shape == (num_devices,)


def test_the_type_of_a_sharding_and_jaxs_mesh(mesh_2d, num_devices):
    x = torch.zeros(8, 8, device="xla")
    with pytest.raises(
        spmd.errors.SpmdError, match=r"sharding_type needs a tensor with a sharding.*mark_sharding"
    ):
        _ = x.sharding_type
    spmd.mark_sharding(x, mesh_2d, ("a", "b"))
    assert x.sharding_type == (ShardingType.TILED if num_devices > 1 else ShardingType.REPLICATED)
    jax_mesh = mesh_2d.get_jax_mesh()
    assert (
        dict(jax_mesh.shape) == dict(mesh_2d.shape())
        and [d.id for d in jax_mesh.devices.flat] == mesh_2d.device_ids.tolist()
    )
    with pytest.raises(spmd.errors.MeshError, match="99"):
        spmd.Mesh([99], (1,)).get_jax_mesh()


def test_marking_again_reshards_and_clearing_gathers(mesh_2d):
    x = spmd.mark_sharding(
        torch.arange(64.0, device="xla").view(8, 8).clone(), mesh_2d, ("a", None)
    )
    spmd.sync()
    spmd.mark_sharding(x, mesh_2d, (None, ("a", "b")))
    assert x.local_shards[0].data.shape == (8, 8 // x.sharding.num_shards)
    spmd.clear_sharding(x)
    assert x.sharding is None and x.tolist() == torch.arange(64.0).view(8, 8).tolist()
    spmd.mark_sharding(x, mesh_2d, ("b",))
    assert (x + 1).sum().item() == 64 * 63 / 2 + 64


def test_host_data_goes_up_once_and_sharded(mesh_1d):
    x = torch.zeros(1024, device="cpu").to("xla")
    before = spmd.metrics.counter("uploaded_bytes")
    spmd.mark_sharding(x, mesh_1d, ("x",))
    assert spmd.metrics.counter("uploaded_bytes") == before  # not uploaded yet
    (x + 1).cpu()
    (x + 2).cpu()
    assert spmd.metrics.counter("uploaded_bytes") == before + 4096


def test_an_upload_may_start_early(mesh_1d, monkeypatch):
    x = spmd.mark_sharding(torch.arange(1024.0).to("xla"), mesh_1d, ("x",))
    before = spmd.metrics.counter("uploaded_bytes")
    assert start_upload(x) is x and spmd.metrics.counter("uploaded_bytes") == before + 4096
    start_upload(x)
    assert x.sum().item() == 1023 * 512 and spmd.metrics.counter("uploaded_bytes") == before + 4096
    assert x._handle.value.placement.sharding is x.sharding
    with pytest.raises(
        spmd.errors.DeviceMismatchError,
        match=r"start_upload needs a tensor on device 'xla'; got a tensor on cpu",
    ):
        start_upload(torch.ones(2))
    monkeypatch.setattr(devices, "num_processes", lambda: 2)
    with pytest.raises(
        spmd.errors.DeviceMismatchError,
        match=r"of shape \(1024,\) that a program has computed, or whose data is on the device",
    ):
        spmd.mark_sharding(x, spmd.ShardingSpec(mesh_1d, ("x",), minibatch=True))


def test_in_place_updates_keep_the_sharding(mesh_1d):
    x = spmd.mark_sharding(torch.zeros(16, device="xla"), mesh_1d, ("x",))
    spmd.sync()
    x.add_(1).mul_(2)
    spmd.sync()
    assert x.sharding is not None and x._handle.value.placement.sharding is x.sharding
    assert x.local_shards[0].data.tolist() == [2.0] * len(x.local_shards[0].data)


def test_gradients_and_optimizer_state_follow_the_parameter(mesh_1d):
    p = nn.Parameter(torch.randn(16, 4, device="xla"))
    spmd.mark_sharding(p, mesh_1d, ("x",))
    optimizer = torch.optim.AdamW([p])
    (p**2).sum().backward()
    assert p.grad.sharding == p.sharding
    optimizer.step()
    state = optimizer.state[p]
    assert state["exp_avg"].sharding == p.sharding == state["exp_avg_sq"].sharding
    spmd.sync()
    assert state["exp_avg"].local_shards[0].data.shape == p.local_shards[0].data.shape


def test_a_parameter_made_from_a_marked_tensor_follows_too(mesh_1d):
    p = nn.Parameter(spmd.mark_sharding(torch.randn(16, device="xla"), mesh_1d, ("x",)))
    assert p.sharding is not None
    (p * 2).sum().backward()
    assert p.grad.sharding == p.sharding


def test_gradients_follow_data_that_was_exchanged(mesh_2d):
    p = nn.Parameter(torch.randn(16, 4, device="xla"))
    spmd.mark_sharding(p, mesh_2d, ("a",))
    p.data = spmd.mark_sharding(torch.randn(8, 8, device="xla"), mesh_2d, (None, "a"))
    (p * 2).sum().backward()
    assert p.grad.sharding == p.sharding == Sharding.of(mesh_2d, (None, "a"), 2)


def test_marks_on_intermediates_and_views(mesh_2d):
    x = torch.randn(8, 8).to("xla")
    h = spmd.mark_sharding(x @ x, mesh_2d, ("a", "b"))
    v = spmd.mark_sharding((x + 1).view(4, 16), mesh_2d, (None, "b"))
    total = (h.sum() + v.sum()).cpu()
    c = x.cpu()
    torch.testing.assert_close(total, (c @ c).sum() + (c + 1).sum(), rtol=1e-4, atol=1e-4)
    assert h.sharding is not None and h._handle.value.placement.sharding is h.sharding


def test_gradients_flow_through_a_marked_intermediate(mesh_1d):
    x = torch.ones(8, 8, device="xla", requires_grad=True)
    h = spmd.mark_sharding(x * 3, mesh_1d, ("x",))
    (h * 2).sum().backward()
    assert x.grad.tolist() == [[6.0] * 8] * 8


def test_a_marked_activation_is_no_result_where_the_loss_alone_is_held(mesh_1d, num_devices):
    p = torch.full((8 * num_devices, 4), 2.0, device="cpu").to("xla").requires_grad_()
    seen = []
    x = spmd.mark_sharding(p * 3, mesh_1d, ("x",))
    p.register_hook(lambda gradient: seen.append(gradient.sharding))
    y = spmd.mark_sharding(x * 1, mesh_1d, ("x",))
    y.register_hook(lambda gradient: seen.append(gradient.sharding))
    loss = (y * y).sum()
    del x, y
    loss.backward()
    assert seen[0] == Sharding.of(mesh_1d, ("x",), 2)  # although y was deleted
    seen.clear()
    spmd.sync()
    assert len(compile_cache.newest().graph.outputs) == 2  # the loss and the gradient
    assert p.grad.cpu().unique().tolist() == [36.0]


def test_a_submesh_and_two_meshes_in_one_program(num_devices):
    if num_devices < 4:
        pytest.skip("needs four devices")
    low = spmd.Mesh([0, 1], (2,), ("x",))
    high = spmd.Mesh([3, 2], (2,), ("y",))
    a = spmd.mark_sharding(torch.arange(8.0).to("xla"), low, ("x",))
    b = spmd.mark_sharding(torch.arange(8.0).to("xla") * 10, high, ("y",))
    assert [s.shard_device for s in a.local_shards] == ["CPU:0", "CPU:1"]
    assert (a * 1).tolist() == list(range(8))  # a program on the submesh alone
    both = a + b
    a.add_(b)
    spmd.sync()
    assert both.tolist() == [11.0 * i for i in range(8)] == a.tolist()
    assert [s.data.tolist() for s in a.local_shards] == [[0, 11, 22, 33], [44, 55, 66, 77]]
    assert {s.shard_device: s.data.tolist() for s in b.local_shards} == {
        "CPU:3": [0, 10, 20, 30],
        "CPU:2": [40, 50, 60, 70],
    }


def test_device_order_of_the_mesh_is_the_placement(num_devices):
    order = list(reversed(range(num_devices)))
    x = spmd.mark_sharding(
        torch.arange(float(num_devices)).to("xla"), spmd.Mesh(order, (num_devices,), ("x",)), ("x",)
    )
    assert [s.data.item() for s in x.local_shards] == order
    y = spmd.mark_sharding(
        torch.arange(float(num_devices)).to("xla"),
        spmd.Mesh(range(num_devices), (num_devices,), ("x",)),
        ("x",),
    )
    assert (x - y).abs().sum().item() == 0


def test_an_unmarked_result_says_what_the_partitioner_chose(mesh_1d, num_devices):
    x = spmd.mark_sharding(torch.ones(8 * num_devices, device="xla"), mesh_1d, ("x",))
    y = x * 2
    spmd.sync()
    assert y.sharding is None and y.sharding_spec == x.sharding_spec


def test_the_partitioners_choice_is_said_in_the_devices_numbers(num_devices):
    if num_devices < 4:
        pytest.skip("needs four devices")
    mesh = spmd.Mesh([3, 1, 2, 0], (2, 2), ("a", "b"))
    for spec in (("a", "b"), ("b",)):
        x = spmd.mark_sharding(torch.ones(4, 4, device="cpu").to("xla"), mesh, spec)
        y = x * 2
        spmd.sync()
        assert y.sharding is None and y.sharding_spec == x.sharding_spec


def test_an_empty_tensor_moves_to_the_same_devices_in_another_order(num_devices):
    x = spmd.mark_sharding(
        torch.ones(4 * num_devices, 0, device="cpu").to("xla"),
        get_1d_mesh("x", num_devices),
        (),
    )
    start_upload(x)
    spmd.mark_sharding(x, spmd.Mesh(range(num_devices)[::-1], (num_devices,), ("x",)), ("x",))
    assert [tuple(shard.data.shape) for shard in x.local_shards] == [(4, 0)] * num_devices
    assert x.cpu().shape == (4 * num_devices, 0)


def test_uneven_marks_are_real_constraints(mesh_1d, num_devices):
    if num_devices == 1:
        pytest.skip("one device shards nothing")
    rows = num_devices * 4 - 1
    x = torch.randn(rows, 6, device="xla", requires_grad=True)
    spmd.mark_sharding(x, mesh_1d, ("x",))
    h = spmd.mark_sharding(x * 2, mesh_1d, ("x",))
    (h**2).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 8 * x.detach().cpu())
    assert h.local_shards[0].data.shape == (4, 6) and x.grad.local_shards[0].data.shape == (4, 6)
    assert compile_cache.newest() is not None


BAD = [
    ("wrong count", lambda m: spmd.Mesh(range(8), (3, 2), ("a", "b")), ValueError, "8"),
    (
        "duplicates",
        lambda m: spmd.Mesh([0, 0], (2,), ("a",)),
        ValueError,
        "unique|duplicate|twice|once",
    ),
    (
        "out of range",
        lambda m: spmd.mark_sharding(
            torch.ones(2, device="xla"), spmd.Mesh([98, 99], (2,), ("a",)), ("a",)
        ),
        ValueError,
        "99",
    ),
    ("axis repeated", lambda m: spmd.Mesh(range(4), (2, 2), ("a", "a")), ValueError, "a"),
    ("axis count", lambda m: spmd.Mesh(range(4), (2, 2), ("a",)), ValueError, "axis_names"),
    (
        "too long",
        lambda m: spmd.mark_sharding(torch.ones(2, device="xla"), m, ("a", None)),
        ValueError,
        "rank 1",
    ),
    (
        "unknown axis",
        lambda m: spmd.mark_sharding(torch.ones(2, device="xla"), m, ("z",)),
        ValueError,
        "z",
    ),
    (
        "axis twice",
        lambda m: spmd.mark_sharding(torch.ones(2, 2, device="xla"), m, ("a", "a")),
        ValueError,
        "a",
    ),
    (
        "cpu tensor",
        lambda m: spmd.mark_sharding(torch.ones(2), m, ("a",)),
        RuntimeError,
        r"t\.to\('xla'\)",
    ),
    (
        "no mesh",
        lambda m: spmd.mark_sharding(torch.ones(2, device="xla"), "mesh", ("a",)),
        ValueError,
        "Mesh",
    ),
    ("no tensor", lambda m: spmd.mark_sharding([1, 2], m, ("a",)), RuntimeError, "got list"),
    (
        "clear cpu",
        lambda m: spmd.clear_sharding(torch.ones(2)),
        RuntimeError,
        "clear_sharding needs a tensor on device 'xla'",
    ),
]


@pytest.mark.parametrize(("call", "error", "match"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_refused_at_once(call, error, match, mesh_2d):
    with pytest.raises(error, match=match) as caught:
        call(mesh_2d)
    assert isinstance(caught.value, spmd.errors.SpmdError)


# Constraints that are not marks.


def test_annotating_constrains_one_value_only(mesh_2d):
    x = torch.randn(8, 8)
    t = x.to("xla") * 2
    assert spmd.constrain(t, mesh_2d, ("a", "b")) is t
    assert t.sharding is None
    u = t + 1
    spmd.sync()
    assert "devices=[" in t.sharding_spec or mesh_2d.size() == 1
    torch.testing.assert_close(u.cpu(), x * 2 + 1)
    row = t[1]
    spmd.constrain(row, mesh_2d, ("a",))
    torch.testing.assert_close(row.cpu(), x[1] * 2)


def test_a_sharding_spec_is_a_mesh_and_its_spec(mesh_2d):
    spec = spmd.ShardingSpec(mesh_2d, spmd.PartitionSpec("a", "b"))
    t, u = torch.ones(8, 8, device="xla"), torch.ones(8, 8, device="xla")
    assert spmd.mark_sharding(t, spec) is t and t.partition_spec == ("a", "b")
    marked = spmd.mark_sharding(u, spec, inplace=False)
    assert marked.sharding == t.sharding and u.sharding is None
    with pytest.raises(
        spmd.errors.PartitionSpecError,
        match=r"its own partition spec; got \('a', 'b'\) and \('b',\) beside it.*Mesh",
    ):
        spmd.mark_sharding(t, spec, ("b",))
    assert spmd.mark_sharding(t, mesh_2d, ("b",)).partition_spec == ("b", None)


def test_marked_with_gradients(mesh_2d):
    x = torch.randn(8, 8)
    t, e = x.to("xla").requires_grad_(), x.clone().requires_grad_()
    u = spmd.mark_sharding(t * t, mesh_2d, ("a", "b"), inplace=False)
    assert u.partition_spec == ("a", "b") and t.sharding is None
    gradients = []
    u.register_hook(gradients.append)
    (u * u).sum().backward()
    (e**4).sum().backward()
    torch.testing.assert_close(t.grad.cpu(), e.grad)
    (g,) = torch.autograd.grad(
        spmd.mark_sharding(t, mesh_2d, ("a",), inplace=False).pow(3).sum(), t, create_graph=True
    )
    assert g.sharding == Sharding.of(mesh_2d, ("a",), 2)
    (h,) = torch.autograd.grad(g.sum(), t)
    torch.testing.assert_close(h.cpu(), 6 * x)


def test_shard_as_lends_a_sharding(mesh_2d):
    x = torch.randn(8, 8)
    marked, plain = (
        spmd.mark_sharding(x.to("xla"), mesh_2d, ("a", "b")),
        (x * 2).to("xla").requires_grad_(),
    )
    (a, rest), b = (
        spmd.shard_as((marked, None), (plain, None))[0],
        spmd.shard_as([plain], [marked])[0][0],
    )
    assert rest is None and a.sharding == b.sharding == marked.sharding
    (b * b).sum().backward()
    torch.testing.assert_close(plain.grad.cpu(), 4 * x)
    torch.testing.assert_close(b.cpu(), x * 2)


def test_shard_as_of_unmarked_tensors_lets_the_partitioner_choose_one(mesh_2d):
    x = torch.randn(8, 8)
    source = spmd.mark_sharding(x.to("xla"), mesh_2d, ("a", "b"))
    one, other = spmd.shard_as(source * 2, torch.zeros(8, 8, device="xla"))
    spmd.sync()
    assert one.sharding_spec == other.sharding_spec == source.sharding_spec
    torch.testing.assert_close(one.cpu(), x * 2)


def test_shard_as_refuses_what_does_not_pair(mesh_2d):
    a, b = (
        spmd.mark_sharding(torch.ones(8, 8, device="xla"), mesh_2d, spec)
        for spec in (("a",), ("b",))
    )
    with pytest.raises(ValueError, match="pairs the leaves of two structures of one form"):
        spmd.shard_as([a], [a, b])
    with pytest.raises(
        ValueError, match=r"leaves of types \['XLAShardedTensor'\] and \['NoneType'\]"
    ):
        spmd.shard_as([a], [None])
    with pytest.raises(
        spmd.errors.PartitionSpecError, match=r"tensors of one shape; got \(8, 8\) and \(8,\)"
    ):
        spmd.shard_as(a, a[0])
    if mesh_2d.size() > 1:
        with pytest.raises(
            spmd.errors.PartitionSpecError, match=r"marked with different ones.*clear_sharding"
        ):
            spmd.shard_as(a, b)


@pytest.mark.parametrize("function", [spmd.constrain, spmd.mark_sharding])
def test_constraints_refuse_what_marks_refuse(function, mesh_1d):
    with pytest.raises(
        spmd.errors.DeviceMismatchError,
        match=f"{function.__name__} needs a tensor on device 'xla'; got a tensor on cpu",
    ):
        function(torch.ones(8), mesh_1d, ("x",))
    with pytest.raises(spmd.errors.MeshError, match=f"{function.__name__} needs a Mesh; got str"):
        function(torch.ones(8, device="xla"), "x", ("x",))


def test_a_module_made_empty_is_sharded_itself(mesh_2d):
    net = nn.Linear(8, 16, device="meta").to_empty(device="xla")
    spmd.mark_sharding(net.weight, mesh_2d, ("a", "b"))
    with torch.no_grad():
        net.weight.fill_(2.0)
    spmd.sync()
    assert net.weight.local_shards[0].data.shape == net.weight.sharding.shard_shape((16, 8))
    assert net.weight.cpu().unique().tolist() == [2.0]


@pytest.mark.parametrize("where", ["cpu", "xla"])
def test_a_loaded_optimizer_state_is_sharded_like_its_parameter(where, mesh_2d):
    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Linear(8, 16).to("xla")
        spmd.mark_sharding(net.weight, mesh_2d, ("a", "b"))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(steps):
            step(net, optimizer)
        return net, optimizer

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        net(torch.ones(4, 8, device="xla")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()

    net, optimizer = trained(2)
    # A copy: step counts are CPU tensors, which later steps change in place.
    saved = copy.deepcopy(
        {"net": spmd.to_cpu(net.state_dict()), "optimizer": spmd.to_cpu(optimizer.state_dict())}
    )
    step(net, optimizer)
    again, restored = trained(0)
    again.load_state_dict(saved["net"])
    state = (
        saved["optimizer"]
        if where == "cpu"
        else torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.to("xla"), saved["optimizer"]
        )
    )
    restored.load_state_dict(state)
    assert restored.state[again.weight]["exp_avg"].sharding == again.weight.sharding
    assert restored.state[again.bias]["exp_avg"].sharding is None
    uploaded = spmd.metrics.counter("resharded_bytes")
    step(again, restored)
    assert spmd.metrics.counter("resharded_bytes") == uploaded
    torch.testing.assert_close(again.weight.cpu(), net.weight.cpu())


def test_a_mark_on_a_view_whose_base_was_written_since(mesh_1d):
    x = torch.arange(6.0, device="xla").requires_grad_()
    y = x * 1
    view = y.view(2, 3)
    y.mul_(2)
    spmd.mark_sharding(view, mesh_1d, ("x", None))
    view.square().sum().backward()
    assert x.grad.tolist() == [8.0 * i for i in range(6)]
