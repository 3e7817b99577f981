"""Embedding bags against eager torch on the CPU: values, gradients, no operation on the host."""

import pytest
import torch
import torch.nn.functional as F
from tiers import crossed

import spmd_core as spmd
from oracle import check

INDICES = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9, 4])


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)


def both(function, *inputs):
    """Results and gradients on the CPU and on the device."""
    results = []
    for device in ("cpu", "xla"):
        moved = [x.detach().to(device).requires_grad_(x.is_floating_point()) for x in inputs]
        out = function(*moved)
        (
            out * torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).view(out.shape).to(device)
        ).sum().backward()
        results.append([out.detach().cpu(), *(x.grad.cpu() for x in moved if x.requires_grad)])
    return results


def agree(function, *inputs):
    cpu, device = both(function, *inputs)
    torch.testing.assert_close(device, cpu, rtol=1e-5, atol=1e-6)


BAGS = (
    ([0, 4, 4, 6], {}),  # the second bag is empty
    ([0, 4, 4, 9], {"include_last_offset": True}),
    ([0, 2, 9], {"include_last_offset": True, "padding_idx": 4}),
    ([0, 2, 3, 5], {"padding_idx": -6}),  # a bag of padding only
    ([0], {}),
)


@pytest.mark.parametrize(
    ("mode", "index_dtype", "bags"),
    crossed(["sum", "mean", "max"], [torch.int64, torch.int32], BAGS, rounds=2),
)
def test_bags(mode, index_dtype, bags):
    offsets, options = bags
    agree(
        lambda w, i, o: F.embedding_bag(i, w, o, mode=mode, **options),
        torch.randn(10, 3),
        INDICES.to(index_dtype),
        torch.tensor(offsets, dtype=index_dtype),
    )


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size(mode):
    agree(
        lambda w, i: F.embedding_bag(i, w, mode=mode),
        torch.randn(10, 3, dtype=torch.float64),
        INDICES.view(3, 3),
    )


def test_weights_of_the_samples():
    agree(
        lambda w, i, o, s: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s),
        torch.randn(10, 3),
        INDICES,
        torch.tensor([0, 4]),
        torch.randn(9),
    )
    agree(
        lambda w, i, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s, padding_idx=4),
        torch.randn(10, 3),
        INDICES.view(3, 3),
        torch.randn(3, 3),
    )


def test_of_equal_values_the_first_wins():
    agree(lambda w, i: F.embedding_bag(i, w, mode="max"), torch.ones(10, 3), INDICES.view(3, 3))


def test_gradients_by_frequency_are_those_of_embedding():
    # torch's CPU kernel for bags (2.13) divides by the counts of other rows, so the reference is a
    # sum of embeddings.
    ours = both(
        lambda w, i: F.embedding_bag(i, w, mode="sum", scale_grad_by_freq=True),
        torch.ones(10, 3),
        INDICES.view(3, 3),
    )[1]
    right = both(
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True).sum(1),
        torch.ones(10, 3),
        INDICES.view(3, 3),
    )[0]
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_renorm(norm_type):
    check("aten.embedding_renorm.default", torch.randn(10, 3) * 2, INDICES, 1.0, norm_type)


def test_renorm_changes_the_weight_in_place():
    weight = torch.randn(10, 3) * 3
    device_weight = weight.to("xla")
    F.embedding_bag(INDICES.view(3, 3), weight, max_norm=1.0)
    F.embedding_bag(INDICES.view(3, 3).to("xla"), device_weight, max_norm=1.0)
    torch.testing.assert_close(device_weight.cpu(), weight, rtol=1e-5, atol=1e-6)


def test_no_indices_at_all():
    empty = torch.zeros(0, dtype=torch.long)
    for mode in ("sum", "mean", "max"):
        agree(
            lambda w, i, o, mode=mode: F.embedding_bag(i, w, o, mode=mode),
            torch.randn(10, 3),
            empty,
            torch.tensor([0, 0]),
        )


def test_dims_of_the_indices():
    weight, indices, offsets = (
        x.to("xla") for x in (torch.randn(10, 3), INDICES, torch.tensor([0]))
    )
    with pytest.raises(
        RuntimeError,
        match=r"indices with 1 and offsets with 1; got \(10, 3\), \(3, 3\) and \(1,\). "
        r"Flatten the indices",
    ):
        torch.ops.aten._embedding_bag(weight, indices.view(3, 3), offsets)
    torch.ops.aten._embedding_bag(weight, indices.view(3, 3).flatten(), offsets)
