"""torch's styles of tensor parallelism: of one module, of its inputs and results, and of users."""

import copy

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.tensor import Partial

import spmd_core as spmd
from spmd_core.dtensor import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
)


class Pair(nn.Module):
    """Two inputs, one by name, and two results."""

    def forward(self, x, *, scale):
        return x * scale, x + 1


def test_inputs_and_results_are_redistributed(mesh):
    style = PrepareModuleInputOutput(
        input_layouts=(Shard(0),),
        desired_input_layouts=(Replicate(),),
        input_kwarg_layouts={"scale": Replicate()},
        desired_input_kwarg_layouts={"scale": Shard(-1)},
        output_layouts=(Replicate(), None),
        desired_output_layouts=(Shard(1), None),
    )
    ours = spmd.dtensor.parallelize_module(Pair(), mesh, style, axis="tensor")
    x, scale = torch.randn(8, 4, requires_grad=True), torch.randn(8, 4)
    leaf = x.detach().to("xla").requires_grad_()
    product, total = ours(leaf, scale=scale.to("xla"))
    (product.sum() + total.square().sum()).backward()
    right = Pair()(x, scale=scale)
    (right[0].sum() + right[1].square().sum()).backward()
    torch.testing.assert_close(product.detach().cpu(), right[0].detach())
    torch.testing.assert_close(leaf.grad.cpu(), x.grad)


def test_few_rows_are_gathered_and_not_their_weight(eight):
    mesh = spmd.Mesh(range(8), (8,), ("tensor",))
    layer = nn.Linear(64, 256, bias=False).to("xla").requires_grad_(False)
    spmd.dtensor.parallelize_module(
        layer, mesh, ColwiseParallel(output_layouts=Replicate()), axis="tensor"
    )
    moved = spmd.debugging.collectives(layer(torch.ones(4, 1, 64, device="xla")))
    assert [(c.kind, c.result_bytes) for c in moved] == [("all-gather", 4 * 256 * 4)]


@pytest.mark.parametrize("reshards", [True, False])
def test_sequences_are_gathered_again_and_their_gradient_is_reduced(eight, reshards):
    mesh = spmd.Mesh(range(8), (8,), ("tensor",))
    layer = nn.Linear(8, 16, bias=False).to("xla")
    spmd.dtensor.parallelize_module(
        layer,
        mesh,
        ColwiseParallel(input_layouts=Shard(1)),
        axis="tensor",
        reshard_after_forward=reshards,
    )
    x = spmd.mark_sharding(torch.randn(2, 16, 8).to("xla"), mesh, (None, "tensor"))
    x.requires_grad_()
    layer(x).square().sum().backward()
    moved = sorted(c.kind for c in spmd.debugging.collectives(x.grad, layer.weight.grad))
    assert moved == ["all-gather"] * (1 + reshards) + ["reduce-scatter"]


def test_a_column_layer_of_an_embedding_and_an_input_by_name(mesh):
    torch.manual_seed(0)
    right = nn.ModuleDict({"table": nn.Embedding(10, 12), "layer": nn.Linear(12, 8)})
    ours = spmd.dtensor.parallelize_module(
        copy.deepcopy(right),
        mesh,
        {"table": ColwiseParallel(), "layer": RowwiseParallel()},
        axis="tensor",
    )
    assert ours["table"].weight.partition_spec == (None, "tensor")
    tokens = torch.randint(10, (4, 6))
    found = ours["layer"](input=ours["table"](tokens.to("xla")))
    torch.testing.assert_close(
        found.detach().cpu(), right["layer"](right["table"](tokens)).detach()
    )


def test_a_style_of_the_users(mesh):
    class Doubled(torch_parallel.ParallelStyle):
        def _apply(self, module, device_mesh):
            assert device_mesh.mesh_dim_names == ("tensor",)
            module.register_forward_hook(lambda module, args, output: output * 2)
            return module

    ours = spmd.dtensor.parallelize_module(nn.Identity(), mesh, Doubled(), axis="tensor")
    assert ours(torch.ones(2)).tolist() == [2.0, 2.0]


def test_what_styles_refuse(mesh_1d, num_devices):
    def parallel(module, style):
        return spmd.dtensor.parallelize_module(module, mesh_1d, style)

    with pytest.raises(
        NotImplementedError, match=r"sharded or replicated along an axis; got Partial\(sum\)"
    ):
        parallel(nn.Linear(2, 2), ColwiseParallel(output_layouts=Partial()))
    x = torch.ones(2, 2, device="xla")
    two = PrepareModuleInput(input_layouts=(None, None), desired_input_layouts=(None, None))
    with pytest.raises(ValueError, match="got 1 inputs of Identity and 2 layouts"):
        parallel(nn.Identity(), two)(x)
    results = PrepareModuleOutput(output_layouts=(None, None), desired_output_layouts=(None, None))
    with pytest.raises(ValueError, match="got 1 results of Identity and 2 layouts"):
        parallel(nn.Identity(), results)(x)
    with pytest.raises(IndexError, match="got dim 2 for a tensor of rank 2"):
        parallel(nn.Identity(), SequenceParallel(sequence_dim=2))(x)
    if num_devices > 1:
        layer = nn.Linear(4, 4).to("xla")
        spmd.mark_sharding(layer.weight, mesh_1d, (None, "x"))
        with pytest.raises(
            spmd.errors.PartitionSpecError, match=r"with \(None, 'x'\) where .* \('x', None\)"
        ):
            parallel(layer, ColwiseParallel())


def test_a_custom_style_needs_names(num_devices):
    class Own(torch_parallel.ParallelStyle):
        def _apply(self, module, device_mesh):
            return module

    unnamed = spmd.Mesh(range(num_devices), (1, num_devices))
    with pytest.raises(
        spmd.errors.MeshError, match="a style of your own gets a slice of a DeviceMesh, by name"
    ):
        spmd.dtensor.parallelize_module(nn.Identity(), unnamed, Own(), axis=1)
    one_axis = spmd.Mesh(range(num_devices), (num_devices,))
    spmd.dtensor.parallelize_module(nn.Identity(), one_axis, Own())
