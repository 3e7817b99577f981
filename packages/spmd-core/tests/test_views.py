"""Views share storage: a write through any chain is seen through every other, exactly as on the CPU."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import spmd_core as spmd

pytestmark = pytest.mark.one_device

WRITES = {
    "view(-1).add_": lambda x: x.view(-1).add_(1),
    "t()[0] =": lambda x: x.t().__setitem__(0, 5),
    "detach().fill_": lambda x: x.detach().fill_(0),
    "data.mul_": lambda x: x.data.mul_(3),
    "select.copy_": lambda x: x[1].copy_(torch.tensor([7.0, 8, 9, 10]).to(x.device)),
    "slice step": lambda x: x[:, ::2].zero_(),
    "transpose.slice": lambda x: x.transpose(0, 1)[1:3].mul_(2),
    "unsqueeze.squeeze": lambda x: x.unsqueeze(0).squeeze(0)[2].add_(4),
    "diagonal": lambda x: x.diagonal().fill_(-1),
    "as_strided": lambda x: x.as_strided((2, 2), (5, 1), 1).add_(10),
    "permute.view": lambda x: x.permute(1, 0).contiguous().view(-1).add_(1),
    "chunk": lambda x: x.chunk(2, dim=1)[1].add_(2),
    "split": lambda x: x.split([1, 2], dim=0)[1].add_(2),
    "unbind": lambda x: x.unbind(0)[2].sub_(1),
    "narrow": lambda x: x.narrow(1, 1, 2).exp_(),
    "unfold": lambda x: x.unfold(1, 2, 2)[0].add_(1),
    "masked": lambda x: x.masked_fill_(x > 5, 0.5),
    "boolean": lambda x: x.__setitem__(x > 5, 0.25),
    "index": lambda x: x.__setitem__((torch.tensor([0, 2]).to(x.device), torch.tensor([1, 1]).to(x.device)), 9.0),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0, 0]).to(x.device), torch.ones(2, 4).to(x.device)),
    "foreach": lambda x: torch._foreach_mul_([x[0], x[1]], 2.0),
    "out": lambda x: torch.add(x, 1, out=x),
    "out of a view": lambda x: torch.mul(x[0], 2, out=x[1]),
    "flatten of a slice": lambda x: x[1:].view(-1)[3:6].neg_(),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("pending", [True, False], ids=["pending", "computed"])
def test_write_through_a_view(name, pending):
    cpu = torch.arange(12.0).view(3, 4)
    xla = cpu.to("xla") + (0 if pending else torch.zeros((), device="xla"))
    if not pending:
        spmd.sync()
    others = [(x.view(-1)[3:], x.t(), x[1]) for x in (cpu, xla)]
    WRITES[name](cpu)
    WRITES[name](xla)
    torch.testing.assert_close(xla.cpu(), cpu)
    for mine, right in zip(others[1], others[0]):
        torch.testing.assert_close(mine.cpu(), right)
    torch.testing.assert_close((others[1][1] * 2).cpu(), others[0][1] * 2)


def test_writing_through_an_expanded_view_is_refused():
    x = torch.ones(3, 1, device="xla").expand(3, 4)
    with pytest.raises(RuntimeError, match=r"one memory location\. clone\(\)"):
        x.add_(1)
    assert x.clone().add_(1).tolist() == [[2.0] * 4] * 3
    with pytest.raises(RuntimeError, match=r"strides \(1, 1\) several elements share"):
        torch.zeros(6, device="xla").unfold(0, 3, 1).add_(1)


def test_as_strided_stays_inside_the_storage():
    with pytest.raises(RuntimeError, match=r"inside the storage.*element 6 of 6"):
        torch.zeros(6, device="xla").as_strided((2, 2), (3, 3), 0)


def test_views_survive_a_cut():
    base = torch.zeros(4, device="xla")
    view = base[1:3]
    spmd.sync()
    base.add_(1)
    spmd.sync()
    view.add_(1)
    assert base.tolist() == [1, 2, 2, 1] and view.tolist() == [2, 2]


def test_gradients_through_in_place_writes_of_views():
    results = []
    for device in ("cpu", "xla"):
        x = torch.arange(6.0).view(2, 3).to(device).requires_grad_()
        y = x * 2
        y[0].mul_(3)
        y.view(-1)[4:].pow_(2)
        y.sum().backward()
        results.append(x.grad.cpu())
    torch.testing.assert_close(results[1], results[0])


STEPS = ("view", "t", "select", "slice", "add_", "mul_", "copy_", "read", "index_put", "sync", "expand_read", "narrow", "flatten")


@hypothesis.given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=12))
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_random_chains_of_views_and_writes(steps):
    live = [(torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6).to("xla"))]
    for op, a, b in steps:
        pair = live[a % len(live)]
        pair = _chain_step(op, pair, b)
        if pair is not None:
            live.append(pair)
    for cpu, xla in live:
        assert xla.stride() == cpu.stride() and xla.storage_offset() == cpu.storage_offset()
        torch.testing.assert_close(xla.cpu(), cpu)


def _chain_step(op, pair, b):
    if op == "sync":
        spmd.sync()
        return None
    if op == "read":
        torch.testing.assert_close(pair[1].cpu(), pair[0])
        return None
    results = []
    for x in pair:
        y = None
        if op == "view" and x.is_contiguous() and x.numel() % 2 == 0:
            y = x.view(2, -1)
        elif op == "flatten" and x.is_contiguous():
            y = x.view(-1)
        elif op == "t" and x.dim() >= 2:
            y = x.transpose(0, 1)
        elif op == "select" and x.dim() >= 1 and x.shape[0]:
            y = x.select(0, b % x.shape[0])
        elif op == "slice" and x.dim() >= 1:
            y = x[b % 3 :: 1 + b % 2]
        elif op == "narrow" and x.dim() >= 1 and x.shape[-1] > 1:
            y = x.narrow(-1, 1, x.shape[-1] - 1)
        elif op == "add_":
            x.add_(b + 1)
        elif op == "mul_":
            x.mul_(x.new_full((), 0.5))
        elif op == "copy_":
            x.copy_(torch.full(tuple(x.shape), float(b)))
        elif op == "index_put" and x.dim() >= 1 and x.shape[0]:
            x[torch.tensor([b % x.shape[0]]).to(x.device)] = float(b)
        elif op == "expand_read":
            y = (x.unsqueeze(0).expand(2, *x.shape) * 2).sum(0)
        results.append(y)
    return None if results[0] is None else tuple(results)
