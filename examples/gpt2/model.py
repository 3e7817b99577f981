"""Builds Hugging Face's GPT-2 from a preset, with random weights and without a mesh."""

from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from examples.gpt2.presets import ModelPreset

# transformers' "sdpa" without its mask builder. The builder checks whether several texts are packed
# in one row, and reads a tensor on the host for that in every forward; on a lazy device this would
# cut each step in two. An attention without a registered mask builder gets no mask, and
# transformers then asks torch for causal attention (is_causal=True), which is also the fast path.
# This can go when transformers lets the caller state that rows are not packed.
AttentionInterface.register("causal_sdpa", sdpa_attention_forward)


def build_model(preset: ModelPreset, *, vocab_size: int, dropout: float) -> GPT2LMHeadModel:
    """A GPT-2 in training mode, with random weights, on torch's default device.

    Args:
        preset: the model's sizes.
        vocab_size: rows of the token table, padding included.
        dropout: probability of dropping an embedding, an attention weight or a residual.
    """
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=preset.positions,
        n_embd=preset.width,
        n_layer=preset.num_layers,
        n_head=preset.num_heads,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        # The same function as GPT-2's "gelu_new" in one operation instead of eight: fewer
        # operations to record, and less memory kept for the backward.
        activation_function="gelu_pytorch_tanh",
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="causal_sdpa",
    )
    return GPT2LMHeadModel(config).train()
