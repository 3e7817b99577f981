"""Softmaxes and losses over transposed logits compute in the order of memory, on CPUs."""

import re

import pytest
import torch
import torch.nn.functional as F
from recorded_graphs import graph_of, rewritten

import spmd_core as spmd
from spmd_core import debugging
from spmd_core.ops.registry import ClassOrder
from spmd_core.program.passes.class_orders import class_orders

BATCH, TOKENS, WIDTH, CLASSES = 8, 6, 16, 32


def hinted(*tensors, platform="cpu"):
    graph = rewritten(class_orders, graph_of(*tensors), platform)
    return [op.entry.name.partition("::")[2] for op in graph.ops if op.hint == ClassOrder(1)]


def loss_and_gradient(device, order, **options):
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, WIDTH).to(device)
    weight = torch.randn(CLASSES, WIDTH).to(device).requires_grad_()
    labels = torch.randint(CLASSES, (BATCH, TOKENS))
    labels[0, 1] = -100  # ignored
    loss = F.cross_entropy(order(F.linear(x, weight)), labels.to(device), **options)
    loss.sum().backward()
    return loss.detach(), weight.grad


def test_a_loss_of_transposed_logits() -> None:
    found = hinted(*loss_and_gradient("xla", lambda logits: logits.transpose(1, 2)))
    expected = ["_log_softmax", "nll_loss2d_forward", "nll_loss2d_backward"]
    assert found == [*expected, "_log_softmax_backward_data"]


def test_other_orders_and_platforms_are_left_alone() -> None:
    images = torch.randn(2, CLASSES, 4, 4).to("xla")
    assert hinted(F.log_softmax(images, 1)) == []
    rows = torch.randn(BATCH, TOKENS, CLASSES).to("xla")
    assert hinted(F.log_softmax(rows.transpose(0, 1), 1)) == []  # tokens, not classes
    assert hinted(F.log_softmax(rows.transpose(1, 2), 0)) == []  # over the batch
    assert hinted(F.log_softmax(rows.permute(1, 2, 0), 1)) == []  # the last dim goes elsewhere
    assert hinted(F.log_softmax(rows.transpose(1, 2), 1), platform="tpu") == []
    assert hinted(F.log_softmax(rows.transpose(1, 2), 1)) == ["_log_softmax"]


ORDERS = {
    "transpose": lambda logits: logits.transpose(1, 2),
    "permute": lambda logits: logits.permute(0, 2, 1),
    "narrow": lambda logits: logits.bfloat16().transpose(1, 2),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.1}]
)
def test_values_are_those_of_eager_torch(order, options) -> None:
    got = loss_and_gradient("xla", ORDERS[order], **options)
    expected = loss_and_gradient("cpu", ORDERS[order], **options)
    tolerance = 2e-2 if order == "narrow" else 1e-5
    for mine, right in zip(got, expected):
        scale = float(right.float().abs().max())
        torch.testing.assert_close(mine.cpu(), right, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("half", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("dim", [1, -2])
def test_softmaxes_and_their_gradients(half, dim) -> None:
    def of(device):
        torch.manual_seed(0)
        x = torch.randn(BATCH, TOKENS, CLASSES).to(device).requires_grad_()
        y = half(x.transpose(1, 2), dim)
        (y * torch.arange(TOKENS).to(device)).sum().backward()
        return y.detach(), x.grad

    for mine, right in zip(of("xla"), of("cpu")):
        torch.testing.assert_close(mine.cpu(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("classes", [CLASSES, CLASSES - 1])
def test_over_a_mesh(classes, autocast) -> None:
    num = spmd.global_runtime_device_count()
    if num < 4:
        pytest.skip("needs a mesh of two axes")
    mesh = spmd.Mesh(range(num), (num // 2, 2), ("data", "tensor"))

    def of(device):
        torch.manual_seed(0)
        x = torch.randn(BATCH, TOKENS, WIDTH).to(device)
        weight = torch.randn(classes, WIDTH).to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = F.linear(x, weight)
        if device == "xla":
            spmd.mark_sharding(logits, mesh, ("data", None, "tensor"))
        labels = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % classes
        loss = F.cross_entropy(logits.transpose(1, 2), labels.to(device))
        loss.backward()
        return loss.detach(), weight.grad

    tolerance = 2e-2 if autocast else 1e-5
    for mine, right in zip(of("xla"), of("cpu")):
        atol = tolerance * float(right.abs().max())
        torch.testing.assert_close(mine.cpu(), right, rtol=tolerance, atol=atol)


def twice_differentiated(device, order):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 5, 3).to(device).requires_grad_()
    y = torch.softmax(order(x.permute(0, 3, 1, 2)), 1)
    (grad,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), [x])
    return y.detach(), grad.detach(), second


@pytest.mark.parametrize(
    "order",
    [
        lambda y: y.transpose(2, 3),  # of the same shape: another order all the same
        lambda y: y.unsqueeze(2).transpose(2, 3).transpose(3, 4).squeeze(4),
        lambda y: y.flip(2).mT + y,
    ],
)
def test_orders_of_dims_of_one_size(order) -> None:
    for mine, right in zip(twice_differentiated("xla", order), twice_differentiated("cpu", order)):
        torch.testing.assert_close(mine.cpu(), right, rtol=1e-5, atol=1e-6)


def all_losses(device):
    """One sum of losses of the same transposed logits, and its first and second gradients."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, WIDTH).to(device)
    weight = torch.randn(CLASSES, WIDTH).to(device).requires_grad_()
    labels = torch.randint(CLASSES, (BATCH, TOKENS))
    labels[0, 1] = 3
    logits = F.linear(x, weight)
    classes, wanted = logits.transpose(1, 2), labels.to(device)
    weights = torch.linspace(0.5, 1.5, CLASSES).to(device)
    total = F.cross_entropy(classes, wanted, ignore_index=3, label_smoothing=0.1)
    total = total + F.cross_entropy(classes.double(), wanted, weight=weights.double()).float()
    total = total + F.cross_entropy(classes.unsqueeze(3), wanted.unsqueeze(2), ignore_index=3)
    total = total + 0.1 * torch.logsumexp(classes, 1).square().mean() + logits.mean(1).sum()
    (grad,) = torch.autograd.grad(total, [weight], create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), [weight])
    return total.detach(), grad.detach(), second


def test_several_losses_of_the_same_logits() -> None:
    for mine, right in zip(all_losses("xla"), all_losses("cpu")):
        scale = float(right.abs().max())
        torch.testing.assert_close(mine.cpu(), right, rtol=1e-5, atol=1e-5 * scale)


def test_no_logits_are_transposed() -> None:
    text = debugging.hlo(*loss_and_gradient("xla", lambda logits: logits.transpose(1, 2)))
    moved = re.findall(rf"f32\[{BATCH},(?:1,)?{CLASSES},\S* (?:transpose|copy)\(", text)
    assert not moved
