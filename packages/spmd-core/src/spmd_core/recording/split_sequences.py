"""What splits the sequences of the attentions that are being recorded."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeAlias

import torch

# Takes query, key, value, mask, the probability of dropout and whether the mask is causal; returns
# the first three, marked.
SplitSequences: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float, bool],
    tuple[torch.Tensor, ...],
]

# What marks the sequences of attention.
# Guarded by: the context. Cleared by: the end of the context.
current: ContextVar[SplitSequences | None] = ContextVar("split_sequences", default=None)
