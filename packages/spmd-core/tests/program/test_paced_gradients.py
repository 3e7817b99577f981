"""What second runs of checkpointed blocks wait for in a TPU's program; the values are torch's."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from recorded_graphs import graph_of, rewritten
from torch import nn
from torch.nn import functional as F

import spmd_core as spmd
from spmd_core.ops.kernels import chunks
from spmd_core.program import compile_cache, target
from spmd_core.program.ir import BarrierEntry
from spmd_core.program.passes.paced_gradients import paced_gradients

WIDTH = 8


class Tied(nn.Module):
    """Blocks between a table that is read twice; inputs are token ids (B, T)."""

    def __init__(self, num_blocks=4, rows=96):
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_blocks)
        )

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(x, self.table.weight).flatten(0, 1), ids.flatten())


@pytest.fixture(autouse=True)
def lowered_for_tpu(monkeypatch):
    """Programs are lowered as for a TPU, and run on the CPU."""
    monkeypatch.setattr(target, "devices", SimpleNamespace(platform=lambda: "tpu"))
    compile_cache.clear()
    yield
    compile_cache.clear()


def program_of(model, ids, mesh, spec_of, *, autocast=False):
    """Runs a step of the model with checkpointed blocks; checks its gradients; gives its text."""
    ours = copy.deepcopy(model).to("xla")
    for block in ours.blocks:
        spmd.checkpoint_module(block)
    for parameter in ours.parameters():
        spmd.mark_sharding(parameter, mesh, spec_of(parameter))
    data = spmd.mark_sharding(ids.to("xla"), mesh, ("fsdp",))
    with torch.autocast("xla", dtype=torch.bfloat16, enabled=autocast):
        loss = ours(data)
    loss.backward()
    spmd.sync()
    model(ids).backward()
    tolerance = 3e-2 if autocast else 1e-5
    for got, right in zip(ours.parameters(), model.parameters()):
        torch.testing.assert_close(got.grad.cpu(), right.grad, rtol=tolerance, atol=tolerance)
    return compile_cache.newest().lowered.stage.as_text()


def barriers(text):
    """For each optimization barrier, the types of what it waits for."""
    found = re.findall(r"stablehlo.optimization_barrier .* : (.*)", text)
    return [re.findall(r"tensor<(\S+?)>", types) for types in found]


def ids_for(num_devices):
    torch.manual_seed(0)
    return torch.randint(96, (num_devices, 5))


def by_rows(parameter):
    return ("fsdp",) if parameter.dim() > 1 else ()


def test_a_second_run_waits_for_all_gradients_but_the_latest(num_devices):
    if num_devices == 1:
        pytest.skip("one device reduces nothing")
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    ids = ids_for(num_devices)
    found = barriers(program_of(Tied(), ids, mesh, by_rows))
    weight, table, hidden = "8x8xf32", "96x8xf32", f"{num_devices}x5x8xf32"
    waits = [sorted({*types} - {hidden}) for types in found if types[:2] == [hidden] * 2]
    # The last block's for the output layer's part of the table. The next one's for the first
    # gradient of the last block; the two others' for the second one of the block before, too. Each
    # block's weight has its input wait for its gradient.
    assert [types for types in waits if table in types] == [[table]]
    assert [types for types in waits if "8xf32" in types] == [[weight, "8xf32"]] * 2
    assert waits.count([weight]) == 4 + 1


def test_what_reads_a_gradient_waits_for_all_that_are_left(num_devices):
    if num_devices == 1:
        pytest.skip("one device reduces nothing")
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), torch.randn(num_devices, 3, 8)
    ours = copy.deepcopy(model).to("xla")
    for parameter in ours.parameters():
        spmd.mark_sharding(parameter, mesh, by_rows(parameter))
    for module, data in ((ours, spmd.mark_sharding(x.to("xla"), mesh, ("fsdp",))), (model, x)):
        module(data).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        if module is ours:
            spmd.sync()
            text, found = compile_cache.newest().lowered.stage.as_text(), norm
    torch.testing.assert_close(found.cpu(), norm)
    assert ["16x8xf32", "16xf32", "8x16xf32", "8xf32"] in map(sorted, barriers(text))
    for got, right in zip(ours.parameters(), model.parameters()):
        torch.testing.assert_close(got.grad.cpu(), right.grad)


def test_parameters_are_cast_again_in_a_second_run(num_devices):
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    ids = ids_for(num_devices)
    text = program_of(Tied(num_blocks=1), ids, mesh, by_rows, autocast=True)
    behind = [types[0] for types in barriers(text) if types[0] in ("8x8xf32", "8xf32")]
    assert sorted(behind) == ["8x8xf32", "8xf32"]  # weight and bias


@pytest.mark.parametrize("spec", [("fsdp", None), (None, "fsdp")])
def test_a_large_gradient_is_scattered_in_pieces(spec, num_devices, monkeypatch):
    monkeypatch.setattr(chunks, "LARGEST_BYTES", 96 * WIDTH)
    monkeypatch.setattr(chunks, "REGISTER", 2)
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    ids = ids_for(num_devices)
    text = program_of(Tied(), ids, mesh, lambda p: spec if p.dim() > 1 else ())
    scattered = re.findall(r"stablehlo.reduce_scatter", text)
    if num_devices > 1:
        # The table's 4 pieces, and the 4 blocks, whose gradients are small; a table that is split
        # along the width has its looked up part in one more.
        assert len(scattered) == 4 + 4 + (spec[0] is None)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_of_looked_up_rows_are_gathered_in_pieces(count, num_devices, monkeypatch):
    monkeypatch.setattr(chunks, "LARGEST_BYTES", num_devices * 5 * WIDTH * 4 // count)
    monkeypatch.setattr(chunks, "REGISTER", 2)
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    text = program_of(Tied(), ids_for(num_devices), mesh, by_rows)
    gathered = re.findall(rf"stablehlo.all_gather.*tensor<{num_devices}x5x(\d)xf32>", text)
    assert gathered == [str(WIDTH // count)] * count * (num_devices > 1)


def test_gradients_that_autocast_made_stay_narrow_on_one_device(num_devices):
    """The barriers have what is cast; devices sum in the parameter's dtype."""
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    text = program_of(Tied(), ids_for(num_devices), mesh, by_rows, autocast=True)
    waits = [types for types in barriers(text) if "8xf32" not in types]
    narrow = [types for types in waits if types.count("8x8xbf16") and types.count("8xbf16")]
    assert bool(narrow) == (num_devices == 1)


@pytest.mark.parametrize("spec", [("fsdp", "tensor"), (("tensor", "fsdp"), None)])
def test_two_axes(spec, num_devices, monkeypatch):
    monkeypatch.setattr(chunks, "LARGEST_BYTES", 96 * WIDTH)
    monkeypatch.setattr(chunks, "REGISTER", 2)
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (num_devices // 2, 2), ("fsdp", "tensor"))
    program_of(Tied(), ids_for(num_devices), mesh, lambda p: spec if p.dim() > 1 else ())


def test_a_weights_gradient_waits_for_the_inputs(num_devices):
    """So that the gathered weight is gone when the gradient is computed."""
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    torch.manual_seed(0)
    x = torch.randn(num_devices, 4, WIDTH)
    linear = nn.Linear(WIDTH, 2 * WIDTH)
    ours = copy.deepcopy(linear).to("xla")
    for parameter in ours.parameters():
        spmd.mark_sharding(parameter, mesh, by_rows(parameter))
    data = spmd.mark_sharding(x.to("xla"), mesh, ("fsdp",)).requires_grad_()
    ours(data).square().sum().backward()
    spmd.sync()
    text = compile_cache.newest().lowered.stage.as_text()
    given = x.clone().requires_grad_()
    linear(given).square().sum().backward()
    torch.testing.assert_close(data.grad.cpu(), given.grad)
    torch.testing.assert_close(ours.weight.grad.cpu(), linear.weight.grad, rtol=1e-4, atol=1e-4)
    assert bool(barriers(text)) == (num_devices > 1)


def test_the_chosen_likelihood_is_a_sum(num_devices):
    """In a loss for a TPU, without an array of all likelihoods. Ignored targets do not count."""
    torch.manual_seed(0)
    x, labels = torch.randn(6, 5), torch.tensor([0, 4, -100, 2, 2, 1])
    x[0, 1] = -torch.inf
    weight = torch.rand(5)
    for options in ({}, {"weight": weight}, {"reduction": "none"}):
        on_xla = {k: v.to("xla") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        got = F.cross_entropy(x.to("xla"), labels.to("xla"), **on_xla)
        torch.testing.assert_close(got.cpu(), F.cross_entropy(x, labels, **options))


def test_the_graph_of_a_second_run(mesh_1d):
    """The second block's runs again, then the first one's: it waits for the second's gradients."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    blocks = blocks.to("xla")
    for block in blocks:
        spmd.checkpoint_module(block)
    for parameter in blocks.parameters():
        spmd.mark_sharding(parameter, mesh_1d, ())
    blocks(torch.randn(8, 8).to("xla")).sum().backward()
    graph = graph_of(*(p.grad for p in blocks.parameters()))
    assert rewritten(paced_gradients, graph, "cpu") is graph
    ops = rewritten(paced_gradients, graph, "tpu").ops
    waits = [op for op in ops if isinstance(op.entry, BarrierEntry)]
    # The second run's two operands, and half of the gradients of the weight and the bias.
    assert [len(op.operands) for op in waits] == [2 + 1]
