"""Loops over layers on meshes: values against eager torch, and what each device has and moves."""

import re

import pytest
import torch
from layer_models import WIDTH, Attention, Block, compare, given
from torch import nn

import spmd_core as spmd
from spmd_core.errors import WrapError
from spmd_core.modules.fully_shard import fully_shard

SPLITS = {
    "tensor": {"x": (None, None), "up.weight": ("b", "a"), "down.weight": ("a", "b")},
    "data": {"x": (("a", "b"), None), "up.weight": ("a", None), "up.bias": ("a",)},
    "buffers": {"x": ("b", "a"), "shift": ("a",), "scale": ("b",), "norm.weight": ("a",)},
    "one axis": {"x": ("x", None), "up.weight": (None, "x"), "down.weight": ("x", None)},
}


def on_mesh(mesh, spec, shape):
    """For `compare`: the result and the gradient of a marked `x`."""

    def compute(run, layers, device):
        leaf = given(torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape), device)
        if device == "xla":
            spmd.mark_sharding(leaf, mesh, spec)
        result = run(layers, leaf)
        return [result, *torch.autograd.grad(result.sin().sum(), leaf, retain_graph=True)]

    return compute


@pytest.mark.one_device
@pytest.mark.parametrize("split", SPLITS)
def test_marks(split, mesh_1d, mesh_2d):
    """Of parameters, buffers and activations, on sizes that divide and that do not."""
    marks = SPLITS[split]
    mesh = mesh_1d if split == "one axis" else mesh_2d

    def prepare(layers):
        for layer in layers:
            tensors = dict((*layer.named_parameters(), *layer.named_buffers()))
            for name, spec in marks.items():
                if name != "x":
                    spmd.mark_sharding(tensors[name], mesh, spec)

    layers = compare(Block, on_mesh(mesh, marks["x"], (5, WIDTH)), prepare=prepare)
    for name, parameter in layers[2].named_parameters():
        if name in marks:
            assert parameter.grad.sharding_spec == parameter.sharding_spec


@pytest.mark.one_device
@pytest.mark.parametrize("how", ["unit", "checkpointed", "two axes", "bfloat16"])
def test_units_of_fully_shard(how, mesh_1d, mesh_2d):
    axis, mesh, spec = ("b", mesh_2d, ("b",)) if how == "two axes" else ("x", mesh_1d, ("x",))
    rows = max(mesh.size(), 2) + (1 if how == "unit" else 0)
    options = {}
    if how == "bfloat16":
        options["mp_policy"] = torch.distributed.fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, output_dtype=torch.float32
        )

    def prepare(layers):
        for layer in layers:
            if how == "checkpointed":
                spmd.checkpoint_module(layer)
            if how == "two axes":
                spmd.mark_sharding(layer.up.weight, mesh, ("a", None))
            fully_shard(layer, mesh, axis=axis, **options)

    if how == "bfloat16":
        compute = on_mesh(mesh, spec, (rows, 5, 8))
        compare(Attention, compute, prepare=prepare, rtol=5e-2, atol=2e-2)
    else:
        compare(Block, on_mesh(mesh, spec, (rows, WIDTH)), prepare=prepare)


@pytest.mark.one_device
def test_a_plan_of_tensor_parallelism_and_rules(mesh):
    """On the layers of attention; the sequence of the other ones is split."""
    styles = spmd.dtensor

    def prepare(layers):
        plan = {
            "": styles.PrepareModuleInput(
                input_layouts=styles.Shard(1), desired_input_layouts=styles.Replicate()
            ),
            "qkv": styles.ColwiseParallel(output_layouts=styles.Replicate()),
            "out": styles.RowwiseParallel(output_layouts=styles.Shard(1)),
        }
        for layer in layers:
            styles.parallelize_module(layer, mesh, plan, axis="tensor")

    spec = ("data", "tensor", None)
    compare(Attention, on_mesh(mesh, spec, (4, 6, 8)), prepare=prepare, count=2)

    def by_rules(layers):
        rules = {r".*qkv\.weight": ("tensor", None), r".*out\.weight": (None, "data")}
        spmd.shard_module(layers, rules, mesh)

    compare(Attention, on_mesh(mesh, spec, (4, 6, 8)), prepare=by_rules, count=2)


def test_layers_with_other_marks_are_refused(mesh_1d):
    layers = nn.ModuleList(Block() for _ in range(3)).to("xla")
    for layer, spec in zip(layers, (("x", None), ("x", None), (None, "x")), strict=True):
        spmd.mark_sharding(layer.up.weight, mesh_1d, spec)
    x = torch.ones(4, WIDTH, device="xla")
    message = r"'up.weight' with the mark \(None, 'x'\) in layer 2 and the mark \('x', None\) in"
    with pytest.raises(WrapError, match=message):
        spmd.scan_layers(layers, x)
    spmd.clear_sharding(layers[2].up.weight)
    with pytest.raises(WrapError, match=r"with no mark in layer 2.*Mark this tensor in all layers"):
        spmd.scan_layers(layers, x)
    spmd.mark_sharding(layers[2].up.weight, mesh_1d, ("x", None))  # as it says
    assert spmd.scan_layers(layers, x).shape == x.shape


def step_text(layers, x):
    """The program that computes the gradients of all parameters, for one device."""
    spmd.scan_layers(layers, x).square().mean().backward()
    return spmd.debugging.hlo(*(p.grad for p in layers.parameters()))


def shapes(text, rank):
    """The shapes of float32 arrays of this rank in a program."""
    found = re.findall(r"f32\[((?:\d+,)*\d+)\]", text)
    return {s for s in (tuple(map(int, f.split(","))) for f in found) if len(s) == rank}


def block(wide):
    """A block without a tensor whose sizes are those of another one."""
    return nn.Sequential(nn.Linear(64, wide), nn.Tanh(), nn.Linear(wide, 64))


def test_the_gradient_of_a_stack_is_split_in_the_loop(mesh_2d, eight):
    layers = nn.ModuleList(block(48) for _ in range(3)).to("xla")
    for layer in layers:
        spmd.mark_sharding(layer[0].weight, mesh_2d, ("b", "a"))
        spmd.mark_sharding(layer[2].weight, mesh_2d, ("a", "b"))
    x = spmd.mark_sharding(torch.randn(32, 64, device="xla"), mesh_2d, ("a", None))
    text = step_text(layers, x)
    assert {(3, 24, 16), (3, 16, 24)} <= shapes(text, 3)
    whole = [(48, 64), (64, 48)]
    assert not shapes(text, 3) & {(3, *some) for some in (*whole, (24, 64), (64, 24), (48, 16))}
    loops = [line for line in text.splitlines() if " while(" in line]
    assert len(loops) == 2
    for (
        line
    ) in loops:  # nor one layer's gradient or parameter, unsplit, from iteration to iteration
        assert not shapes(line.split(" while(")[0], 2) & {*whole}


def test_a_unit_is_gathered_in_its_own_iteration(mesh_1d, eight):
    layers = nn.ModuleList(fully_shard(block(96), mesh_1d, axis="x") for _ in range(5))
    x = spmd.mark_sharding(torch.randn(16, 64, device="xla"), mesh_1d, ("x", None))
    text = step_text(layers, x)
    gathers = [
        line.split(" all-gather")[0]
        for line in text.splitlines()
        if re.search(r" all-gather(-start)?\(", line)
    ]
    sizes = {shape for line in gathers for rank in (1, 2, 3) for shape in shapes(line, rank)}
    # The CPU's gathers have the columns of a weight as the rows of its transpose.
    assert {(96, 64)} <= sizes <= {(96, 64), (96,), (64,)}
    assert len(gathers) <= 2 * 4  # each parameter in forward, and again in backward
    assert {(5, 12, 64), (5, 64, 12)} <= shapes(text, 3)
    assert not shapes(text, 3) & {(5, 96, 64), (5, 64, 96)}
    scattered = [
        shapes(line.split(" reduce")[0], 2)
        for line in text.splitlines()
        if " reduce-scatter(" in line
    ]
    # Both matrices: columns are scattered as rows of the transpose.
    assert scattered.count({(12, 64)}) == 2
