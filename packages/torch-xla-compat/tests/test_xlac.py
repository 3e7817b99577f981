"""Tests torch_xla._XLAC: the private functions that PyTorch/XLA's documents and tests call."""

import pytest
import torch

import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

xla = torch_xla._XLAC
N = xr.global_runtime_device_count()
several = pytest.mark.skipif(N == 1, reason="one device has nothing to split")


def test_a_cpu_tensor_has_no_sharding_here():
    with pytest.raises(RuntimeError, match="a tensor on device 'xla' is needed; got one on cpu"):
        xla._get_xla_sharding_spec(torch.ones(2))


@several
def test_texts_and_kinds(row, ids):
    t = torch.randn(8, 8).to("xla")
    assert (
        xla._get_xla_sharding_spec(t) == ""
        and xla._get_xla_sharding_type(t) is None
        and xla._get_xla_op_sharding(t) is None
    )
    xs.mark_sharding(t, row, (0, 1))
    assert (
        xla._get_xla_sharding_specs([t])
        == [f"{{devices=[1,{N}]{ids}}}"]
        == [str(xla._get_xla_op_sharding(t))]
    )
    assert xla._get_xla_sharding_type(t) is xs.ShardingType.TILED and xla._get_xla_op_sharding(
        t
    ) == row.get_op_sharding((0, 1))


@several
def test_what_the_partitioner_chose_is_seen_after_a_step(row):
    layer = torch.nn.Linear(128, 64).to("xla")
    xs.mark_sharding(layer.weight, row, (1, None))
    y = layer(torch.randn(2, 128).to("xla"))
    assert xla._get_xla_sharding_spec(y) == "" and xla._get_xla_sharding_spec(layer.bias) == ""
    torch_xla.sync()
    assert xla._get_xla_sharding_spec(y) == str(row.get_op_sharding((None, 1)))
    assert xla._get_xla_sharding_type(y) is y.sharding_type is xs.ShardingType.TILED
    assert xla._get_xla_op_sharding(y) == row.get_op_sharding((None, 1))


def test_programs_as_text():
    x = torch.ones(4).to("xla")
    y = x * 2 + 1
    assert "multiply" in xla._get_xla_tensors_hlo([y]) and "aten::mul" in xla._get_xla_tensors_text(
        [y]
    )
    same = torch.ones(4).to("xla") * 2 + 1
    assert xla._get_graph_hash([y]) == xla._get_graph_hash([same]) != xla._get_graph_hash([x * 3])


@pytest.mark.skipif(N != 8, reason="the shardings are those of a mesh of 2 x 4")
def test_programs_show_shardings_with_every_device_id():
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    w = xs.mark_sharding(torch.randn(8, 8).to("xla"), mesh, (1, 0))
    y = xs.mark_sharding(w + 1, mesh, ("x", None))
    text = xla._get_xla_tensors_hlo([y])
    assert 'custom_call_target="Sharding", sharding=' + xla._get_xla_sharding_spec(y) in text
    assert f"sharding={xla._get_xla_sharding_spec(w)}" in text and "<=[8]" not in text
    assert xla._get_xla_sharding_spec(y).startswith("{devices=[2,1,4]0,1,2,3,4,5,6,7 ")


def test_programs_of_tensors_that_are_computed():
    x = torch.ones(4).to("xla")
    y = x * 2
    torch_xla.sync()
    pending = y + 1
    assert "parameter(0)" in xla._get_xla_tensors_hlo([y])
    assert "aten::clone(input 0)" in xla._get_xla_tensors_text([y])
    assert "add" in xla._get_xla_tensors_hlo([y, pending])
    assert xla._get_graph_hash([y]) == xla._get_graph_hash([y])
    with pytest.raises(RuntimeError, match="a tensor on device 'xla' is needed; got one on cpu"):
        xla._get_xla_tensors_hlo([torch.ones(2)])


def test_buffers_and_what_was_noted_of_them():
    t = torch.ones(4).to("xla") + 1
    assert not xla._set_buffer_donation(t, True) and not xla._get_buffer_donation(t)
    torch_xla.sync()
    assert xla._set_buffer_donation(t, True) and xla._get_buffer_donation(t)
    assert xla._set_buffer_donation(t, False) and not xla._get_buffer_donation(t)
    xla._set_buffer_donation(t, True)
    doubled = t * 2
    torch_xla.sync()
    assert t.tolist() == [2.0] * 4 and doubled.tolist() == [4.0] * 4
    t.add_(1)
    torch_xla.sync()
    assert not xla._get_buffer_donation(t)


def test_the_switch_of_buffer_donors():
    assert not xla._xla_get_enable_alias_with_buffer_donor_config()
    with alias_with_buffer_donor_config():
        assert xla._xla_get_enable_alias_with_buffer_donor_config()
        with alias_with_buffer_donor_config(False):
            assert not xla._xla_get_enable_alias_with_buffer_donor_config()
        assert xla._xla_get_enable_alias_with_buffer_donor_config()
    assert not xla._xla_get_enable_alias_with_buffer_donor_config()


@several
def test_debug_information_follows_the_value(row):
    t = torch.randn(5, 8).to("xla")
    facts = xla._get_xla_tensor_debug_info(t).splitlines()
    assert {
        "Device: SPMD:0",
        "IR: None",
        "XLAData: None",
        "Tensor on host: with size [5, 8]",
        "ShardingSpec: None",
    } <= set(facts)
    xs.mark_sharding(t, row, (0, 1))
    facts = xla._get_xla_tensor_debug_info(t).splitlines()
    assert {
        "Tensor on host: None",
        "IR: xla::device_data",
        f"ShardingSpec: {row.get_op_sharding((0, 1))}",
    } <= set(facts)
    data = {
        "  Data Device: SPMD:0",
        "  Data Shape: f32[5,8]{1,0}",
        f"  OpSharding: {row.get_op_sharding((0, 1))}",
        f"  NumShards: {N}",
    }
    assert "XLAData: XLAShardedData: " in facts and data <= set(facts)
    assert "aten::add" in xla._get_xla_tensor_debug_info(t + 1)


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.bool, "pred[2]{0}"),
        (torch.bfloat16, "bf16[2]{0}"),
        (torch.int64, "s64[2]{0}"),
        (torch.uint8, "u8[2]{0}"),
        (torch.complex64, "c64[2]{0}"),
    ],
)
def test_shapes_in_xlas_words(dtype, text):
    t = torch.zeros(2, dtype=dtype).to("xla").clone()
    torch_xla.sync()
    assert f"Data Shape: {text}" in xla._get_xla_tensor_debug_info(t)


def test_ids_and_sizes():
    t, other = torch.ones(4, 2, device="xla"), torch.ones(4, 2, device="xla")
    assert (
        xla._xla_get_tensor_id(t)
        == xla._xla_get_tensor_id(t.view(8))
        != xla._xla_get_tensor_id(other)
    )
    assert (
        xla._get_xla_tensor_dimension_size(t, 1).item() == 2 and xla._get_number_of_elements(t) == 8
    )
    assert xla._xla_get_auto_sharding() is False


def test_execution_can_be_forbidden():
    x = torch.ones(2, device="xla") + 1
    xla._set_allow_execution(False)
    try:
        with pytest.raises(RuntimeError, match="after allow_execution"):
            x.tolist()
    finally:
        xla._set_allow_execution(True)
    assert x.tolist() == [2.0, 2.0]


def test_steps_by_their_private_names():
    x = torch.ones(2, device="xla") + 1
    xla._xla_step_marker("xla:0", [], wait=True)
    y = x + 1
    xla._xla_sync_multi([y], devices=[], wait=True)
    assert y.tolist() == [3.0, 3.0]


# Tensors of shards.


def test_a_tensor_of_shards():
    mesh = xs.Mesh(range(N), (N,))
    blocks = [torch.tensor([2 * i, 2 * i + 1]) for i in range(N)]
    t = xla._global_tensor_from_cpu_shards(blocks, mesh.get_op_sharding((0,)))
    assert t.tolist() == list(range(2 * N)) and t.dtype == torch.int64
    padded = (
        xla._global_tensor_from_cpu_shards(
            blocks, mesh.get_op_sharding((0,)), torch.Size([2 * N - 1])
        )
        if N > 1
        else t[:1]
    )
    assert padded.tolist() == list(range(2 * N - 1))
    assert xla._global_tensor_from_cpu_shards(
        [torch.arange(4)] * N, mesh.get_op_sharding((None,))
    ).tolist() == [0, 1, 2, 3]


@pytest.mark.skipif(N != 8, reason="a mesh of 2 x 4")
@pytest.mark.parametrize("spec", [(0, 1), (1, 0), (0, None)])
def test_a_tensor_of_shards_in_two_dims(spec):
    whole = torch.arange(64.0).reshape(8, 8)
    marked = xs.mark_sharding(whole.to("xla"), xs.Mesh(range(8), (2, 4)), spec)
    t = xla._global_tensor_from_cpu_shards(
        [s.data for s in marked.local_shards], xla._get_xla_op_sharding(marked)
    )
    assert torch.equal(t.cpu(), whole) and t.sharding_spec == marked.sharding_spec


@several
def test_shards_that_make_no_tensor():
    mesh = xs.Mesh(range(N), (N,))
    tiled, whole = mesh.get_op_sharding((0,)), mesh.get_op_sharding((None,))
    make, blocks = xla._global_tensor_from_cpu_shards, [torch.arange(2)] * N
    with pytest.raises(
        RuntimeError, match=f"there must be one shard for each device; got 1 for {N} devices"
    ):
        make(blocks[:1], whole)
    with pytest.raises(RuntimeError, match="shards have one shape, padding included"):
        make([*blocks[:-1], torch.arange(3)], tiled)
    for shape in (torch.Size([4 * N]), torch.Size([N, 2])):
        with pytest.raises(RuntimeError, match="the shards must make a tensor of the global shape"):
            make(blocks, tiled, shape)
    with pytest.raises(
        RuntimeError,
        match="every device holds the whole of a replicated tensor; got shards that differ",
    ):
        make([*blocks[:-1], torch.arange(2) + 1], whole)
    with pytest.raises(RuntimeError, match="a sharding's text is"):
        make([torch.ones(2, 2)] * N, tiled)


# Manual regions.


@several
def test_into_a_region_and_out(row):
    x = torch.zeros(8, 8).to("xla")
    with pytest.raises(RuntimeError, match="Input tensor is not sharded"):
        xla._spmd_full_to_shard_shape(x)
    xs.mark_sharding(x, row, (0, 1))
    block = xla._spmd_full_to_shard_shape(x)
    assert (
        block.shape == (8, 8 // N)
        and xla._get_xla_sharding_spec(block) == "{manual}"
        and xla._get_xla_sharding_type(block) is xs.ShardingType.MANUAL
    )
    block = block + 1
    xs._mark_manual_sharding(block)
    whole = xla._spmd_shard_to_full_shape(block, xla._get_xla_op_sharding(x), x.shape, x.dtype)
    assert (
        xla._get_xla_sharding_spec(whole) == xla._get_xla_sharding_spec(x)
        and whole.tolist() == [[1.0] * 8] * 8
    )
    with pytest.raises(RuntimeError, match="Input tensor is not manual sharded"):
        xla._spmd_shard_to_full_shape(x, xla._get_xla_op_sharding(x), x.shape)
    with pytest.raises(RuntimeError, match="blocks make a whole over the mesh of their region"):
        xla._spmd_shard_to_full_shape(
            block, xs.Mesh([1, 0], (2,)).get_op_sharding((0, None)), x.shape
        )
