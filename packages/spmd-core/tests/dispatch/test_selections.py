"""`x[mask]` without the number of its elements: as eager torch, without a read, in one program."""

import copy

import pytest
import torch
from tiers import crossed

import spmd_core as spmd


def in_place(x, mask, w):
    x[mask] += w[0]
    x[~mask] -= w[:1].tanh()
    x[mask] *= 1.5


def selected_values(x, mask, w):
    x[mask] = x[mask] * w[0] + w[1]
    x[mask] -= w[mask]
    x[mask] = (w[mask] + 1).to(torch.float64).float()


def parts(x, mask, w):
    x[mask, 0] += 1
    x[mask, 1] += w[mask, 2]
    x[:, mask[: x.shape[1]]] *= 2
    x[1:][mask[1:]] += w[0]


def of_all_elements(x, mask, w):
    x[x > 0] = (x[x > 0] * 2).exp().clamp(max=3.0)
    x[mask] = torch.sqrt(x[mask].abs()) / w[:1]


def sums(x, mask, w):
    rows = x[mask]
    x[0] = x[0] + rows.sum(0) + (rows * w[0]).sum()
    x[mask] = x[mask] + rows.sum(0, keepdim=True)


def others(x, mask, w):
    x[mask] = 2.0
    x.masked_scatter_(mask[:, None].expand(*x.shape), w)
    x.index_put_((mask,), w[mask], accumulate=True)


PROGRAMS = (in_place, selected_values, parts, of_all_elements, sums, others)
LAYOUTS = {
    "whole": ((16, 8), None, None),
    "even": ((16, 8), ("a", None), (None, "b")),
    "uneven": ((19, 7), ("a", "b"), ("b", None)),
}


def masks_of(n):
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.rand(n, generator=generator) < p for p in (0.3, 0.9, 0.1, 0.5, 0.6)]
    return [*drawn, torch.zeros(n) > 0, torch.ones(n) > 0, torch.arange(n) == 3]


def run(program, device, shape, marks, mask, grad):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator).to(device) for _ in range(2))
    for t, mark in zip((x, w), marks or ()):
        spmd.mark_sharding(t, *mark)
    if grad:
        x.requires_grad_()
        w.requires_grad_()
    y = x * 1
    program(y, mask.to(device), w)
    if not grad:
        return [y]
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in (x, w) if t.grad is not None)]


@pytest.mark.parametrize(
    ("program", "layout", "grad"), crossed([*PROGRAMS], [*LAYOUTS], [False, True])
)
def test_masks_share_a_program_and_are_not_read(program, layout, grad, mesh_2d):
    shape, x_spec, w_spec = LAYOUTS[layout]
    marks = None if x_spec is None else ((mesh_2d, x_spec), (mesh_2d, w_spec))
    found = []
    before = spmd.metrics.counter("data_dependent_reads")
    compiles = []
    for mask in masks_of(shape[0]):
        found.append(run(program, "xla", shape, marks, mask, grad))
        spmd.sync()
        compiles.append(spmd.metrics.counter("compiles"))
    assert spmd.metrics.counter("data_dependent_reads") == before
    assert compiles[-1] == compiles[1]
    for mask, ours in zip(masks_of(shape[0]), found):
        right = run(program, "cpu", shape, None, mask, grad)
        torch.testing.assert_close([t.cpu() for t in ours], right, rtol=1e-4, atol=1e-4)


def test_segment_anythings_prompts_are_embedded_in_one_program():
    embed = torch.nn.Embedding(3, 4)

    def prompts(labels, points, weight):
        points = points * 1
        points[labels == -1] = 0.0
        points[labels == -1] += weight[0]
        points[labels == 0] += weight[1]
        points[labels == 1] += weight[2]
        return points

    on_device = torch.nn.Parameter(embed.weight.detach().to("xla"))
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        labels = torch.randint(-1, 2, (2, 5), generator=generator)
        points = torch.randn(2, 5, 4, generator=generator)
        ours = prompts(labels.to("xla"), points.to("xla"), on_device)
        right = prompts(labels, points, embed.weight)
        ours.square().sum().backward()
        right.square().sum().backward()
        torch.testing.assert_close(ours.detach().cpu(), right.detach())
        torch.testing.assert_close(on_device.grad.cpu(), embed.weight.grad)
        if step == 1:
            compiles = spmd.metrics.counter("compiles")
    assert spmd.metrics.counter("compiles") == compiles
    assert spmd.metrics.counter("data_dependent_reads") == 0


LOOKED_AT = {
    "shape": lambda x, mask: torch.tensor([*x[mask].shape, *x[mask].stride(), x[mask].numel()]),
    "size": lambda x, mask: torch.tensor([x[mask].size(0), len(x[mask]), x[mask].size()[-1]]),
    "dims": lambda x, mask: torch.tensor([x[mask].dim(), x[mask].is_contiguous()]),
    "product": lambda x, mask: x[mask] @ x.T,
    "rows of it": lambda x, mask: torch.stack([*x[mask]]),
    "view": lambda x, mask: x[mask].reshape(-1) + 1,
    "written view": lambda x, mask: [r := x[mask] + 1, r[0].mul_(2)][0],
    "other masks": lambda x, mask: x[mask] * 2 + x[mask.roll(1)],
    "broadcast rows": lambda x, mask: x[mask] + x[:3],
    "masked again": lambda x, mask: x[mask][x[mask][:, 0] > -99],
    "concatenated": lambda x, mask: torch.cat([x[mask], x]),
    "indices": lambda x, mask: x[mask, torch.arange(3).to(x.device)],
    "index first": lambda x, mask: x[torch.arange(3).to(x.device), x[0] > 1],
    "mean": lambda x, mask: x[mask].mean() + x[mask].mean(0),
    "in place, of another size": lambda x, mask: x[mask].add_(x[:3]),
    "a view in place": lambda x, mask: [r := x[mask], r.t_()][0],
    "resized": lambda x, mask: x[mask].resize_(2, 3),
    "sum of rows": lambda x, mask: x[mask].sum(1) + x[mask].sum(-1, keepdim=True)[:, 0],
    "data": lambda x, mask: x[mask].data * 2,
    "set data": lambda x, mask: [r := x[mask], setattr(r, "data", x * 2), r.add_(1)][0],
    "parameter": lambda x, mask: torch.nn.Parameter(x[mask]).detach(),
    "random": lambda x, mask: torch.nn.functional.dropout(x[mask], 0.0),
    "copied": lambda x, mask: copy.deepcopy(x[mask]),
    "written": lambda x, mask: x.clone().index_put_((mask,), x[mask.roll(1)]),
}


@pytest.mark.filterwarnings("ignore:the shape of the result")
@pytest.mark.parametrize("name", LOOKED_AT)
def test_where_its_size_is_looked_at_it_is_as_in_eager_torch(name):
    mask = torch.tensor([True, False, True, True])
    x = torch.arange(20.0).reshape(4, 5)
    right = LOOKED_AT[name](x.clone(), mask)
    found = LOOKED_AT[name](x.to("xla"), mask.to("xla"))
    assert tuple(found.shape) == tuple(right.shape) and found.dtype == right.dtype
    torch.testing.assert_close(found.cpu(), right)


@pytest.mark.filterwarnings("ignore:the shape of the result")
def test_operands_that_do_not_fit_are_told_with_the_selected_size():
    x, mask = torch.zeros(4, 5).to("xla"), (torch.arange(4) != 1).to("xla")
    with pytest.raises(RuntimeError, match=r"tensor a \(3\)"):
        x[mask].add_(torch.zeros(4, 5).to("xla"))
    with pytest.raises(RuntimeError, match=r"tensor b \(4\)"):
        x[mask] + torch.zeros(4).to("xla")


@pytest.mark.filterwarnings("ignore:the shape of the result")
def test_what_was_selected_is_what_was_there():
    x, mask = torch.arange(6.0).to("xla"), (torch.arange(6) % 2 == 0).to("xla")
    rows = x[mask]
    x.zero_()
    mask.zero_()
    spmd.sync()
    assert rows.tolist() == [0.0, 2.0, 4.0]


def test_what_a_mask_leaves_out_does_not_reach_values_or_gradients():
    """Logarithms, roots and quotients of all elements are NaN and infinite where it is False."""

    def results(device):
        x = torch.tensor([0.0, -1.0, 2.0, 3.0, torch.inf, -4.0, 5.0, torch.nan])
        x, scale = x.to(device).requires_grad_(), torch.tensor(1.5).to(device).requires_grad_()
        mask = (x > 0) & (x < 4.5)
        total = (x[mask].log() * scale + x[mask].sqrt() / x[mask]).sum()
        total.backward()
        written = x.detach().clone()
        written[mask] = written[mask].log()
        return [t.detach().cpu() for t in (total, x.grad, scale.grad, written)]

    torch.testing.assert_close(results("xla"), results("cpu"), equal_nan=True)
