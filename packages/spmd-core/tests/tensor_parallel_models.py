"""A small transformer, and the plans of the tensor-parallel tutorial for it."""

import torch
import torch.nn.functional as F
from torch import nn

from spmd_core.dtensor import (
    ColwiseParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, hidden) for _ in range(2))
        self.w2 = nn.Linear(hidden, width)  # with a bias, which is added once

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width, hidden)
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary=64, width=32, heads=4, hidden=64, layers=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = Norm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def plan(kind):
    """The plans of the tensor-parallel tutorial: "tensor", or "sequence" with the loss parallel."""
    sequence = Shard(1) if kind == "sequence" else Replicate()
    whole = PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),))
    block = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=sequence),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=sequence),
        "feed_forward.w3": ColwiseParallel(),
    }
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "output": ColwiseParallel(input_layouts=sequence, use_local_output=False),
    }
    if kind == "sequence":
        block |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        block |= {"attention": whole, "feed_forward": whole}
        ends["norm"] = SequenceParallel()
    return {f"layers.*.{path}": style for path, style in block.items()} | ends
