"""The CTC loss and its gradient against eager torch on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from tiers import crossed

import spmd_core as spmd

FRAMES, BATCH, CLASSES = 9, 4, 6


def log_probs(dtype=torch.float64):
    return torch.randn(
        FRAMES, BATCH, CLASSES, generator=torch.Generator().manual_seed(0), dtype=dtype
    ).log_softmax(-1)


# Targets with repeated labels, which need a blank in between; an empty one; and one without a path.
TARGETS = torch.tensor([[1, 1, 2, 3], [2, 5, 1, 4], [3, 1, 1, 1], [4, 4, 4, 4]])
TARGET_LENGTHS = [4, 2, 0, 4]


@pytest.mark.parametrize(("input_lengths", "blank"), crossed([[9, 7, 9, 8], [9, 9, 3, 5]], [0, 5]))
def test_losses_and_gradients(input_lengths, blank):
    targets, scale = TARGETS if blank == 0 else TARGETS - 1, torch.rand(BATCH, dtype=torch.float64)
    for zero_infinity in (False, True):
        results = []
        for device in ("cpu", "xla"):
            x = log_probs().to(device).requires_grad_()
            # The second result, alpha, is not compared: torch leaves the states that no path
            # reaches unwritten.
            losses, _ = torch.ops.aten._ctc_loss(
                x, targets.to(device), input_lengths, TARGET_LENGTHS, blank, zero_infinity
            )
            (losses * scale.to(device)).sum().backward()
            results.append([losses.detach().cpu(), x.grad.cpu()])
        torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-10, equal_nan=True)


CALLS = {
    "lists": ((9, 7, 9, 8), (4, 2, 0, 4)),
    "tensors on the CPU": (torch.tensor([9, 7, 9, 8]), torch.tensor([4, 2, 0, 4])),
    "tensors on the device": (
        torch.tensor([9, 7, 9, 8]),
        torch.tensor([4, 2, 0, 4], dtype=torch.int32),
    ),
}


@pytest.mark.parametrize(("reduction", "call"), crossed(["none", "mean", "sum"], [*CALLS]))
def test_every_form_of_lengths_and_targets(call, reduction, monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)
    for targets in (TARGETS, torch.tensor([1, 1, 2, 3, 2, 5, 4, 4, 4, 4])):
        results = []
        for device in ("cpu", "xla"):
            x = log_probs(torch.float32).to(device).requires_grad_()
            lengths = [n.to(device) if call == "tensors on the device" else n for n in CALLS[call]]
            if not isinstance(lengths[0], torch.Tensor) and targets.dim() == 1:
                lengths = list(map(list, lengths))
            loss = F.ctc_loss(
                x, targets.to(device), *lengths, reduction=reduction, zero_infinity=True
            )
            loss.sum().backward()
            results.append([loss.detach().cpu(), x.grad.cpu()])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_one_sequence_without_a_batch():
    x, target = log_probs(torch.float32)[:, 0], TARGETS[0]
    right = F.ctc_loss(x, target, torch.tensor(9), torch.tensor(4))
    ours = F.ctc_loss(x.to("xla"), target.to("xla"), torch.tensor(9), torch.tensor(4))
    torch.testing.assert_close(ours.cpu(), right, rtol=1e-5, atol=1e-5)


def test_other_lengths_compile_nothing():
    x, targets = log_probs(torch.float32).to("xla"), TARGETS.to("xla")
    F.ctc_loss(x, targets, (9, 7, 9, 8), (4, 2, 0, 4)).item()
    before = spmd.metrics.counter("compiles")
    F.ctc_loss(x, targets, (8, 8, 9, 8), (3, 2, 1, 2)).item()
    assert spmd.metrics.counter("compiles") == before


def test_one_length_for_each_sequence():
    x, targets = log_probs(torch.float32).to("xla"), TARGETS.to("xla")
    with pytest.raises(RuntimeError, match="input_lengths must be of size batch_size"):
        torch.ops.aten._ctc_loss(x, targets, [9, 9, 9], [4, 4, 4, 4])
    torch.ops.aten._ctc_loss(x, targets, [9, 9, 9, 9], [4, 4, 4, 4])


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_log_probabilities_are_floats(dtype):
    x, targets = log_probs(torch.float32), TARGETS
    for device, message in (("cpu", "not implemented"), ("xla", r"got torch.*result of log_soft")):
        with pytest.raises(NotImplementedError, match=message):
            F.ctc_loss(x.to(dtype).to(device), targets.to(device), (9, 7, 9, 8), (4, 2, 0, 4))


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(
    ("input_lengths", "target_lengths", "joined"),
    [
        ((9, 7, 10, 8), (4, 2, 0, 4), False),
        ((9, -1, 9, 8), (4, 2, 0, 4), False),
        ((9, 7, 9, 8), (4, 2, 0, 5), False),
        ((9, 7, 9, 8), (4, 2, 0, -4), False),
        ((9, 7, 9, 8), (4, 2, 1, 4), True),
        ((9, 7, 9, 8), (4, 2, 0, 3), True),
        ((9.0, 7.0, 9.0, 8.0), (4, 2, 0, 4), False),
        ((9, 7, 9, 8), (True, True, False, True), False),
    ],
)
def test_lengths_that_no_sequence_has(input_lengths, target_lengths, joined, on_host):
    x, targets = log_probs(torch.float32), TARGETS.flatten()[:10] if joined else TARGETS
    lengths = input_lengths, target_lengths
    if on_host or not all(type(n) is int for both in lengths for n in both):
        lengths = tuple(map(torch.tensor, lengths))
    for device in ("cpu", "xla"):
        with pytest.raises(RuntimeError, match=r"_lengths (must|to have)|Expected tensor to have"):
            F.ctc_loss(x.to(device), targets.to(device), *lengths)
