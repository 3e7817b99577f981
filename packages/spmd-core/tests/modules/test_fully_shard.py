"""Fully sharded data parallelism against eager torch on the CPU.

Training, precision, where parameters are stored, and what is refused.
"""

import copy
import inspect
import math
from functools import partial

import pytest
import torch
from fsdp_models import Block, D, Mixed, Returning, Tied, check, cross_entropy, in_blocks
from tiers import exhaustive
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import spmd_core as spmd
from spmd_core import metrics
from spmd_core.modules.checkpointing import checkpoint_module
from spmd_core.modules.fully_shard import SpmdFullyShardedDataParallel, fully_shard
from spmd_core.modules.wrap_policies import always_wrap_policy, transformer_auto_wrap_policy
from spmd_core.program import compile_cache


@pytest.fixture
def mesh(num_devices):
    return spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))


# --- Training as eager torch does -----------------------------------------------------------------


@pytest.mark.one_device
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_blocks_train_as_eager_torch(mesh, options):
    check(nn.Sequential(Block(), Block()), torch.randn(16, 5, D), mesh, in_blocks(mesh, **options))


def test_hybrid_sharding(hybrid):
    options = {"extra_data_axis": "replicate"}
    batch = ("replicate", "fsdp")
    ours = check(
        nn.Sequential(Block(), Block()),
        torch.randn(16, 5, D),
        hybrid,
        in_blocks(hybrid, **options),
        batch=batch,
    )
    # Split over axis `fsdp`, replicated over axis `replicate`.
    assert (
        ours[0].up.weight.partition_spec == ("fsdp", None)
        and ours[0].up.weight.sharding.num_shards == hybrid.mesh_shape[1]
    )


@pytest.mark.parametrize("rows", [16, 6])
def test_tied_weights(mesh, rows):
    """Six rows do not divide over eight devices: the partitioner then sums the gradients."""
    ids = torch.randint(0, 40, (rows, 5))
    ours = check(Tied(), ids, mesh, in_blocks(mesh), loss_of=cross_entropy)
    assert ours.head.weight is ours.embedding.weight


@pytest.mark.slow
def test_every_kind_of_layer_in_one_unit_with_uneven_parameters(mesh):
    ours = check(
        Mixed(),
        torch.randn(8, 3, 6, 6),
        mesh,
        lambda m: fully_shard(m, mesh),
        rtol=1e-3,
        exact_gradients=False,
    )
    assert ours.norm.running_mean.device.type == "xla" and ours.scale.partition_spec == ()


def test_nested_units_and_a_shared_block(mesh):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.own = nn.Sequential(Block(), nn.Linear(D, D)), nn.Linear(D, D)

        def forward(self, x):
            return self.inner(self.own(self.inner(x)))  # the same unit twice

    def shard(model):
        fully_shard(model.inner[0], mesh)
        fully_shard(model.inner, mesh)
        return fully_shard(model, mesh)

    check(Outer(), torch.randn(16, D), mesh, shard)


def tiny_llama(**options):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        **options,
    )
    return LlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "checkpointed"), [exhaustive(False, False), exhaustive(True, False), (True, True)]
)
def test_a_llama_wrapped_by_policy(mesh, tied, checkpointed):
    model = tiny_llama(tie_word_embeddings=tied)
    if checkpointed:
        # transformers 5 renamed this method.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.train()
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    ids = torch.randint(0, 64, (8, 12))
    check(
        model,
        ids,
        mesh,
        lambda m: SpmdFullyShardedDataParallel(m, mesh, auto_wrap_policy=policy),
        loss_of=lambda out, ids: cross_entropy(out.logits, ids),
    )


@pytest.mark.parametrize("how", ["module", "outside", "reentrant"])
def test_checkpointed_blocks(mesh, how):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks = nn.Linear(D, D), nn.ModuleList([Block(), Block()])

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = (
                    block(x)
                    if how == "module" or x.device.type == "cpu"
                    else checkpoint(block, x, use_reentrant=how == "reentrant")
                )
            return x

    def shard(model):
        if how == "module":
            for block in model.blocks:
                assert checkpoint_module(block) is block
        return in_blocks(mesh)(model)

    check(Model(), torch.randn(16, D), mesh, shard)


def test_a_checkpointed_block_with_an_argument_that_needs_no_gradient(mesh):
    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(D, D)

        def forward(self, x, factor):
            return (self.inside(x) * factor).tanh()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(D, D), Rotated()

        def forward(self, x):
            return self.block(self.first(x), torch.linspace(0, 1, D, device=x.device))

    def shard(model):
        fully_shard(checkpoint_module(model.block), mesh)
        return fully_shard(model, mesh)

    check(Model(), torch.randn(16, D), mesh, shard)


def test_a_checkpoint_replays_random_numbers(mesh):
    block = checkpoint_module(nn.Sequential(nn.Linear(D, D, bias=False), nn.Dropout(0.5)))
    fully_shard(block, mesh)
    x = torch.ones(16, D, device="xla")
    out = block(x)
    out.sum().backward()
    kept = (out != 0).float().cpu()
    torch.testing.assert_close(block[0].weight.grad.cpu(), 2 * kept.sum(0)[:, None].expand(D, D))


def test_second_derivatives(mesh):
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))
    ours = fully_shard(copy.deepcopy(model), mesh)
    found = []
    for m, device in ((model, "cpu"), (ours, "xla")):
        x = torch.linspace(-1, 1, 8 * D).view(8, D).to(device).requires_grad_()
        (grad,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        found.append([m[0].weight.grad.cpu(), m[2].weight.grad.cpu()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_backward_twice_and_accumulation(mesh):
    model = nn.Sequential(Block(), Block())
    ours = in_blocks(mesh)(copy.deepcopy(model))
    x = torch.randn(16, D)
    for m, given in ((model, x), (ours, x.to("xla"))):
        loss = m(given).square().mean()
        loss.backward(retain_graph=True)
        spmd.sync()
        loss.backward()
        m(given).square().mean().backward()
    for (name, p), (_, q) in zip(model.named_parameters(), ours.named_parameters()):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_host_read_between_forward_and_backward(mesh):
    model = nn.Sequential(Block(), Block())
    ours = in_blocks(mesh)(copy.deepcopy(model))
    x = torch.randn(16, D)
    right, loss = model(x).square().mean(), ours(x.to("xla")).square().mean()
    assert loss.item() == pytest.approx(right.item(), rel=1e-5)
    right.backward()
    loss.backward()
    torch.testing.assert_close(
        ours[0].up.weight.grad.cpu(), model[0].up.weight.grad, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
def test_the_gradient_of_an_embedding(mesh, by_frequency, padding):
    """A gradient scaled by frequency is not a sum over devices: each would use its own counts."""
    model = nn.Embedding(10, 8, padding_idx=padding, scale_grad_by_freq=by_frequency)
    ours = fully_shard(copy.deepcopy(model), mesh)
    ids = torch.randint(0, 4, (16, 3))
    ramp = torch.linspace(-1, 1, 16 * 3 * 8).view(16, 3, 8)
    (model(ids) * ramp).sum().backward()
    (ours(ids.to("xla")) * ramp.to("xla")).sum().backward()
    spmd.sync()
    is_scattered = "reduce-scatter(" in compile_cache.newest().compiled.as_text()
    assert is_scattered == (mesh.size() > 1 and not by_frequency)
    torch.testing.assert_close(ours.weight.grad.cpu(), model.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(16,), (16, 16)])
def test_an_input_without_a_batch(mesh, shape):
    """The first dim is not a batch here, so gradients are not sums over it.

    Either a linear layer gets one sample, or a norm covers every dim.
    """
    model = nn.Linear(16, 16) if len(shape) == 1 else nn.LayerNorm(shape)
    ours = fully_shard(copy.deepcopy(model), mesh)
    x = torch.randn(shape)
    model(x).pow(3).sum().backward()
    ours(x.to("xla")).pow(3).sum().backward()
    for p, q in zip(model.parameters(), ours.parameters()):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-4)


def test_hooks_for_saved_tensors_from_outside_still_see_the_others(mesh):
    seen = []

    def pack(t):
        seen.append(tuple(t.shape))
        return t

    block = fully_shard(nn.Linear(D, 2 * D, bias=False), mesh)
    x = torch.randn(16, D, device="xla", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = block(x)
    assert seen == [(16, D)]  # only the input, not the weight
    out.sum().backward()
    torch.testing.assert_close(x.grad, block.weight.sum(0).expand(16, D), rtol=1e-4, atol=1e-4)


# --- Precision ------------------------------------------------------------------------------------


def test_mixed_precision(mesh):
    model = nn.Sequential(Block(), Block())
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    seen = []
    ours = in_blocks(mesh, mp_policy=policy)(copy.deepcopy(model))
    ours[0].up.register_forward_pre_hook(
        lambda module, args: seen.append((module.weight.dtype, args[0].dtype))
    )
    x = torch.randn(16, D)
    out = ours(x.to("xla"))
    assert seen == [(torch.bfloat16, torch.bfloat16)] and out.dtype == torch.float32
    out.square().mean().backward()
    model(x).square().mean().backward()
    grad = ours[0].up.weight.grad
    assert grad.dtype == torch.float32
    torch.testing.assert_close(grad.cpu(), model[0].up.weight.grad, rtol=0.1, atol=2e-3)


def test_mixed_precision_of_a_parameter_that_the_axis_does_not_split(mesh):
    """As the bias of a layer whose input dims are split over another axis."""
    layer = nn.Linear(D, D).to("xla")
    spmd.mark_sharding(layer.bias, mesh, ())
    fully_shard(layer, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    out = layer(torch.randn(16, D).to("xla"))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.bias.grad.dtype == torch.float32 and layer.bias.grad.tolist() == [16.0] * D


def test_autocast_keeps_no_converted_copy(mesh):
    block = fully_shard(nn.Linear(D, D), mesh)
    saved = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t),
        torch.autocast("xla", torch.bfloat16),
    ):
        out = block(torch.randn(16, D, device="xla", requires_grad=True))
    assert len(saved) == 1  # the input; backward converts the weight again from its shard
    out.float().sum().backward()
    assert block.weight.grad.dtype == torch.float32


# --- Where parameters live ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((16, 32), 1), ((32, 16), 0), ((16, 16), 0), ((48, 33), 0), ((7, 9), None), ((3,), None)],
)
def test_the_largest_dim_that_divides_is_split(mesh, num_devices, shape, dim):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(float(math.prod(shape))).view(shape))

        def forward(self):
            return self.weight * 2

    expected = (
        max(range(len(shape)), key=lambda d: shape[d]) if dim is None or num_devices == 1 else dim
    )
    module = fully_shard(Holder(), mesh)
    assert module.weight.partition_spec == tuple(
        "fsdp" if d == expected else None for d in range(len(shape))
    )
    torch.testing.assert_close(
        module().cpu(), torch.arange(float(math.prod(shape))).view(shape) * 2
    )
    assert module.weight.local_shards[0].data.shape[expected] == -(-shape[expected] // num_devices)


def test_marks_are_kept_and_split_further(mesh_2d):
    mesh = spmd.Mesh(mesh_2d.device_ids, mesh_2d.mesh_shape, ("fsdp", "tensor"))
    model = nn.Sequential(nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D))
    ours = copy.deepcopy(model).to("xla")
    spmd.mark_sharding(ours[0].weight, mesh, ("tensor", "fsdp"))
    spmd.mark_sharding(ours[0].bias, mesh, ("tensor",))
    spmd.mark_sharding(ours[2].weight, mesh, (None, "tensor"))
    spmd.mark_sharding(ours[2].bias, mesh, ())
    fully_shard(ours, mesh)
    assert [p.partition_spec for p in ours.parameters()] == [
        ("tensor", "fsdp"),
        (("tensor", "fsdp"),),
        ("fsdp", "tensor"),
        (None,),
    ]
    x = torch.randn(16, D)
    model(x).square().mean().backward()
    ours(spmd.mark_sharding(x.to("xla"), mesh, ("fsdp",))).square().mean().backward()
    for p, q in zip(model.parameters(), ours.parameters()):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-5)
        assert q.grad.sharding == q.sharding


def test_names_class_and_signature_stay(mesh):
    model = Tied()
    expected, signature = model.state_dict(), inspect.signature(model.forward)
    ours = in_blocks(mesh)(copy.deepcopy(model))
    assert type(ours) is Tied and inspect.signature(ours.forward) == signature
    assert list(ours.state_dict()) == list(expected)
    again = in_blocks(mesh)(Tied())
    again.load_state_dict(ours.state_dict())
    ids = torch.randint(0, 40, (8, 5))
    torch.testing.assert_close(again(ids.to("xla")).cpu(), model(ids), rtol=1e-4, atol=1e-5)
    assert again.blocks[0].up.weight.sharding == ours.blocks[0].up.weight.sharding
    model.load_state_dict({name: t.cpu() for name, t in ours.state_dict().items()})


def test_a_deep_copy_runs_its_own_parameters(mesh):
    ours = in_blocks(mesh)(nn.Sequential(checkpoint_module(Block()), Block()))
    copied = copy.deepcopy(ours)
    x = torch.randn(8, D, device="xla")
    before = ours(x).cpu()
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert copied(x).sub(x).abs().max().item() == 0
    torch.testing.assert_close(ours(x).cpu(), before)


def test_a_meta_module_is_made_on_the_device_in_shards(mesh, num_devices):
    with torch.device("meta"):
        model = nn.Sequential(Block(256), Block(256))
    uploaded, compiles = metrics.counter("uploaded_bytes"), metrics.counter("compiles")
    ours = in_blocks(mesh)(model)
    spmd.sync(wait=True)
    assert metrics.counter("uploaded_bytes") == uploaded
    made = metrics.programs(since=compiles)
    weight = 4 * 256 * 512
    # One program makes all equal blocks. No device holds more than its part of the weights and of
    # the random bits that they come from.
    assert len(made) == 1 and made[0].executions == 2
    assert made[0].output_bytes < 2.1 * weight / num_devices
    if num_devices == 8:
        assert made[0].temp_bytes < weight
    reference = nn.Sequential(Block(256), Block(256))
    for (name, p), (_, q) in zip(reference.named_parameters(), ours.named_parameters()):
        assert q.device.type == "xla" and q.sharding is not None and isinstance(q, nn.Parameter)
        assert q.std(unbiased=False).item() == pytest.approx(
            p.std(unbiased=False).item(), rel=0.2, abs=1e-6
        ), name
    assert not torch.equal(ours[0].up.weight.cpu(), ours[1].up.weight.cpu())


def test_outside_of_a_unit_nothing_is_gathered(mesh):
    """Between steps, reads and writes of a parameter use the shard itself."""
    block = fully_shard(Block(), mesh)
    x = torch.randn(8, D, device="xla")
    block(x).sum().backward()
    assert isinstance(block.up.weight, nn.Parameter) and block.up.weight.is_leaf
    with pytest.raises(RuntimeError, match="size"):
        block(torch.randn(8, D + 1, device="xla"))
    assert isinstance(block.up.weight, nn.Parameter), (
        "an error in forward leaves the parameters in place"
    )


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [fully_shard, SpmdFullyShardedDataParallel])
def test_errors_about_mesh_and_module(mesh, num_devices, shard):
    with pytest.raises(
        spmd.errors.MeshError,
        match=r"needs a mesh; got None, and no global mesh is set.*set_global_mesh",
    ):
        shard(Block())
    with pytest.raises(spmd.errors.MeshError, match=r"needs a mesh; got int"):
        shard(Block(), 8)
    with pytest.raises(
        spmd.errors.MeshError,
        match=r"needs an axis 'fsdp'.*got Mesh.*\('x',\).*Name one of its axes",
    ):
        shard(Block(), spmd.Mesh(range(num_devices), (num_devices,), ("x",)))
    with pytest.raises(spmd.errors.MeshError, match=r"needs an axis 'fsdp'"):
        shard(Block(), spmd.Mesh(range(num_devices), (num_devices,)))
    for wrong in ("data", "fsdp"):
        with pytest.raises(
            spmd.errors.MeshError,
            match=rf"extra_data_axis is another axis of the mesh.*got '{wrong}'.*leave it out",
        ):
            shard(Block(), mesh, extra_data_axis=wrong)
    with pytest.raises(
        spmd.errors.WrapError,
        match=r"got a ModuleList, which has no forward of its own.*module that calls them",
    ):
        shard(nn.ModuleList([Block()]), mesh)
    with pytest.raises(TypeError, match=r"fully_shard takes a torch.nn.Module; got function"):
        shard(check, mesh)
    with pytest.raises(
        TypeError,
        match=r"mp_policy has attributes such as param_dtype; got str.*MixedPrecisionPolicy",
    ):
        shard(Block(), mesh, mp_policy="bf16")


def test_errors_about_doing_it_twice(mesh):
    block = fully_shard(Block(), mesh)
    with pytest.raises(
        ValueError,
        match=r"a module is sharded once; got a Block that is a unit already.*once for each block",
    ):
        fully_shard(block, mesh)
    wrapped = SpmdFullyShardedDataParallel(nn.Sequential(Block()), mesh)
    for shard in (fully_shard, SpmdFullyShardedDataParallel):
        with pytest.raises(ValueError, match=r"once; got a SpmdFullyShardedDataParallel"):
            shard(wrapped, mesh)
    for inside in (wrapped, block):
        with pytest.raises(
            ValueError,
            match=r"starts from modules that are not sharded; got '0', a \w+ that is"
            r".*Leave auto_wrap_policy out",
        ):
            SpmdFullyShardedDataParallel(
                nn.Sequential(inside), mesh, auto_wrap_policy=always_wrap_policy
            )
    checkpointed = checkpoint_module(Block())
    with pytest.raises(
        ValueError, match=r"a module is checkpointed once; got a Block that is already"
    ):
        checkpoint_module(checkpointed)
    for late in (block, wrapped):
        with pytest.raises(
            ValueError,
            match=r"checkpointing comes before sharding.*got a \w+ that is sharded"
            r".*on the block first",
        ):
            checkpoint_module(late)
    fully_shard(checkpointed, mesh)
    with pytest.raises(ValueError, match=r"a module is sharded once"):
        fully_shard(checkpointed, mesh)
    with pytest.raises(TypeError, match=r"checkpoint_module takes a torch.nn.Module; got int"):
        checkpoint_module(3)


def test_errors_about_outputs_and_meta_modules(mesh):
    for make, said in (
        (lambda y: (None, y), "tuple with a NoneType first"),
        (lambda y: "text", "got str"),
        (lambda y: {}, "got dict"),
    ):
        with pytest.raises(
            spmd.errors.WrapError,
            match=rf"by default a unit returns a tensor.*{said}.*Pass shard_output",
        ):
            fully_shard(Returning(make), mesh)(torch.randn(16, D, device="xla"))

    class WithoutReset(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, device="meta"))

        def forward(self, x):
            return x * self.weight

    with pytest.raises(
        ValueError,
        match=r"initialises them in reset_parameters\(\); got '0', a WithoutReset without"
        r".*to_empty\(device='xla'\)",
    ):
        fully_shard(nn.Sequential(WithoutReset()), mesh)
    advised = nn.Sequential(WithoutReset()).to_empty(device="xla")
    fully_shard(advised, mesh)
    assert len(advised[0].weight.local_shards[0].data) == -(-4 // mesh.size())
    advised.load_state_dict({"0.weight": torch.ones(4)})
    assert len(advised[0].weight.local_shards[0].data) == -(-4 // mesh.size())
    assert advised(torch.full((8, 4), 2.0, device="xla")).sum().item() == 64


def test_an_update_between_forward_and_backward_is_refused(mesh):
    block = fully_shard(nn.Linear(D, D), mesh)
    loss = block(torch.randn(16, D, device="xla", requires_grad=True)).sum()
    with torch.no_grad():
        block.weight.add_(1)
    with pytest.raises(
        RuntimeError,
        match=r"modified by an inplace operation: a tensor of shape \(32, 32\) is at version 1; "
        r"expected version 0",
    ):
        loss.backward()
