"""The function that splits the sequences of attention while a context is active."""

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

# Marks the sequences of attention; None outside of `context_parallel`.
# Guarded by: the context. Cleared by: the end of the context.
current: ContextVar[SplitSequences | None] = ContextVar("split_sequences", default=None)
