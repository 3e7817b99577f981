"""Tests torch_xla.distributed.spmd: meshes, sharding, manual regions, linear layers.

Shardings are compared as exact texts, errors by their exact types.
"""

import collections
import copy

import numpy as np
import pytest
import torch

import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.experimental import xla_sharded_tensor, xla_sharding

text = torch_xla._XLAC._get_xla_sharding_spec
N = xr.global_runtime_device_count()
several = pytest.mark.skipif(N == 1, reason="one device has nothing to split")
eight = pytest.mark.skipif(N != 8, reason="the layout is that of eight devices")

NAMES = [
    "EinsumLinear",
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "PartitionSpec",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "auto_policy",
    "clear_sharding",
    "convert_to_xla_mesh",
    "convert_to_xla_partition_spec",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]


def tensor(*shape):
    return torch.randn(*shape).to(torch_xla.device())


# Names.


def test_star_import_gives_the_exported_names():
    scope = {}
    exec("from torch_xla.distributed.spmd import *", scope)
    assert sorted(name for name in scope if name != "__builtins__") == sorted(NAMES)


def test_the_first_documents_paths():
    assert all(getattr(xla_sharding, name) is getattr(xs, name) for name in NAMES)
    assert xla_sharded_tensor.XLAShard is xs.XLAShard and xs.xla_sharding.Mesh is xs.Mesh


def test_sharding_types_have_xlas_numbers():
    assert [(kind.name, kind.value) for kind in xs.ShardingType] == [
        *(
            ("REPLICATED", 0),
            ("MAXIMAL", 1),
            ("TUPLE", 2),
            ("TILED", 3),
            ("MANUAL", 4),
            ("PARTIAL", 5),
            ("UNKNOWN", 6),
        )
    ]


# Meshes.


def test_what_a_mesh_says():
    mesh = xs.Mesh(np.arange(N)[::-1], (N, 1), ("data", "model"))
    assert (
        mesh.device_ids.tolist() == list(range(N))[::-1]
        and mesh.mesh_shape == (N, 1)
        and mesh.axis_names == ("data", "model")
    )
    assert mesh.size() == N and mesh.shape() == collections.OrderedDict(data=N, model=1)
    assert mesh.get_logical_mesh().shape == (N, 1) and xs.Mesh(range(N), (N,)).shape() == {0: N}
    assert mesh.get_axis_name_idx("model") == 1 and mesh.get_axis_name_idx("other") is None
    assert xs.Mesh.from_str(str(mesh)) == mesh and type(xs.Mesh.from_str(str(mesh))) is xs.Mesh
    assert mesh.get_jax_mesh().axis_names == ("data", "model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # Upstream's beginning, then what was got and what to do.
        (
            (range(N), (N,), ("x", "y")),
            r"^Number of axis names 2 must match mesh dimensions 1; got 2 names .*Pass 1 names",
        ),
        ((range(N), (1, N), ("x", "x")), "^Axis names must be unique; got .*Rename the axis"),
        (
            (range(N), (N, 2)),
            rf"^Number of device IDs \({N}\) must match mesh size \({2 * N}\); .*Pass {2 * N} ids",
        ),
        (([0] * 2, (2,)), "^Device IDs must be unique, .*; got 0 more than once. Pass 2 different"),
        (([N], (1,)), f"^Device IDs must be less than mesh size, .*{N}; got {N} in .*Build the"),
        (([], 0), "^mesh_shape must be one or more ints"),
    ],
)
def test_what_a_mesh_refuses_is_an_assertion_error(arguments, message):
    with pytest.raises(AssertionError, match=message):
        xs.Mesh(*arguments)


def test_other_refusals_of_a_mesh():
    with pytest.raises(TypeError, match="an axis has a name only in a mesh with axis_names"):
        xs.Mesh(range(N), (N,)).get_axis_name_idx("x")
    with pytest.raises(ValueError, match="a mesh is read from a dict literal"):
        xs.Mesh.from_str("garbage")


@several
def test_a_mesh_of_some_devices():
    t = xs.mark_sharding(tensor(4, 4), xs.Mesh([1], (1,), ("x",)), ("x", None))
    assert len(t.local_shards) == 1 and t.local_shards[0].shard_device == "CPU:1"


def test_global_mesh():
    assert xs.get_global_mesh() is None
    mesh = xs.get_1d_mesh("data")
    xs.set_global_mesh(mesh)
    assert (
        xs.get_global_mesh() is mesh
        and mesh.shape() == {"data": N}
        and xs.get_1d_mesh().axis_names is None
    )


def test_a_mesh_of_slices_in_one_slice():
    assert xs.HybridMesh(ici_mesh_shape=(1, N)).get_logical_mesh().shape == (1, N)


@pytest.fixture
def two_slices(monkeypatch):
    """Two slices of four chips each, with the device attributes of a TPU."""
    rows = [
        {
            "name": f"TPU:{4 * s + 2 * y + x}",
            "coords": [x, y, 0],
            "core_on_chip": 0,
            "slice_index": s,
        }
        for s in range(2)
        for y in range(2)
        for x in range(2)
    ]
    monkeypatch.setattr(xr, "global_runtime_device_attributes", lambda: rows[::-1])
    monkeypatch.setattr(xr, "global_runtime_device_count", lambda: 8)


@pytest.mark.usefixtures("two_slices")
def test_a_mesh_of_slices_goes_by_the_attributes_of_devices():
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), axis_names=("data", "model"))
    assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert xs.HybridMesh((1, 4, 1), (2, 1, 1), ("data", "fsdp", "tensor")).shape() == {
        "data": 2,
        "fsdp": 4,
        "tensor": 1,
    }
    assert sorted(xs.HybridMesh((2, 2), (1, 2)).get_logical_mesh()[:, :2].flatten().tolist()) == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.usefixtures("two_slices")
def test_what_a_mesh_of_slices_refuses():
    with pytest.raises(
        ValueError,
        match=r"^Provide dcn_mesh_shape to create a mesh for multislice: .*multiplies to 2",
    ):
        xs.HybridMesh(ici_mesh_shape=(2, 4))
    with pytest.raises(
        ValueError,
        match=r"the product of dcn_mesh_shape must be the number of slices; got .* with product 4",
    ):
        xs.HybridMesh(ici_mesh_shape=(2, 1), dcn_mesh_shape=(4, 1))
    with pytest.raises(ValueError, match="must have one size for each axis"):
        xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2,))
    with pytest.raises(ValueError, match=r"^Invalid dcn_mesh_shape for single slice mesh: .*Give"):
        xs.HybridMesh((2, 4), (2, 1), num_slices=1)


# Descriptions.


def test_a_description_is_made_once_for_each_mesh_and_spec():
    met.clear_all()
    mesh = xs.Mesh(range(N), (1, N))
    xs.mark_sharding(tensor(1, N), mesh, (0, 1))
    assert met.counter_value("CreateOpSharding") == 1 and "CreateOpSharding" in met.counter_names()
    xs.mark_sharding(tensor(1, N), mesh, (0, 1))
    assert met.counter_value("CreateOpSharding") == 1
    xs.mark_sharding(tensor(1, N), mesh, (0, None))
    assert met.counter_value("CreateOpSharding") == 2


@eight
@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((2, 4), (0, 1), "{devices=[2,4]0,1,2,3,4,5,6,7}"),
        ((2, 4), (1, 0), "{devices=[4,2]0,4,1,5,2,6,3,7}"),
        ((2, 4), (0, None), "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"),
        ((2, 4), (None, 1), "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"),
        ((2, 4), ((0, 1), None), "{devices=[8,1]0,1,2,3,4,5,6,7}"),
        ((2, 4), ((1, 0), None), "{devices=[8,1]0,4,1,5,2,6,3,7}"),
        ((2, 2, 2), (0, 2), "{devices=[2,2,2]0,2,1,3,4,6,5,7 last_tile_dim_replicate}"),
        ((8, 1), (1, None), "{replicated}"),
        ((2, 4), (), "{replicated}"),
    ],
)
def test_the_text_of_a_description(shape, spec, expected):
    mesh = xs.Mesh(range(8), shape)
    assert str(mesh.get_op_sharding(spec)) == str(mesh.get_op_sharding_v2(spec)) == expected
    assert str(torch_xla._XLAC.OpSharding(*mesh._get_op_sharding_args(spec))) == expected
    if spec:
        assert text(xs.mark_sharding(tensor(*(8,) * len(spec)), mesh, spec)) == expected


@pytest.mark.parametrize(
    ("spec", "kind", "message"),
    [
        (
            (0, 2),
            AssertionError,
            r"^partition_spec \(0, 2\) contains out of bound index into mesh_shape: .* got 2\. Use",
        ),
        (
            (0, 0),
            AssertionError,
            r"^Each device mesh dimension should appear at most once in partition_spec \(0, 0\): ",
        ),
        (
            (0, (1, (0,))),
            AssertionError,
            "a tuple inside a partition spec must hold mesh axes only",
        ),
        (("x", "z"), ValueError, "^Axis name z is not defined in the given mesh: .*Use one of"),
        (
            (0, 1.5),
            ValueError,
            "^Spec type <class 'float'> is not supported in partition spec: .*Use one of",
        ),
        (
            (0,),
            AssertionError,
            r"Partition spec length \(1\) should be equal to the input rank \(2\)",
        ),
    ],
)
@pytest.mark.parametrize(
    "mark", [xs.mark_sharding, xs.annotate_custom_sharding, xs.mark_sharding_with_gradients]
)
def test_specs_that_do_not_fit(row, mark, spec, kind, message):
    with pytest.raises(kind, match=message):
        mark(tensor(4, 4), row, spec)


def test_the_specs_own_check(row):
    row._validate_translated_partition_spec((0, 1))
    with pytest.raises(AssertionError, match="may shard a tensor once"):
        row._validate_translated_partition_spec((1, 1))


def test_kinds_of_specs():
    kind = xs.xla_sharding._get_sharding_type
    assert [kind(spec, 8) for spec in [(None, None), (0, None), (0, 1)]] == [
        xs.ShardingType.REPLICATED,
        xs.ShardingType.PARTIAL,
        xs.ShardingType.TILED,
    ]
    assert kind((0, 1), 1) is xs.ShardingType.MAXIMAL


# Marks.


def test_a_mark_is_in_place_and_returns_a_sharded_tensor(row, ids):
    t = tensor(1, 8)
    marked = xs.mark_sharding(t, row, (0, 1))
    assert (
        isinstance(marked, xs.XLAShardedTensor)
        and marked.mesh_shape == (1, N)
        and marked.partition_spec == ("x", "y")
    )
    if N > 1:
        assert text(t) == f"{{devices=[1,{N}]{ids}}}"


@several
def test_device_ids_in_another_order():
    t = tensor(10, 20)
    xs.mark_sharding(t, xs.Mesh(np.flip(np.arange(N)), (1, N)), (0, 1))
    assert text(t) == f"{{devices=[1,{N}]{','.join(map(str, reversed(range(N))))}}}"


def test_data_goes_up_at_the_mark(row):
    t = tensor(8, 8)
    met.clear_all()
    assert "OutboundData" not in met.metric_names()
    xs.mark_sharding(t, row, (0, 1))
    assert (
        met.metric_data("OutboundData")[:2] == (1, t.nbytes)
        and met.counter_value("VirtualDeviceUsage") == 1
    )


@several
def test_marking_data_again(row):
    t = xs.mark_sharding(tensor(8, 8), row, (0, 1))
    assert xs.mark_sharding(t, row, (0, 1)) is t
    with pytest.raises(
        RuntimeError,
        match=r"Existing annotation must be cleared first: .* Call clear_sharding\(t\) before",
    ):
        xs.mark_sharding(t, row, (1, 0))
    xs.clear_sharding(t)
    assert text(t) == ""
    xs.mark_sharding(t, row, (1, 0))
    assert text(t) == str(row.get_op_sharding((1, 0)))


@several
def test_marking_over_a_replicated_one(row):
    t = xs.mark_sharding(tensor(8, 8), row, (None, None))
    assert text(t) == "{replicated}"
    values = t.cpu()
    xs.mark_sharding(t, row, (0, 1))
    assert text(t) == str(row.get_op_sharding((0, 1))) and torch.equal(t.cpu(), values)


def test_marks_need_spmd_mode(row, monkeypatch):
    monkeypatch.setattr(xr, "is_spmd", lambda: False)
    for mark in (xs.mark_sharding, xs.annotate_custom_sharding, xs.mark_sharding_with_gradients):
        with pytest.raises(
            RuntimeError, match=r"Please enable SPMD via `torch_xla\.runtime\.use_spmd\(\)`"
        ):
            mark(tensor(4, 4), row, (0, 1))


def test_a_cpu_tensor_cannot_be_marked(row):
    with pytest.raises(
        RuntimeError, match="mark_sharding needs a tensor on device 'xla'; got a tensor on cpu"
    ):
        xs.mark_sharding(torch.ones(4, 4), row, (0, 1))


@several
def test_a_mark_stays_through_steps_updates_and_copies(row):
    t = xs.mark_sharding(torch.ones(8, 8).to("xla"), row, (0, 1))
    expected = text(t)
    torch_xla.sync()
    assert text(t) == expected
    t += 2
    assert text(t) == text(t.clone()) == text(copy.deepcopy(t)) == expected
    torch_xla.sync()
    assert text(t) == expected and t.tolist() == [[3.0] * 8] * 8


def test_a_mark_on_a_computed_value(row):
    a, b = torch.randn(1, 128), torch.randn(1, 128)
    total = a.to("xla") + b.to("xla")
    xs.mark_sharding(total, row, (0, 1))
    assert text(total) == str(row.get_op_sharding((0, 1)))
    assert torch.equal(total.cpu(), a + b)


@several
def test_an_annotation_constrains_over_a_mark(row):
    t = xs.mark_sharding(tensor(8, 8), row, (0, 1))
    assert xs.annotate_custom_sharding(t, row, (1, 0)) is t
    assert text(t) == str(row.get_op_sharding((0, 1)))


@several
def test_marks_with_gradients(row):
    x = tensor(8, 8).requires_grad_()
    y = xs.mark_sharding_with_gradients(x, row, ("x", "y"))
    seen = []
    (z := y * 2).register_hook(lambda grad: seen.append(grad))
    (z * 3).sum().backward()
    assert y is not x and text(x) == "" and text(y) == str(row.get_op_sharding((0, 1)))
    assert x.grad.tolist() == [[6.0] * 8] * 8 and text(x.grad) == text(y)
    again = xs.MarkShardingFunction.apply(x, row, ("x", "y"))
    assert text(again) == text(y) and torch.equal(again.cpu(), x.detach().cpu())


def test_operators(row):
    t = tensor(8, 8)
    marked = torch.ops.xla.dynamo_mark_sharding(
        t, list(range(N)), [1, N], "('x', 'y')", "('x', 'y')"
    )
    assert text(marked) == str(row.get_op_sharding((0, 1)))
    assert torch.ops.xla.dynamo_set_buffer_donor_(t, True) is not None
    copied = torch.ops.xla.aot_mark_sharding(tensor(8, 8), str(row), "(1, 0)")
    assert text(copied) == str(row.get_op_sharding((1, 0)))


def test_shard_as(row):
    x = xs.mark_sharding_with_gradients(tensor(8, 8), row, (None, 1))
    given = tensor(8, 8)
    x, (y, nothing) = (
        xs.shard_as((x, None), (given, None))[0][0],
        xs.shard_as((x, None), (given, None))[1],
    )
    torch_xla.sync()
    assert text(x) == text(y) and nothing is None
    with pytest.raises(
        AssertionError, match="shard_as pairs the leaves of two structures of one form"
    ):
        xs.shard_as((x,), (x, x))


def test_wrapping_is_nothing(row):
    t = tensor(8, 8)
    assert (
        xs.wrap_if_sharded(t) is t
        and xs.unwrap_sharded_tensor(t) is t
        and xs.wrap_as_sharded_tensor(t) is t
    )
    assert xs.wrap_as_sharded_tensor(t, (1, N), (None, 1)).partition_spec == (None, 1)
    assert xs.wrap_if_sharded("text") == "text"


# Specs for loaders.


def test_sharding_spec(row):
    spec = xs.ShardingSpec(row, ("x", "y"))
    t, other = tensor(8, 8), tensor(8)
    assert spec.can_apply(t) and not spec.can_apply(other) and not spec.minibatch
    assert (
        str(spec.xla_spec(t).sharding) == str(row.get_op_sharding((0, 1)))
        and spec.xla_spec(other) is None
    )
    spec.apply(t)
    assert text(t) == str(row.get_op_sharding((0, 1)))
    with pytest.raises(
        AssertionError, match="the tensor to shard must be on device 'xla'; got one on cpu"
    ):
        spec.apply(torch.ones(8, 8))
    with pytest.raises(ValueError, match=r"^Axis name z is not defined in the given mesh"):
        xs.ShardingSpec(row, ("z", None))


# Manual regions.


def test_a_manual_region(row):
    xs.set_global_mesh(row)
    x = torch.zeros(8, 8).to("xla")
    block = xs.enable_manual_sharding(x, (0, 1))
    assert text(block.global_tensor) == "{manual}" and block.shape == (8, 8 // N)
    whole = xs.disable_manual_sharding(block + 1, (0, 1), x.shape).global_tensor
    assert whole.shape == (8, 8) and whole.tolist() == [[1.0] * 8] * 8


def test_a_manual_region_needs_a_mesh_and_blocks(row):
    with pytest.raises(AttributeError, match="a manual region needs a mesh; got None"):
        xs.enable_manual_sharding(tensor(8, 8), (0, 1))
    with pytest.raises(RuntimeError, match="Input tensor is not manual sharded"):
        xs.disable_manual_sharding(tensor(8, 8), (0, 1), (8, 8), mesh=row)


def test_marking_manual(row):
    with pytest.raises(RuntimeError, match="Marking any data tensors as manual is not supported"):
        xs._mark_manual_sharding(torch.zeros(3, 2).to("xla"))
    own = xs._mark_manual_sharding(torch.ones(3, 2).to("xla") + 1)
    assert own.shape == (3, 2) and text(own) == "{manual}"
    whole = xs.disable_manual_sharding(own, (0, None), (3 * N, 2), mesh=xs.get_1d_mesh())
    assert whole.tolist() == [[2.0, 2.0]] * 3 * N
    block = xs.enable_manual_sharding(tensor(8, 8), (0, 1), mesh=row) + 1
    assert xs._mark_manual_sharding(block) is block and text(block) == "{manual}"


# Linear layers.


def test_linear_layers_as_contractions():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(
                torch.nn.Linear(4, 6), torch.nn.Linear(6, 2, bias=False)
            )

        def forward(self, x):
            return self.inner(x)

    net = Net()
    x = torch.randn(3, 5, 4)
    right, weights = net(x).detach(), list(net.parameters())
    assert xs.apply_xla_patch_to_nn_linear(net) is net and all(
        type(layer) is xs.EinsumLinear for layer in net.inner
    )
    assert all(a is b for a, b in zip(net.parameters(), weights))
    del weights
    net.to("xla")
    torch.testing.assert_close(net(x.to("xla")).detach().cpu(), right, rtol=1e-4, atol=1e-5)
    layer = net.inner[0]
    for one in (
        xs.XLAPatchedLinear.apply(x.to("xla"), layer.weight, layer.bias),
        xs.xla_patched_nn_linear_forward(layer, x.to("xla")),
    ):
        right = torch.nn.functional.linear(x, layer.weight.cpu(), layer.bias.cpu())
        torch.testing.assert_close(one.cpu(), right, rtol=1e-4, atol=1e-5)


def test_a_barrier_in_backward():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).to("xla")
    xs.apply_backward_optimization_barrier(net[1])
    net(tensor(2, 4).requires_grad_()).sum().backward()
    assert "opt-barrier" in torch_xla._XLAC._get_xla_tensors_hlo([net[1].weight.grad])
