"""A layer of experts as transformers writes it: tokens sorted by expert, grouped products, back."""

import torch
import torch.nn.functional as F

import spmd_core as spmd

WIDTH, HIDDEN = 16, 24


def tensors(batch=8, length=8, num_experts=4, *, bias=None, dtype=torch.float32):
    """Data (batch, length, WIDTH), the router's weight, and those of the experts.

    Args:
        batch, length, num_experts: sizes.
        bias: added to the scores of each expert, so that some have no tokens.
        dtype: of all of them.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (batch, length, WIDTH),
        (num_experts, WIDTH),
        (num_experts, 2 * HIDDEN, WIDTH),
        (num_experts, WIDTH, HIDDEN),
    ]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made = [made[0].to(dtype), *((t / 2).to(dtype) for t in made[1:])]
    scores = torch.zeros(num_experts) if bias is None else torch.tensor(bias)
    return [*made, scores.to(dtype)]


def sort_tokens(x, chosen, num_experts):
    """The tokens in the order of the experts that they go to, the order, and the ends of experts.

    The counts are of another dtype on the CPU, which counts floats alone.
    """
    experts = chosen.reshape(-1)
    by_expert, order = torch.sort(experts, stable=True)
    counted = by_expert.float() if x.device.type == "cpu" else by_expert.int()
    counts = torch.histc(counted, bins=num_experts, min=0, max=num_experts - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    return x[order // chosen.shape[-1]], order, ends


def multiply(rows, up, down, ends):
    gate, factor = F.grouped_mm(rows, up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * factor, down.transpose(-2, -1), offs=ends)


def inverse_of(order):
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=order.device)
    return inverse


def route(x, router, bias, k=2):
    """The k experts of each token, with their shares."""
    shares, chosen = torch.topk(F.softmax(F.linear(x, router) + bias, -1), k, -1)
    return shares / shares.sum(-1, keepdim=True), chosen


def experts(x, router, up, down, bias, *, k=2, inverse=inverse_of):
    """(batch, length, WIDTH) to the same."""
    flat = x.reshape(-1, WIDTH)
    shares, chosen = route(flat, router, bias, k)
    rows, order, ends = sort_tokens(flat, chosen, len(router))
    out = multiply(rows, up, down, ends) * shares.reshape(-1)[order].unsqueeze(-1)
    out = out[inverse(order)].view(-1, k, WIDTH).sum(1)
    return out.view(x.shape)


def gradients(function, given):
    """The result of a function of the tensors, and the gradients of a sum of it with weights."""
    leaves = [t.detach().requires_grad_() for t in given]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype, device=out.device)
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def marked(given, mesh, data, up=(None, None, None), down=(None, None, None)):
    """The tensors on the device, the data's first dim and the experts' matrices split."""
    specs = [(data, None, None), (None, None), up, down, (None,)]
    return [spmd.mark_sharding(t.to("xla"), mesh, spec) for t, spec in zip(given, specs)]
