"""The compiled step of a fully sharded model: collectives, bytes, memory."""

import copy
import math
import re

import pytest
import torch
from children import figures
from fsdp_models import Block, in_blocks
from torch import nn

import spmd_core as spmd
from spmd_core.modules.checkpointing import checkpoint_module
from spmd_core.modules.fully_shard import fully_shard
from spmd_core.program import compile_cache

pytestmark = pytest.mark.usefixtures("nothing_pending")


@pytest.fixture
def mesh(num_devices):
    return spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))


_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("
)
_ARRAY = re.compile(r"(pred|[sufb]\w*?\d+)\[([\d,]*)\]")


def collectives(text):
    """The bytes per device of each array that a collective in XLA's text returns, by kind.

    A combined collective counts as one entry per array.
    """
    found = {}
    for results, kind in _COLLECTIVE.findall(text):
        for dtype, dims in _ARRAY.findall(results):
            width = 1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) // 8
            found.setdefault(kind, []).append(
                width * math.prod(int(n) for n in dims.split(",") if n)
            )
    return found


def step_text(mesh, shard, *, batch=("fsdp",), layers=3, d=64):
    """The compiled text of a training step, and the bytes of each parameter of one block."""
    model = shard(nn.Sequential(*(Block(d) for _ in range(layers))))
    x = spmd.mark_sharding(torch.randn(16, 4, d).to("xla"), mesh, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()
    return compile_cache.newest().compiled.as_text(), sorted(
        4 * p.numel() for p in model[0].parameters()
    )


@pytest.mark.parametrize("kind", ["fsdp", "hybrid", "kept", "checkpointed"])
def test_a_step_gathers_and_reduce_scatters_each_parameter(num_devices, kind):
    if num_devices < 4:
        pytest.skip("needs four devices, for two axes of two")
    extra = 2 if kind == "hybrid" else 1
    size = num_devices // extra
    mesh = spmd.Mesh(range(num_devices), (extra, size), ("replicate", "fsdp"))

    def shard(model):
        if kind == "checkpointed":
            for block in model:
                checkpoint_module(block)
        return in_blocks(mesh, extra_data_axis="replicate", reshard_after_forward=kind != "kept")(
            model
        )

    text, parameters = step_text(mesh, shard, batch=("replicate", "fsdp"))
    found = collectives(text)
    assert sorted(found["reduce-scatter"]) == sorted(bytes_ // size for bytes_ in parameters * 3)
    gathers = sorted(found["all-gather"])
    # Backward needs the weights of the products and of the norm, and no biases. The second forward
    # of a checkpointed block needs nearly all parameters.
    assert set(gathers) == set(parameters)
    matrices = [bytes_ for bytes_ in gathers if bytes_ >= 4 * 64 * 64]
    assert len(matrices) == 3 * 2 * (1 if kind == "kept" else 2)
    # Beside the loss, only gradient shards are all-reduced, over the replica axis.
    largest = max(parameters) // size if kind == "hybrid" else 4
    assert max(found.get("all-reduce", [0])) <= largest
    assert "all-to-all" not in found and "collective-permute" not in found


def test_uneven_parameters_are_reduce_scattered_too(mesh, num_devices):
    if num_devices < 8:
        pytest.skip("30 rows are uneven over 8 devices")
    model = nn.Linear(27, 30, bias=False)
    ours = fully_shard(copy.deepcopy(model), mesh)
    x = torch.randn(16, 27)
    ours(spmd.mark_sharding(x.to("xla"), mesh, ("fsdp",))).square().sum().backward()
    spmd.sync()
    found = collectives(compile_cache.newest().compiled.as_text())
    model(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad.cpu(), model.weight.grad, rtol=1e-4, atol=1e-3)
    assert (
        found["reduce-scatter"] == [4 * 4 * 27] and max(found.get("all-reduce", [0])) < 4 * 27 * 30
    )


_MEMORY = """
import json
import torch
from torch import nn
spmd.simulate(8)
spmd.use_spmd()
from spmd_core.modules.fully_shard import fully_shard
from spmd_core.modules.checkpointing import checkpoint_module
from fsdp_models import Block


mesh = spmd.Mesh(range(8), (8,), ("fsdp",))

def temp_bytes(layers, kind):
    blocks = [Block(128) for _ in range(layers)]
    for block in blocks:
        if kind == "checkpointed":
            checkpoint_module(block)
        fully_shard(block, mesh, reshard_after_forward=kind != "kept")
    model = fully_shard(nn.Sequential(*blocks), mesh)
    x = spmd.mark_sharding(torch.randn(8, 128).to("xla"), mesh, ("fsdp",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    spmd.sync()
    return spmd.metrics.programs()[-1].temp_bytes

kinds = ("sharded", "kept", "checkpointed")
print(json.dumps({kind: [temp_bytes(layers, kind) for layers in (2, 4)] for kind in kinds}))
"""


@pytest.mark.slow
def test_at_most_two_blocks_are_gathered_at_a_time(num_devices):
    if num_devices < 8:
        pytest.skip("compares devices' memory on 8 devices")
    temps = figures(_MEMORY)
    block = sum(4 * p.numel() for p in Block(128).parameters())
    per_layer = {kind: (four - two) / 2 for kind, (two, four) in temps.items()}
    assert per_layer["sharded"] < 0.2 * block and per_layer["checkpointed"] < 0.2 * block
    for kind in ("sharded", "checkpointed"):
        gradients = 4 * block / num_devices  # the shards of all blocks, at the end of backward
        assert temps[kind][1] - gradients < 2 * block
    assert per_layer["kept"] > 0.9 * block  # the measurement does see kept weights
