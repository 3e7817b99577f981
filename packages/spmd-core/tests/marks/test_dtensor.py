"""DTensor's interface: DeviceMesh, placements, a tensor's methods, distributing.

DeviceMesh and placements are converted to Mesh and partition spec and back.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed import device_mesh as torch_device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, parallel
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import spmd_core as spmd
from spmd_core.auto import registration
from spmd_core.marks.dtensor import auto_policy

NUM_DEVICES = spmd.global_runtime_device_count()
needs_8 = pytest.mark.skipif(NUM_DEVICES != 8, reason="the meshes are those of 8 devices")
needs_several = pytest.mark.skipif(NUM_DEVICES == 1, reason="one device has nothing to split")


@pytest.fixture
def device_mesh() -> DeviceMesh:
    """All devices on axes `dp` and `tp`."""
    tp = 2 if NUM_DEVICES % 2 == 0 else 1
    return spmd.dtensor.init_device_mesh(
        "xla", (NUM_DEVICES // tp, tp), mesh_dim_names=("dp", "tp")
    )


# Meshes.


def test_meshes_both_ways(mesh_2d):
    there = spmd.dtensor.to_device_mesh(mesh_2d)
    assert (there.device_type, tuple(there.mesh.shape), there.mesh_dim_names) == (
        "xla",
        mesh_2d.mesh_shape,
        ("a", "b"),
    )
    assert spmd.dtensor.from_device_mesh(there).mesh == mesh_2d
    assert spmd.dtensor.from_device_mesh(mesh_2d) == spmd.dtensor.from_device_mesh(there)


@needs_8
def test_the_order_of_devices_is_kept():
    mesh = spmd.Mesh([3, 1, 2, 0, 7, 6, 5, 4], (2, 4), ("a", "b"))
    assert spmd.dtensor.from_device_mesh(spmd.dtensor.to_device_mesh(mesh)).mesh == mesh


def test_the_global_mesh_stands_in(mesh_1d):
    with pytest.raises(
        spmd.errors.MeshError, match=r"got None, and no global mesh is set. Pass mesh="
    ):
        spmd.dtensor.from_device_mesh(None)
    spmd.set_global_mesh(mesh_1d)
    try:
        assert spmd.dtensor.from_device_mesh(None).mesh is mesh_1d
        assert spmd.dtensor.distribute_tensor(torch.ones(8), None, [Shard(0)]).partition_spec == (
            "x",
        )
    finally:
        spmd.set_global_mesh(None)


@needs_8
def test_slices_of_torchs_own_mesh():
    mesh = torch_device_mesh.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    assert spmd.dtensor.from_device_mesh(mesh["tp"]).axes == ((2,),)
    assert spmd.dtensor.from_device_mesh(mesh["dp", "tp"]).axes == ((0,), (2,))
    assert spmd.dtensor.from_device_mesh(mesh["dp", "cp"]._flatten("dp_cp")).axes == ((0, 1),)
    assert mesh["tp"].mesh.tolist() == [0, 1] and mesh["dp"].mesh.tolist() == [0, 4]
    assert (
        mesh.get_rank(),
        mesh["cp"].get_local_rank(),
        mesh.get_local_rank("tp"),
        mesh.get_coordinate(),
    ) == (0, 0, 0, (0, 0, 0))


@needs_8
def test_a_tensor_over_a_slice_replicates_over_the_rest():
    mesh = spmd.dtensor.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    x = torch.arange(32.0).reshape(8, 4)
    t = spmd.dtensor.distribute_tensor(x, mesh["tp"], [Shard(1)])
    assert t.partition_spec == (None, "tp")
    flat = spmd.dtensor.distribute_tensor(x, mesh["dp", "cp"]._flatten("dp_cp"), [Shard(0)])
    assert flat.partition_spec == (("dp", "cp"), None)
    assert torch.equal((t + flat).cpu(), x + x)


@needs_8
def test_a_flattened_dimension_of_scattered_axes():
    mesh = spmd.dtensor.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    assert spmd.dtensor.from_device_mesh(mesh["dp", "tp"]._flatten("dp_tp")).axes == ((0, 2),)


def test_other_devices_are_refused(device_mesh):
    with pytest.raises(
        spmd.errors.MeshError, match=r"makes meshes of device type 'xla'; got 'cuda'"
    ):
        spmd.dtensor.init_device_mesh("cuda", (8,))
    with pytest.raises(
        spmd.errors.MeshError,
        match=rf"number of devices; got \(3, 7\) with product 21 for {NUM_DEVICES} devices",
    ):
        spmd.dtensor.init_device_mesh("xla", (3, 7))
    with pytest.raises(spmd.errors.MeshError, match="device type 'xla' is needed; got str"):
        spmd.dtensor.from_device_mesh("xla")
    with pytest.raises(spmd.errors.MeshError, match="below the number of devices"):
        spmd.dtensor.from_device_mesh(DeviceMesh("xla", [NUM_DEVICES, NUM_DEVICES + 1]))


def test_local_ranks_ask_for_a_dimension(device_mesh):
    with pytest.raises(RuntimeError, match="has a local rank in each"):
        device_mesh.get_local_rank()
    with pytest.raises(KeyError, match=r"one of the mesh's names, \('dp', 'tp'\); got 'pp'"):
        device_mesh.get_local_rank("pp")
    with pytest.raises(RuntimeError, match="only a device of the mesh has a rank in it"):
        DeviceMesh("xla", [5, 6]).get_local_rank()


# Placements.


def reference_blocks(
    shape: tuple[int, ...], placements: list[object]
) -> dict[tuple[int, ...], torch.Tensor]:
    """The block at each place of a mesh of `shape`, by DTensor's own rule.

    Each dimension of the mesh, from the first, cuts the piece that the dimensions before it left.
    """
    whole = torch.arange(8**3).reshape(8, 8, 8)
    blocks = {}
    for place in itertools.product(*map(range, shape)):
        piece = whole
        for size, index, placement in zip(shape, place, placements):
            if isinstance(placement, Shard):
                piece = piece.chunk(size, placement.dim)[index]
        blocks[place] = piece
    return blocks


@needs_8
@given(
    st.lists(
        st.sampled_from([Replicate(), Shard(0), Shard(1), Shard(2), Shard(-1)]),
        min_size=3,
        max_size=3,
    )
)
def test_blocks_are_those_of_dtensor(placements):
    """Also where several dimensions of the mesh split one dim of the tensor."""
    shape = (2, 2, 2)
    whole = torch.arange(8**3).reshape(8, 8, 8)
    t = spmd.dtensor.distribute_tensor(
        whole, spmd.dtensor.init_device_mesh("xla", shape), placements
    )
    expected = reference_blocks(shape, placements)
    for shard, (_, block) in zip(t.local_shards, sorted(expected.items())):
        assert torch.equal(shard.data, block)


@needs_8
def test_a_strided_shard_is_cut_by_the_later_dimension_first():
    mesh = spmd.dtensor.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))
    t = spmd.dtensor.distribute_tensor(
        torch.arange(16), mesh, [_StridedShard(0, split_factor=2), Shard(0)]
    )
    assert t.partition_spec == (("tp", "fsdp"),)
    assert t.placements == (_StridedShard(0, split_factor=2), Shard(0))
    with pytest.raises(spmd.errors.PartitionSpecError, match=r"one of \[1, 2\]; got 3"):
        spmd.dtensor.partition_spec_of(mesh, [_StridedShard(0, split_factor=3), Shard(0)], 1)


def test_what_is_no_placement_of_a_tensor(device_mesh):
    with pytest.raises(
        ValueError, match="one placement for each dimension of the mesh; got 1 placements"
    ):
        spmd.dtensor.partition_spec_of(device_mesh, [Shard(0)], 2)
    with pytest.raises(
        spmd.errors.UnsupportedOpError,
        match=r"sharded or replicated along each axis; got Partial\(sum\)",
    ):
        spmd.dtensor.partition_spec_of(device_mesh, [Partial(), Replicate()], 2)
    with pytest.raises(IndexError, match=r"got dim 2 for a tensor of rank 2\. Use -2 to 1"):
        spmd.dtensor.partition_spec_of(device_mesh, [Shard(2), Replicate()], 2)


# A tensor's methods.


def test_the_habits_of_a_dtensor(device_mesh):
    x = torch.randn(16, 8)
    t = spmd.dtensor.distribute_tensor(x, device_mesh, [Shard(0), Shard(1)])
    assert t.placements == (Shard(0), Shard(1))
    assert t.device_mesh == device_mesh
    again = t.redistribute(device_mesh, [Replicate(), Shard(0)])
    assert again.placements == (Replicate(), Shard(0)) and t.placements == (Shard(0), Shard(1))
    assert again.redistribute(placements=[Shard(1), Replicate()], async_op=True).placements == (
        Shard(1),
        Replicate(),
    )
    assert torch.equal(again.cpu(), x)
    whole = t.full_tensor()
    assert whole.sharding.is_replicated and torch.equal(whole.cpu(), x)


def test_gradients_pass_through_redistribute(device_mesh):
    x = torch.randn(16, 8)
    w = spmd.dtensor.distribute_tensor(x, device_mesh, [Shard(0), Replicate()]).requires_grad_()
    (w.redistribute(device_mesh, [Replicate(), Shard(1)]).full_tensor() ** 2).sum().backward()
    torch.testing.assert_close(w.grad.cpu(), 2 * x)


def test_local_and_back(device_mesh):
    x = torch.randn(16, 8)
    w = spmd.dtensor.distribute_tensor(x, device_mesh, [Shard(0), Shard(1)]).requires_grad_()
    local = w.to_local()
    assert tuple(local.shape) == (16 // device_mesh.shape[0], 8 // device_mesh.shape[1])
    y = spmd.XLAShardedTensor.from_local(local * 3, device_mesh, [Shard(0), Shard(1)])
    assert y.placements == (Shard(0), Shard(1))
    torch.testing.assert_close(y.cpu(), x * 3)
    y.sum().backward()
    torch.testing.assert_close(w.grad.cpu(), torch.full_like(x, 3.0))


@needs_several
@pytest.mark.parametrize(
    ("kind", "reduce"),
    [("sum", torch.sum), ("avg", torch.mean), ("max", torch.amax), ("min", torch.amin)],
)
def test_partial_local_values_are_reduced(device_mesh, kind, reduce):
    x = torch.randn(16, 8)
    local = spmd.dtensor.distribute_tensor(x, device_mesh, [Shard(0), Shard(1)]).to_local()
    y = spmd.dtensor.from_local(local, device_mesh, [Partial(kind), Shard(1)])
    torch.testing.assert_close(y.cpu(), reduce(x.reshape(device_mesh.shape[0], -1, 8), 0))


def test_the_full_tensor_of_a_result(device_mesh):
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    d = spmd.dtensor.distribute_tensor(a, device_mesh, [Shard(0), Replicate()])
    e = spmd.dtensor.distribute_tensor(b, device_mesh, [Replicate(), Shard(1)])
    full = (d @ e).full_tensor()
    torch.testing.assert_close(full.cpu(), a @ b)
    assert full.sharding_spec == "{replicated}"
    spmd.set_global_mesh(spmd.Mesh(range(NUM_DEVICES), (NUM_DEVICES, 1), ("x", "y")))
    assert (d @ e).full_tensor().mesh_shape == (NUM_DEVICES, 1)


def test_methods_ask_for_a_sharding():
    t = torch.ones(4, device="xla")
    for call in (
        lambda: t.placements,
        lambda: t.device_mesh,
        t.to_local,
        lambda: t.redistribute(placements=[Shard(0)]),
    ):
        with pytest.raises(
            spmd.errors.SpmdError,
            match=r"needs a tensor with a sharding; this one, of shape \(4,\)",
        ):
            call()
    with pytest.raises(ValueError, match="redistribute needs placements; got None"):
        t.redistribute()


@needs_several
def test_uneven_blocks_have_no_local_tensor(mesh_1d):
    t = spmd.mark_sharding(torch.ones(NUM_DEVICES + 1, device="xla"), mesh_1d, ("x",))
    with pytest.raises(spmd.errors.PartitionSpecError, match="a block of one shape"):
        t.to_local()


# Distributing.


def test_distributed_parameters_stay_leaves(device_mesh):
    p = nn.Parameter(torch.randn(8, 4))
    t = spmd.dtensor.distribute_tensor(p, device_mesh, [Shard(0), Replicate()])
    assert t.requires_grad and t.is_leaf
    (t * 2).sum().backward()
    assert t.grad.sharding == t.sharding
    assert spmd.dtensor.distribute_tensor(torch.zeros(3), device_mesh).sharding.is_replicated


def test_distribute_tensor_refuses(device_mesh):
    t = spmd.dtensor.distribute_tensor(torch.zeros(8, 8), device_mesh, [Shard(0), Shard(1)])
    assert spmd.dtensor.distribute_tensor(t, device_mesh, [Shard(0), Shard(1)]) is t
    with pytest.raises(
        spmd.errors.PartitionSpecError, match=r"marks a tensor once; .* Use tensor\.redistribute"
    ):
        spmd.dtensor.distribute_tensor(t, device_mesh, [Shard(1), Shard(0)])
    with pytest.raises(RuntimeError, match="takes a leaf of autograd"):
        spmd.dtensor.distribute_tensor(torch.ones(2, requires_grad=True) * 2, device_mesh)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()) * self.scale


def test_a_distributed_module_computes_the_same(device_mesh):
    torch.manual_seed(1)
    net, x = Net(), torch.randn(4, 8)
    with torch.no_grad():
        expected = net(x)
    seen = []

    def partition(name: str, module: nn.Module, mesh: object) -> None:
        seen.append((name, mesh))
        if name == "a":  # replaced, as in torch's documentation
            weight = nn.Parameter(
                spmd.dtensor.distribute_tensor(
                    module.weight.detach(), mesh, [Replicate(), Shard(0)]
                )
            )
            module.register_parameter("weight", weight)
        if name == "b":  # marked in place
            spmd.dtensor.distribute_tensor(module.weight, mesh, [Replicate(), Shard(1)])

    out = spmd.dtensor.distribute_module(
        net,
        device_mesh,
        partition,
        lambda module, inputs, mesh: (
            spmd.dtensor.distribute_tensor(inputs[0], mesh, [Shard(0), Replicate()]),
        ),
        lambda module, outputs, mesh: outputs.full_tensor() if outputs.sharding else outputs,
    )
    assert out is net
    assert seen == [("", device_mesh), ("a", device_mesh), ("b", device_mesh)]
    assert net.a.weight.placements == (Replicate(), Shard(0))
    assert net.b.weight.placements == (Replicate(), Shard(1))
    assert net.scale.placements == net.a.bias.placements == (Replicate(), Replicate())
    torch.testing.assert_close(net(x).cpu(), expected)
    with pytest.raises(RuntimeError, match="takes a module once"):
        spmd.dtensor.distribute_module(net, device_mesh)


def test_hooks_of_two_arguments_are_deprecated(device_mesh):
    with pytest.warns(FutureWarning, match=r"input_fn takes \(module, inputs, device_mesh\)"):
        net = spmd.dtensor.distribute_module(
            nn.Linear(2, 2), device_mesh, None, lambda inputs, mesh: (inputs[0].to("xla"),)
        )
    assert net(torch.ones(1, 2)).device.type == "xla"
    with pytest.raises(
        ValueError, match=r"output_fn takes three arguments, .* got a function of 1"
    ):
        spmd.dtensor.distribute_module(nn.Linear(2, 2), device_mesh, None, None, lambda out: out)


def test_auto_policy_leaves_parameters_to_the_first_step(device_mesh):
    net = spmd.dtensor.distribute_module(nn.Linear(2, 2), device_mesh, auto_policy)
    assert registration.is_automatic() and net.weight.device.type == "xla"
    assert net.weight.sharding is None


def test_the_spec_that_torch_computes_with(mesh_2d):
    x = spmd.mark_sharding(torch.ones(8, 6, device="xla"), mesh_2d, ("a", None))
    spec = x._spec
    assert (
        spec.placements == (Shard(0), Replicate())
        and spec.mesh.device_type == "xla"
        and tuple(spec.mesh.shape) == mesh_2d.mesh_shape
    )
    assert spec.tensor_meta == (torch.Size([8, 6]), (6, 1), torch.float32)
    assert x._spec is spec
    x.invalidate_spec_cache()
    assert x._spec is not spec and x._spec == spec
    spmd.mark_sharding(x, mesh_2d, (None, "b"))
    assert x._spec.placements == (Replicate(), Shard(1))


def test_the_spec_of_an_unmarked_tensor_is_one_value(num_devices):
    spec = torch.ones(3, device="xla")._spec
    assert spec.placements == (Replicate(),) and spec.mesh.size() == num_devices


# torch's own tensor parallelism and FSDP, which exchange blocks between processes.


def test_a_column_and_a_row_layer_by_marks(mesh_2d):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    x = torch.randn(4, 8)
    right = model(x).detach()
    model.to("xla")
    axis = mesh_2d.axis_names[1]
    spmd.shard_module(model, {"0.weight": (axis, None), "2.weight": (None, axis)}, mesh_2d)
    torch.testing.assert_close(model(x.to("xla")).detach().cpu(), right)


def refuses_groups(got):
    return pytest.raises(
        spmd.errors.UnsupportedOpError,
        match=rf"has no process groups.*got {got}\. .*spmd\.context_parallel in place of",
    )


def test_torchs_fully_shard_takes_a_mesh_of_the_device(device_mesh):
    sharded = fully_shard(nn.Linear(8, 8), mesh=device_mesh)
    assert sharded.weight.partition_spec == (device_mesh.mesh_dim_names[1], None)


def test_what_computes_blocks_of_a_process_is_refused(device_mesh):
    with refuses_groups("a DTensor over it"):
        compute_local_shape_and_global_offset((8, 8), device_mesh, [Shard(0), Replicate()])


def test_collectives_over_a_mesh_are_refused(device_mesh):
    with refuses_groups("a collective over it"):
        functional_collectives.all_reduce(torch.ones(2, device="xla"), "sum", (device_mesh, 0))
    with refuses_groups(r"get_group\(\)"):
        device_mesh["tp"].get_group()


def test_meshes_of_other_devices_keep_their_groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch_device_mesh.init_device_mesh("cpu", (1,))
        assert mesh.get_group().size() == 1
        full = DTensor.from_local(torch.ones(2), mesh, [Shard(0)]).full_tensor()
        assert full.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_a_loss_over_split_classes_needs_no_context(device_mesh):
    logits, target = torch.randn(4, 16), torch.arange(4)
    split = spmd.dtensor.distribute_tensor(logits, device_mesh, [Replicate(), Shard(1)])
    right = nn.functional.cross_entropy(logits, target)
    with parallel.loss_parallel():
        found = nn.functional.cross_entropy(split, target.to("xla"))
    torch.testing.assert_close(found.cpu(), right)
