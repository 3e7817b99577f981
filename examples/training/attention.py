"""Causal attention for transformers' models, over rows of one text each or of packed documents."""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import spmd_core as spmd


def causal_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    document_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' "sdpa", or `spmd.document_attention` where the model was given document ids.

    A model hands on the arguments that it does not know:
    `model(input_ids, position_ids=..., document_ids=...)`, with tensors of shape (batch, rows).

    Args:
        module: the attention module.
        query, key, value: (batch, heads, rows, dim); keys may have fewer heads.
        attention_mask: of transformers; None for rows without padding.
        dropout: the probability that a weight is dropped.
        scaling: the factor of the products.
        is_causal: None: what the module says, or True.
        document_ids: (batch, rows), integers; None for rows of one text each.

    Raises:
        ValueError: both a mask and document ids are given.
    """
    if document_ids is None:
        return sdpa_attention_forward(
            *(module, query, key, value, attention_mask),
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    if attention_mask is not None:
        raise ValueError(
            "document_ids say which rows see each other, padding included; got an attention_mask "
            "too. Leave it out, and give padding an id of its own."
        )
    out = spmd.document_attention(
        query,
        key,
        value,
        document_ids,
        dropout_p=dropout,
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


# transformers' "sdpa" without its mask builder. The builder checks whether several texts are packed
# in one row, and reads a tensor on the host for that in every forward; on a lazy device this would
# split each step into two programs. An attention without a registered mask builder gets no mask,
# and transformers then asks torch for causal attention (is_causal=True), which is also the fast
# path. This can go when transformers lets the caller state that rows are not packed.
CAUSAL_SDPA = "causal_sdpa"
AttentionInterface.register(CAUSAL_SDPA, causal_attention)
