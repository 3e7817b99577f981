"""Layers for tests of loops over layers, and a comparison with eager torch, layer by layer."""

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import spmd_core as spmd

WIDTH, HIDDEN = 6, 10


class Block(nn.Module):
    """Uneven sizes, a tied weight, buffers, and an attribute that differs and nobody reads."""

    def __init__(self, index=0):
        super().__init__()
        self.index = index
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.again = self.down
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(HIDDEN), persistent=False)

    def forward(self, x):
        h = functional.gelu(self.up(self.norm(x)) + self.shift)
        return x * self.scale + self.again(h) + self.down(h.sin())


class Attention(nn.Module):
    """Causal attention of `heads` heads over `(batch, sequence, width)`, in a residual."""

    def __init__(self, _=0, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + self.out(y.transpose(1, 2).flatten(2))


def one_by_one(layers, x, *args, per_layer=None, **kwargs):
    """What `scan_layers` computes, as a loop in Python."""

    def item(tree, i):
        if isinstance(tree, dict):
            return {key: item(value, i) for key, value in tree.items()}
        if isinstance(tree, tuple):
            return tuple(item(value, i) for value in tree)
        return None if tree is None else tree[i]

    collected = []
    for i, layer in enumerate(layers):
        own = item(per_layer, i)
        if isinstance(own, dict):
            result = layer(x, *args, **own, **kwargs)
        else:
            result = layer(x, *(() if own is None else (own,)), *args, **kwargs)
        if isinstance(result, tuple) and not isinstance(x, tuple):
            result, *others = result
            collected.append(others)
        x = result
    if not collected:
        return x
    return x, *pytree.tree_map(
        lambda *each: None if each[0] is None else torch.stack(each), *collected
    )


def compare(make, compute, count=3, prepare=None, rtol=1e-4, atol=1e-5):
    """Compares results and gradients of layers on the device with those of eager torch.

    Args:
        make: `make(i)` is layer i.
        compute: `compute(run, layers, device)` is a list of tensors; `run` is `scan_layers` or the
            loop in Python. If the first requires a gradient, so do the layers' parameters get one.
        count: the number of layers.
        prepare: what is done to the layers on the device before, in place.

    Returns:
        The layers on the device.
    """
    torch.manual_seed(0)
    right = nn.ModuleList(make(i) for i in range(count))
    mine = copy.deepcopy(right).to("xla")
    if prepare is not None:
        prepare(mine)
    pairs = []
    for run, layers, device in ((one_by_one, right, "cpu"), (spmd.scan_layers, mine, "xla")):
        results = compute(run, layers, device)
        if results[0].requires_grad and results[0].grad_fn is not None:
            weights = torch.linspace(0.5, 1.5, results[0].numel()).view(results[0].shape)
            (results[0] * weights.to(device)).square().mean().backward()
        grads = [p.grad for p in dict(layers.named_parameters()).values()]
        pairs.append([*results, *grads])
    spmd.sync()
    for expected, actual in zip(*pairs, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(
                actual.detach().cpu(), expected.detach(), rtol=rtol, atol=atol
            )
    return mine


def given(x, device):
    """A leaf on the device, with a gradient if it can have one."""
    x = x.clone().to(device)
    return x.requires_grad_() if x.is_floating_point() else x
