"""Steps whose sizes vary share programs, in any order, with the values of eager torch."""

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from tiers import exhaustive
from torch import nn

import spmd_core as spmd
from spmd_core.program import compile_cache, growing_program, growing_sizes

counter = spmd.metrics.counter
ORDERS = {
    "by one": ([40, 41, 42, 43, 44, 45], 2),
    "any": ([40, 44, 41, 47, 43, 42, 33, 40], 3),
    "backwards": ([47, 46, 45, 44, 43, 42], 3),
    "by five": ([40, 45, 50, 55, 60, 65], 4),
    "small ones, too": ([40, 44, 9, 5, 3, 2, 100], 4),
}


@pytest.mark.parametrize("order", ORDERS)
def test_sizes_in_any_order_share_programs(order):
    sizes, programs = ORDERS[order]
    torch.manual_seed(0)
    w = torch.randn(10, 3)
    on_device, before = w.to("xla"), counter("compiles")
    for n in sizes:
        x = torch.randn(n, 10)
        found = ((x.to("xla") * 2.5).pow(2) @ on_device).sum(0).cpu()
        torch.testing.assert_close(found, ((x * 2.5).pow(2) @ w).sum(0), rtol=1e-4, atol=1e-3)
    assert counter("compiles") - before <= programs and growing_sizes.refusals() == []


def test_two_sizes_are_not_taken_for_ones_that_vary():
    """As those of training and evaluation: each has a program of exactly its size."""
    for n in (40, 24, 40, 24):
        assert torch.ones(n, 3).to("xla").sum().item() == 3 * n
    assert counter("compiles") == 2
    assert all("_64" not in program.name for program in spmd.metrics.programs())


def test_a_size_of_one_is_a_program_of_its_own():
    w = torch.randn(4, 3)
    for n in (6, 9, 1, 7, 1, 12):
        x, y = torch.randn(n, 4), torch.randn(1, 3)
        found = (x.to("xla") @ w.to("xla") + y.to("xla")).softmax(0).cpu()
        torch.testing.assert_close(found, (x @ w + y).softmax(0))


def test_sizes_with_a_divisor_in_common_do_not_speak_for_others():
    """This function depends on the rest that eight leaves, which no integer of its key shows."""

    def to_eight(x):
        return jnp.pad(x, (0, -x.shape[0] % 8), constant_values=1.0).sum()

    for n in (8, 16, 24, 32, 12, 13, 40, 20):
        x = torch.randn(n)
        found = spmd.call_jax(to_eight, x.to("xla")).cpu()
        torch.testing.assert_close(found, x.sum() + -n % 8, rtol=1e-4, atol=1e-4)


def test_what_fails_at_one_size_fails_at_no_other(monkeypatch):
    """Neither its program, nor its trace for another cut."""
    trace, build = growing_program.jaxpr, compile_cache.building

    def fails(graph):
        return any(5 in leaf.spec.shape for leaf in graph.leaves)

    def traced(graph, name):
        assert not fails(graph), "this size cannot be traced"
        return trace(graph, name)

    def built(graph, name, **options):
        assert not fails(graph), "this size cannot be compiled"
        return build(graph, name, **options)

    monkeypatch.setattr(growing_program, "jaxpr", traced)
    monkeypatch.setattr(compile_cache, "building", built)
    wrong = torch.ones(5, 3).to("xla") * 2
    with pytest.raises(AssertionError, match="cannot be compiled"):
        wrong.cpu()
    for n in (6, 7, 8):
        assert (torch.ones(n, 3).to("xla") * 2).cpu().sum() == 6 * n
    monkeypatch.setattr(compile_cache, "building", build)
    assert wrong.cpu().sum() == 30
    for n in (4, 5, 6):  # a sample that cannot be traced any more
        assert (torch.ones(n, 3).to("xla") * 3 + 1).cpu().sum() == 12 * n
    assert "cannot be traced" in growing_sizes.refusals()[-1]


class Model(nn.Module):
    """What recipes consist of: embedding, norm, attention, feed-forward."""

    def __init__(self, vocabulary=16, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(64, width) / 10)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        heads = self.qkv(self.norm(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        return self.head(x + self.down(F.gelu(self.up(x))))


def trained(device, prepare=lambda model: None, mark=lambda ids: None, sizes=(20, 13, 25, 9, 17)):
    torch.manual_seed(0)
    model = Model()
    model = model.to(device)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for n in sizes:
        ids, targets = torch.randint(16, (2, 8, n))
        targets[targets == 3] = -100
        ids, targets = ids.to(device), targets.to(device)
        mark(ids)
        logits = model(ids)
        loss = F.cross_entropy(logits.view(-1, 16), targets.view(-1))
        (loss + logits.square().mean() / 10).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if device == "xla":
            spmd.sync()
    return [*losses, *model.parameters()]


@pytest.mark.parametrize("kind", [*map(exhaustive, ["one", "data", "fsdp"]), "tensor"])
def test_training_with_sequences_of_any_length(kind, mesh_1d, mesh_2d, num_devices):
    def mark(ids):
        mesh, axis = (mesh_1d, "x") if kind == "data" else (mesh_2d, "a")
        if kind != "one":
            spmd.mark_sharding(ids, mesh, (axis, None))

    def prepare(model):
        if kind == "fsdp":
            spmd.fully_shard(model, spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",)))
        if kind == "tensor":
            spmd.mark_sharding(model.up.weight, mesh_2d, ("b", None))
            spmd.mark_sharding(model.down.weight, mesh_2d, (None, "b"))
            spmd.mark_sharding(model.embedding.weight, mesh_2d, (None, "b"))

    if kind == "fsdp":
        fsdp = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
        found = trained("xla", prepare, lambda ids: spmd.mark_sharding(ids, fsdp, ("fsdp", None)))
    else:
        found = trained("xla", prepare, mark)
    for ours, right in zip(found, trained("cpu"), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), right.detach(), rtol=1e-3, atol=1e-4)
    assert growing_sizes.refusals() == []
    # Two sizes, then rooms.
    assert counter("compiles") <= 4


def test_dropout_draws_what_it_draws_without_padding(monkeypatch):
    def drawn():
        torch.manual_seed(0)
        found = []
        for n in (20, 13, 25, 9, 17):
            x = torch.ones(4, n, 3).to("xla")
            rows = F.dropout(x, 0.3).reshape(-1, 3)
            found += [rows.cpu(), torch.randn(n, 3, device="xla").sum(1).cpu()]
        return found

    padded = drawn()
    assert growing_sizes.refusals() == [] and counter("compiles") < 10
    monkeypatch.setattr(spmd.config, "bound_growing_sizes", False)
    growing_sizes.clear()
    for ours, right in zip(padded, drawn(), strict=True):
        torch.testing.assert_close(ours, right)


def test_batches_of_images_of_any_number():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(36, 3), nn.BatchNorm1d(3))
    images = [torch.randn(n, 2, 6, 6) for n in (6, 9, 4, 12, 5)]

    def gradients(model, device):
        found = []
        for x in images:
            model.zero_grad()
            F.cross_entropy(model(x.to(device)), torch.arange(len(x)).to(device) % 3).backward()
            found += [p.grad.cpu() for p in model.parameters()]
        return found

    right = gradients(model, "cpu")
    for ours, expected in zip(gradients(model.to("xla"), "xla"), right, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)
    assert growing_sizes.refusals() == [] and counter("compiles") <= 4


def test_a_batch_that_is_split_compiles_at_each_size(mesh_1d, num_devices):
    if num_devices == 1:
        pytest.skip("one device splits nothing")
    w = torch.randn(4, 3)
    for n in (24, 40, 32, 17):
        x = torch.randn(n, 4)
        on_device = x.to("xla")
        spmd.mark_sharding(on_device, mesh_1d, ("x", None))
        torch.testing.assert_close((on_device @ w.to("xla")).sum(0).cpu(), (x @ w).sum(0))
    assert {*growing_sizes.refusals()} == {"dim 0 varies in size, and is split over devices by x"}
