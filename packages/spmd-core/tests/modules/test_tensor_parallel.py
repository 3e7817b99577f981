"""Plans of tensor parallelism: values of eager torch, torch's collectives, and torch's errors."""

import copy
import re

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from children import figures
from tensor_parallel_models import Attention, FeedForward, Transformer, plan
from tiers import crossed, exhaustive

import spmd_core as spmd
from spmd_core.dtensor import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)
from spmd_core.program import compile_cache

pytestmark = pytest.mark.usefixtures("nothing_pending")


def loss_of(model, tokens, labels):
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def compared(right, ours, mesh, batch=8, sequence=16):
    """The loss and the gradients of a model and of its parallel copy, which must be equal."""
    torch.manual_seed(1)
    vocabulary = right.tok_embeddings.num_embeddings
    tokens, labels = torch.randint(vocabulary, (2, batch, sequence))
    correct = loss_of(right, tokens, labels)
    correct.backward()
    split = [spmd.mark_sharding(t.to("xla"), mesh, ("data",)) for t in (tokens, labels)]
    loss = loss_of(ours, *split)
    loss.backward()
    torch.testing.assert_close(loss.detach().cpu(), correct.detach(), rtol=1e-5, atol=1e-6)
    for (name, p), q in zip(right.named_parameters(), ours.parameters()):
        assert q.grad.sharding == q.sharding, name
        torch.testing.assert_close(
            q.grad.cpu(),
            p.grad,
            rtol=1e-4,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("kind", "sizes"),
    crossed(
        ["tensor", "sequence"],
        [
            {},
            # neither vocabulary, hidden units, batch nor sequence is a multiple of the axes
            {"vocabulary": 65, "hidden": 50, "batch": 7, "sequence": 13},
        ],
    ),
)
def test_plans_have_the_values_of_eager_torch(mesh, kind, sizes):
    torch.manual_seed(0)
    data = {name: sizes[name] for name in ("batch", "sequence") if name in sizes}
    right = Transformer(**{name: n for name, n in sizes.items() if name not in data})
    ours = spmd.dtensor.parallelize_module(copy.deepcopy(right), mesh, plan(kind), axis="tensor")
    compared(right, ours, mesh, **data)


def test_torchs_own_function_on_a_mesh_of_this_type(mesh):
    torch.manual_seed(0)
    right = Transformer()
    shape = tuple(mesh.mesh_shape)
    device_mesh = spmd.dtensor.init_device_mesh("xla", shape, mesh_dim_names=("data", "tensor"))
    ours = torch_parallel.parallelize_module(
        copy.deepcopy(right).to("xla"), device_mesh["tensor"], plan("sequence")
    )
    assert ours.layers[0].attention.wq.weight.partition_spec == ("tensor", None)
    compared(right, ours, mesh)


@pytest.mark.parametrize("kind", [exhaustive("tensor"), "sequence"])
def test_fsdp_beside_tensor_parallelism(mesh, kind):
    """Each gets its slice of one mesh, as in torch."""
    torch.manual_seed(0)
    right = Transformer()
    shape = tuple(mesh.mesh_shape)
    device_mesh = spmd.dtensor.init_device_mesh("xla", shape, mesh_dim_names=("data", "tensor"))
    ours = spmd.dtensor.parallelize_module(copy.deepcopy(right), device_mesh["tensor"], plan(kind))
    for layer in ours.layers:
        spmd.fully_shard(layer, device_mesh["data"])
    spmd.fully_shard(ours, device_mesh["data"])
    assert ours.layers[0].attention.wo.weight.partition_spec == ("data", "tensor")
    compared(right, ours, mesh)


def test_hybrid_fsdp_beside_tensor_parallelism(eight):
    torch.manual_seed(0)
    right = Transformer(heads=2)
    names = ("replicate", "shard", "tensor")
    device_mesh = spmd.dtensor.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=names)
    ours = spmd.dtensor.parallelize_module(
        copy.deepcopy(right), device_mesh["tensor"], plan("sequence")
    )
    hybrid = device_mesh["replicate", "shard"]
    for layer in ours.layers:
        spmd.fully_shard(layer, hybrid)
    spmd.fully_shard(ours, hybrid)
    compared(right, ours, spmd.Mesh(range(8), (4, 2), ("data", "tensor")))
    with pytest.raises(
        spmd.errors.MeshError, match="fully_shard takes a DeviceMesh of one dimension"
    ):
        spmd.fully_shard(Transformer(), device_mesh)


def collectives(ours, mesh):
    """The collectives over `tensor` in a step, as (kind, bytes of a device's result)."""
    tokens, labels = torch.randint(64, (2, 8, 16))
    split = [spmd.mark_sharding(t.to("xla"), mesh, ("data",)) for t in (tokens, labels)]
    spmd.sync()
    loss = loss_of(ours, *split)
    loss.backward()
    found = spmd.debugging.collectives(loss, *(p.grad for p in ours.parameters()))
    return [(c.kind, c.result_bytes) for c in found if c.axes == ("tensor",)]


# A device's part of an activation of 8 x 16 x 32 float32: whole, and in quarters. What a loss
# parallel moves, and gradients of parameters of one dim, is smaller than both.
WHOLE, QUARTER = 4 * 16 * 32 * 4, 16 * 32 * 4


def test_tensor_parallelism_all_reduces_twice_a_block_each_way(eight, mesh):
    ours = spmd.dtensor.parallelize_module(Transformer(), mesh, plan("tensor"), axis="tensor")
    large = [c for c in collectives(ours, mesh) if c[1] >= QUARTER]
    # 2 blocks: attention and MLP, forward and backward; the embedding, and the gradient before
    # the output layer.
    assert large == [("all-reduce", WHOLE)] * 10


@pytest.mark.parametrize("reshards", [True, False])
def test_sequence_parallelism_gathers_and_scatters_instead(eight, mesh, reshards):
    """In backward, the inputs of attention, of the MLPs and of the output layer once more."""
    ours = spmd.dtensor.parallelize_module(
        Transformer(), mesh, plan("sequence"), axis="tensor", reshard_after_forward=reshards
    )
    large = sorted(c for c in collectives(ours, mesh) if c[1] >= QUARTER)
    gathers = 15 if reshards else 10
    assert large == [("all-gather", WHOLE)] * gathers + [("reduce-scatter", QUARTER)] * 10


_FIGURES = """
import json
import torch
import torch.nn.functional as F
from tensor_parallel_models import Transformer, plan


spmd.simulate(8)
spmd.use_spmd()
mesh = spmd.Mesh(range(8), (2, 4), ("data", "tensor"))
found = {}
for name, kind, reshards in (
    ("tensor", "tensor", True), ("kept", "sequence", False), ("sharded", "sequence", True)
):
    model = Transformer(width=128, hidden=256, layers=2)
    spmd.dtensor.parallelize_module(
        model, mesh, plan(kind), axis="tensor", reshard_after_forward=reshards
    )
    tokens = spmd.mark_sharding(torch.zeros(8, 64, dtype=torch.int64).to("xla"), mesh, ("data",))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    spmd.sync()
    found[name] = spmd.metrics.programs()[-1].temp_bytes
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_sequence_parallelism_saves_memory(eight):
    """What a block keeps between its layers is in shards."""
    found = figures(_FIGURES)
    assert found["sharded"] < found["kept"] < found["tensor"]
    # An activation of a device: 4 x 64 x 128 float32. In each of 2 blocks, the inputs of two norms
    # and of two pairs of layers; three quarters of them.
    assert found["tensor"] - found["sharded"] > 0.5 * 2 * 4 * (4 * 64 * 128 * 4)


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_a_step_returns_no_activation_while_its_loss_is_held(mesh, kind):
    ours = spmd.dtensor.parallelize_module(Transformer(), mesh, plan(kind), axis="tensor")
    tokens, labels = torch.randint(64, (2, 8, 16))
    split = [spmd.mark_sharding(t.to("xla"), mesh, ("data",)) for t in (tokens, labels)]
    spmd.sync()
    loss = loss_of(ours, *split)
    loss.backward()
    spmd.sync()
    assert len(compile_cache.newest().graph.outputs) == len([loss, *ours.parameters()])


def test_no_plan_gathers_the_logits(eight, mesh):
    """The rest: numbers for each token, and gradients of the norms' weights."""
    ours = spmd.dtensor.parallelize_module(Transformer(), mesh, plan("sequence"), axis="tensor")
    small = [c for c in collectives(ours, mesh) if c[1] < QUARTER]
    tokens = 4 * 16
    assert {kind for kind, _ in small} == {"all-reduce"}
    assert max(size for _, size in small) <= max(2 * tokens * 4, 5 * 32 * 4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"reduction": "none"},
        {"weight": torch.linspace(0.1, 2, 64)},
        {"ignore_index": 3},
        {"probabilities": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_a_loss_over_split_classes(mesh, num_devices, options):
    torch.manual_seed(0)
    options = dict(options)
    logits, labels = torch.randn(16, 64), torch.randint(64, (16,))
    if options.pop("probabilities", False):
        labels = torch.randn(16, 64).softmax(-1)
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf, labels, **options).sum().backward()
    ours = spmd.mark_sharding(logits.to("xla"), mesh, ("data", "tensor")).requires_grad_()
    on_device = {k: v.to("xla") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with spmd.dtensor.loss_parallel():
        loss = F.cross_entropy(ours, labels.to("xla"), **on_device).sum()
        loss.backward()
    if num_devices == 8:
        found = spmd.debugging.collectives(loss, ours.grad)
        assert all(c.kind == "all-reduce" and c.result_bytes <= 16 * 8 for c in found)
    torch.testing.assert_close(ours.grad.cpu(), leaf.grad)


def test_activations_under_autocast_and_create_graph(mesh):
    torch.manual_seed(0)
    right = FeedForward(16, 32)
    ours = spmd.dtensor.parallelize_module(
        copy.deepcopy(right),
        mesh,
        {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()},
        axis="tensor",
    )
    x = torch.randn(8, 16)
    penalties = []
    for net, given in ((right, x), (ours, x.to("xla"))):
        leaf = given.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(leaf).square().sum(), leaf, create_graph=True)
        slope.square().sum().backward()
        penalties.append([leaf.grad.cpu(), *(p.grad.cpu() for p in net.parameters())])
    for got, correct in zip(*reversed(penalties)):
        torch.testing.assert_close(got, correct, rtol=1e-4, atol=1e-4)
    with torch.autocast("xla", torch.bfloat16):
        half = ours(x.to("xla"))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.detach().float().cpu(), right(x).detach(), rtol=0.05, atol=0.05)


def test_local_sizes_are_explained(eight, mesh):
    ours = Attention(32, 4)
    plan = {name: ColwiseParallel() for name in ("wq", "wk", "wv")}
    spmd.dtensor.parallelize_module(ours, mesh, plan, axis="tensor")
    x = ours.wq(torch.randn(2, 5, 32).to("xla"))
    with pytest.raises(RuntimeError, match="invalid for input of size") as caught:
        x.view(2, 5, ours.heads // 4, 8)
    assert re.search(r"4 times the elements.* do not divide its sizes", caught.value.__notes__[0])
    with pytest.raises(RuntimeError) as caught:
        x.view(2, 5, 7)
    assert not hasattr(caught.value, "__notes__")


def test_what_plans_refuse(mesh, mesh_1d):
    model = Transformer()
    with pytest.raises(
        spmd.errors.MeshError,
        match=r"with 2 axes\. Name one by parallelize_module\(\.\.\., axis=\)",
    ):
        spmd.dtensor.parallelize_module(model, mesh, plan("tensor"))
    with pytest.raises(
        spmd.errors.MeshError, match=r"axis names one axis of the mesh; got 5 .*'data', 'tensor'"
    ):
        spmd.dtensor.parallelize_module(model, mesh, plan("tensor"), axis=5)
    with pytest.raises(
        ValueError, match=r"'wx' matches none of wk, wo, wq, wv\. Near names: layers"
    ):
        spmd.dtensor.parallelize_module(
            model, mesh, {**plan("tensor"), "layers.*.attention.wx": ColwiseParallel()}, axis=1
        )
    with pytest.raises(ValueError, match="matches none of no modules"):
        spmd.dtensor.parallelize_module(model, mesh_1d, {"norm.scale": SequenceParallel()})
    with pytest.raises(TypeError, match=r"a plan is a style .* got \{'norm': 1\}"):
        spmd.dtensor.parallelize_module(model, mesh_1d, {"norm": 1})
    with pytest.raises(
        NotImplementedError, match=r"RowwiseParallel is for nn.Linear and nn.Embedding; got Norm"
    ):
        spmd.dtensor.parallelize_module(
            model, mesh_1d, {"output": ColwiseParallel(), "norm": RowwiseParallel()}
        )
    assert model.output.weight.device.type == "cpu"
    with pytest.warns(UserWarning, match="changes nothing without a plan"):
        assert spmd.dtensor.parallelize_module(model, mesh_1d) is model
