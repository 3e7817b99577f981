"""A gather moves the dtype that is used: what is only cast to a smaller dtype is cast before."""

import copy
import re

import pytest
import torch
from recorded_graphs import graph_of, names, rewritten
from torch import nn

import spmd_core as spmd
from spmd_core import debugging
from spmd_core.program.passes.narrow_gathers import narrow_gathers


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def stablehlo_of(model, x, dtype):
    with torch.autocast("xla", dtype):
        (model(x).float().square().mean()).backward()
    text = debugging.stablehlo(*(p.grad for p in model.parameters()))
    spmd.sync()
    return text


def gathered(text, shape):
    """The dtypes of arrays of a shape that are constrained to be replicated, and used."""
    pattern = rf"(%\d+) = sdy.sharding_constraint .*{{}}, {{}}\]> : tensor<{shape}x(\w+)>"
    text = text.split("func.func private")[0]  # names are those of the function
    found = re.findall(pattern, text)
    return {dtype for name, dtype in found if len(re.findall(rf"{name}\b", text)) > 1}


def test_a_wrapped_module_gathers_what_autocast_uses(num_devices):
    if num_devices == 1:
        pytest.skip("one device gathers nothing")
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    eager = Net()
    x = torch.randn(16, 16)
    ours = spmd.fully_shard(copy.deepcopy(eager), mesh)
    text = stablehlo_of(ours, spmd.mark_sharding(x.to("xla"), mesh, ("fsdp",)), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        eager(x).float().square().mean().backward()
    for got, right in zip(ours.parameters(), eager.parameters()):
        torch.testing.assert_close(got.grad.cpu(), right.grad, rtol=0.05, atol=1e-3)
    assert gathered(text, "32x16") == {"bf16"}
    assert not gathered(text, "16x32")
    # Columns are gathered on the CPU as the rows of the transpose (`column_gathers`).
    assert set(re.findall(r'"stablehlo.all_gather".*tensor<32x16x(\w+)>', text)) == {"bf16"}


def test_a_value_that_is_also_used_as_it_is_is_gathered_once(num_devices):
    if num_devices == 1:
        pytest.skip("one device gathers nothing")
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    w = spmd.mark_sharding(torch.randn(16, 16).to("xla"), mesh, ("fsdp",))
    whole = spmd.mark_sharding(w.clone(), mesh, ())
    both = whole.bfloat16().float() + whole.sin()
    text = debugging.stablehlo(both)
    assert gathered(text, "16x16") == {"f32"}
    torch.testing.assert_close(both.cpu(), w.cpu().bfloat16().float() + w.cpu().sin())


def gather(mesh, *readers):
    """What is read of a value that is split and then gathered."""
    split = spmd.mark_sharding(torch.randn(16, 16).to("xla") * 2, mesh, ("x",))
    whole = spmd.mark_sharding(split.clone(), mesh, ())
    return names(rewritten(narrow_gathers, graph_of(*(read(whole) for read in readers))))


def test_the_cast_moves_before_the_gather(mesh_1d):
    moved = ["mul.Tensor", "mark_sharding", "clone", "_to_copy", *["mark_sharding"] * 2, "sin"]
    assert gather(mesh_1d, lambda x: x.bfloat16().sin()) == moved
    assert gather(mesh_1d, lambda x: x.double())[-2:] == ["mark_sharding", "_to_copy"]
    assert gather(mesh_1d, lambda x: x.bfloat16(), torch.sin)[-2:] == ["_to_copy", "sin"]


def test_what_is_cast_twice_is_gathered_once(mesh_1d):
    twice = gather(mesh_1d, lambda x: x.bfloat16().sin(), lambda x: x.bfloat16().cos())
    assert twice.count("_to_copy") == 1 and twice.count("mark_sharding") == 3
