"""Compiled training steps: which collectives they have, and the size of their results.

Collectives are checked by kind, bytes and axes; results by their bytes on each device.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import spmd_core as spmd
from spmd_core import debugging
from spmd_core.program import compile_cache

WIDTH, HIDDEN, BATCH, SEQUENCE = 32, 128, 16, 16
several = pytest.mark.skipif(
    spmd.global_runtime_device_count() == 1, reason="one device sends nothing"
)
FLOAT = 4  # bytes


class Block(nn.Module):
    """With an axis "tensor": column-parallel up, row-parallel down. All parameters divide by 8."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def step_of(model, x):
    """The collectives of the second of two SGD steps, whose program all later steps use too.

    SGD has no moments, so the results are the parameters and the loss.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
    return debugging.collectives()


def batch(mesh, *spec):
    return spmd.mark_sharding(torch.randn(BATCH, SEQUENCE, WIDTH).to("xla"), mesh, spec)


def sizes(collectives, kind):
    return sorted(c.result_bytes for c in collectives.where(kind=kind))


def parameter_bytes(model):
    return [FLOAT * p.numel() for p in model.parameters()]


@several
def test_an_fsdp_step_leaves_nothing_whole(mesh_1d, num_devices):
    """Forward and backward gather over the axis; devices get only their part of each gradient.

    Of the results too, each device holds only its part.
    """
    model = nn.Sequential(Block(), Block())
    for block in model:
        spmd.fully_shard(block, mesh_1d, axis="x")
    spmd.fully_shard(model, mesh_1d, axis="x")
    found = step_of(model, batch(mesh_1d, "x"))
    parts = [n // num_devices for n in parameter_bytes(model)]
    assert sum(sizes(found, "reduce-scatter")) == sum(parts)
    assert (
        {c.axes for c in found.where(kind="all-gather")}
        == {c.axes for c in found.where(kind="reduce-scatter")}
        == {("x",)}
    )
    assert sum(sizes(found, "all-gather")) <= 2 * sum(parameter_bytes(model))
    assert sum(c.operand_bytes for c in found.where(kind="all-gather")) * num_devices == sum(
        sizes(found, "all-gather")
    )
    assert sum(sizes(found, "all-reduce")) <= FLOAT  # the loss
    program = compile_cache.newest()
    # The results are the loss, which a tensor still holds, and the parameters, but no activation.
    assert len(program.graph.outputs) == 1 + len(parts)
    for output, placement in zip(program.graph.outputs, program.out_placements):
        lies = math.prod(placement.jax_sharding.shard_shape(output.spec.shape))
        assert lies == output.spec.num_elements // (num_devices if output.spec.shape else 1)
    # 500 bytes for the loss and a pointer for each result.
    assert program.record.output_bytes < sum(parts) + 500


@several
def test_data_parallelism_reduces_each_gradient_once_and_nothing_else(mesh_1d):
    model = nn.Sequential(Block(), Block()).to("xla")
    for p in model.parameters():
        spmd.mark_sharding(p, mesh_1d, ())
    found = step_of(model, batch(mesh_1d, "x"))
    assert {c.kind for c in found} == {"all-reduce"} and {c.axes for c in found} == {("x",)}
    assert found.result_bytes == sum(parameter_bytes(model)) + FLOAT  # plus the loss


def mark_tensor(model):
    mesh = spmd.Mesh(
        range(spmd.global_runtime_device_count()),
        (spmd.global_runtime_device_count(),),
        ("tensor",),
    )
    model.to("xla")
    for block in model:
        spmd.mark_sharding(block.up.weight, mesh, ("tensor", None))
        spmd.mark_sharding(block.up.bias, mesh, ("tensor",))
        spmd.mark_sharding(block.down.weight, mesh, (None, "tensor"))
        for p in (block.down.bias, *block.norm.parameters()):
            spmd.mark_sharding(p, mesh, ())
    return mesh


@several
def test_megatron_blocks_reduce_once_in_each_direction():
    """Each block sums its output in forward and its input's gradient in backward.

    Section 3 of Megatron-LM (arXiv 1909.08053).
    """
    model = nn.Sequential(Block(), Block())
    mesh = mark_tensor(model)
    found = step_of(model, batch(mesh))
    activations = FLOAT * BATCH * SEQUENCE * WIDTH
    assert [(c.kind, c.axes, c.result_bytes) for c in found] == [
        ("all-reduce", ("tensor",), activations)
    ] * 4


@several
def test_sequence_parallel_blocks_gather_and_scatter_what_megatron_reduces():
    """Between the blocks, activations are split along the sequence.

    Section 4.2.2 of "Reducing activation recomputation" (arXiv 2205.05198).
    """
    model = nn.Sequential(Block(), Block())
    mesh = mark_tensor(model)
    for block in model:
        block.up.register_forward_hook(
            lambda _, __, out: spmd.mark_sharding(out, mesh, (None, None, "tensor"), inplace=False)
        )
        block.norm.register_forward_hook(
            lambda _, __, out: spmd.mark_sharding(out, mesh, (None, "tensor"), inplace=False)
        )
        block.down.register_forward_hook(
            lambda _, __, out: spmd.mark_sharding(out, mesh, (None, "tensor"), inplace=False)
        )
    found = step_of(model, batch(mesh, None, "tensor"))
    activations = FLOAT * BATCH * SEQUENCE * WIDTH
    assert {c.axes for c in found} == {("tensor",)}
    assert sizes(found, "all-gather") == [activations] * 4
    # XLA's CPU backend turns a reduce-scatter into an all-reduce and a slice.
    sums = [c.operand_bytes for c in found if c.kind in ("all-reduce", "reduce-scatter")]
    # The gradients of these parameters are summed, as each device has only a part of the sequence.
    small = sum(
        FLOAT * p.numel() for block in model for p in (block.down.bias, *block.norm.parameters())
    )
    assert (
        len([n for n in sums if n >= activations]) == 4
        and sum(sums) == 4 * activations + small + FLOAT
    )
