"""Gradient checkpointing holds through compilation: the compiled peak and the FLOPs show it."""

from functools import partial

import pytest
import torch
from children import figures
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import spmd_core as spmd
from spmd_core.program import compile_cache

WIDTH, LENGTH, NUM_BLOCKS = 32, 64, 4


class Block(nn.Module):
    """A transformer block of inputs (B, T, D)."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def saving(*names):
    """A policy that saves the results of operations whose name contains one of these."""

    def policy(context, op, *args, **kwargs):
        saves = any(name in str(op) for name in names)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


WAYS = {
    "kept": lambda block, x: block(x),
    "again": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "enclosed": lambda block, x: checkpoint(lambda: block(x), use_reentrant=False),
    "save products": lambda block, x: checkpoint(
        block, x, use_reentrant=False, context_fn=saving("linear", "mm")
    ),
    "save attention": lambda block, x: checkpoint(
        block, x, use_reentrant=False, context_fn=saving("attention")
    ),
}


def train(blocks, x, way):
    """The gradients of all parameters, and of the input."""
    hidden = x
    for block in blocks:
        hidden = WAYS[way](block, hidden)
    hidden.square().mean().backward()
    return [p.grad for p in blocks.parameters()] + [x.grad]


def blocks_and_data(num_blocks=NUM_BLOCKS):
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(num_blocks)), torch.randn(16, LENGTH, WIDTH)


def on_device(way, num_devices):
    """The gradients of sharded blocks on device `xla`."""
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    blocks, x = (t.to("xla") for t in blocks_and_data(2))
    spmd.mark_sharding(x, mesh, ("fsdp",)).requires_grad_()
    for parameter in blocks.parameters():
        spmd.mark_sharding(parameter, mesh, ("fsdp",) if parameter.dim() > 1 else ())
    return train(blocks, x, way)


@pytest.mark.one_device
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_eager_torch(way, num_devices):
    blocks, x = blocks_and_data(2)
    expected = train(blocks, x.requires_grad_(), "kept")
    for got, right in zip(on_device(way, num_devices), expected):
        torch.testing.assert_close(got.cpu(), right, rtol=1e-4, atol=1e-6)


def test_a_second_run_waits_for_the_gradient_of_the_first_ones_result():
    block, x = Block().to("xla"), torch.randn(4, LENGTH, WIDTH).to("xla")
    spmd.checkpoint_module(block)(x).square().mean().backward()
    compile_cache.clear()
    spmd.sync()
    nodes = compile_cache.newest().graph.nodes
    barriers = [node for node in nodes if node.entry.name == "spmd::optimization_barrier"]
    assert barriers and all(len(node.inputs) == 2 for node in barriers)
    assert len({node.inputs[1] for node in barriers}) == 1


_FIGURES = """
import json
from spmd_core.program import compile_cache
from test_checkpointing import WAYS, blocks_and_data, train
spmd.use_spmd()
found = {}
for way in WAYS:
    compile_cache.clear()
    count = spmd.metrics.counter("compiles")
    blocks, x = (t.to("xla") for t in blocks_and_data())
    gradients = train(blocks, x.requires_grad_(), way)
    spmd.sync()
    record = max(spmd.metrics.programs(since=count), key=lambda program: program.flops)
    found[way] = record.temp_bytes, record.flops
print(json.dumps(found))
"""


def test_what_is_saved_decides_memory_and_flops():
    found = figures(_FIGURES)
    kept, kept_flops = found["kept"]
    again, again_flops = found["again"]
    for way in ("again", "reentrant", "enclosed"):
        temp_bytes, flops = found[way]
        assert temp_bytes < 0.5 * kept and flops > 1.24 * kept_flops
    products, attention = found["save products"], found["save attention"]
    assert again < products[0] < 0.8 * kept and kept_flops < products[1] < 0.9 * again_flops
    assert attention[0] < 0.5 * kept and products[1] < attention[1] < 0.95 * again_flops


@pytest.mark.one_device
def test_a_second_run_of_a_second_run(num_devices):
    def inner(x):
        return checkpoint(lambda y: (y.sin() * y).exp(), x, use_reentrant=False) * x

    x = torch.randn(4, 8)
    results = []
    for device in ("cpu", "xla"):
        leaf = x.clone().to(device).requires_grad_()
        checkpoint(inner, leaf.cos(), use_reentrant=False).sum().backward()
        results.append(leaf.grad.cpu())
    torch.testing.assert_close(*results)


def test_a_cut_between_the_runs(num_devices):
    x = torch.randn(4, 8)
    results = []
    for device in ("cpu", "xla"):
        leaf = x.clone().to(device).requires_grad_()
        y = checkpoint(lambda t: t.sin() * t, leaf * 2, use_reentrant=False).sum()
        if device == "xla":
            assert y.item() == pytest.approx(((x * 2).sin() * x * 2).sum().item(), rel=1e-4)
        y.backward()
        results.append(leaf.grad.cpu())
    torch.testing.assert_close(*results)


def test_tensors_on_the_cpu_are_checkpointed_as_ever():
    x = torch.randn(4, 8, requires_grad=True)
    checkpoint(lambda t: t.sin() * t, x, use_reentrant=False).sum().backward()
    (right,) = torch.autograd.grad((x.sin() * x).sum(), x)
    torch.testing.assert_close(x.grad, right)
