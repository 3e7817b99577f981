"""Causal attention for transformers' models of which each row is one text."""

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# transformers' "sdpa" without its mask builder. The builder checks whether several texts are packed
# in one row, and reads a tensor on the host for that in every forward; on a lazy device this would
# cut each step in two. An attention without a registered mask builder gets no mask, and
# transformers then asks torch for causal attention (is_causal=True), which is also the fast path.
# This can go when transformers lets the caller state that rows are not packed.
CAUSAL_SDPA = "causal_sdpa"
AttentionInterface.register(CAUSAL_SDPA, sdpa_attention_forward)
