"""transformers' Mixtral, a Llama whose MLPs are experts, on sequences of random tokens.

Legend: B sequences, T tokens, D width, E experts, F their hidden size, V vocabulary.
"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.auto_models.manual import HIDDEN, by_rules
from benchmarks.auto_models.model import Built, Model, adamw, tokens, train_step
from examples.gpt2.presets import BATCH_AXES
from examples.gpt2.shardings import LOGITS_BTV, Spec
from examples.llama_tp.model import next_token_loss
from examples.training.attention import CAUSAL_SDPA
from examples.training.remat import recompute

# By size: layers, width, hidden size, heads, heads of keys and values, experts, vocabulary,
# sequences of a batch, length, and whether blocks compute again in the backward.
SIZES = {
    "tiny": (2, 32, 64, 4, 2, 4, 128, 8, 16, False),
    "small": (4, 256, 512, 8, 4, 4, 4096, 8, 128, False),
    "8x160M": (12, 768, 2048, 12, 4, 8, 32000, 64, 1024, True),
}


def build(size: str, device: str | torch.device) -> Built:
    """See `benchmarks.auto_models`; the inputs are tokens (B, T), and what follows each."""
    (*dims, vocab_size, batch, length, is_recomputed) = SIZES[size]
    num_layers, width, hidden, num_heads, num_kv_heads, num_experts = dims
    config = MixtralConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_local_experts=num_experts,
        num_experts_per_tok=2,
        max_position_embeddings=length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation=CAUSAL_SDPA,
        experts_implementation="grouped_mm",
    )
    with torch.device(device):
        model = MixtralForCausalLM(config).train()
    if is_recomputed:
        recompute(model.model.layers, "full")
    optimizer = adamw(model, lr=3e-4)
    step = train_step(model, optimizer, next_token_loss, is_bf16=size not in ("tiny", "small"))
    x, y = (tokens(vocab_size, (batch, length), device) for _ in range(2))
    return model, optimizer, step, (x, y)


# Linear weights are (out, in); those of experts (E, out, in).
PARAMETERS: dict[str, Spec] = {
    r"(model\.embed_tokens|lm_head)\.weight": (("tensor", "fsdp"), None),
    r".*\.[qkv]_proj\.weight": ("tensor", "fsdp"),
    r".*\.o_proj\.weight": ("fsdp", "tensor"),
    r".*\.gate_up_proj": (None, "tensor", "fsdp"),
    r".*\.down_proj": (None, "fsdp", "tensor"),
    r".*(gate|norm)\.weight": (None,),
}
OUTPUTS: dict[str, Spec] = {
    r"model\.(embed_tokens|layers\.\d+|norm)": HIDDEN,
    r".*\.mlp\.experts": (BATCH_AXES, None),  # (B·T, D)
    r"lm_head": LOGITS_BTV,
}
MODEL = Model("mixtral", tuple(SIZES), build, by_rules(PARAMETERS, OUTPUTS))
