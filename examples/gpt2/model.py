"""The model: Hugging Face's GPT-2, built from a preset with random weights. It knows nothing of meshes."""

from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from examples.gpt2.presets import ModelPreset

# transformers' "sdpa" without its mask builder. The builder looks for several texts packed in one row, and for that it reads a tensor on the host
# in every forward: on a lazy device this would cut each step in two. An attention that has no registered mask builder gets no mask at all,
# and then transformers asks torch for causal attention (is_causal=True), which is also the fast path. Not needed any more once transformers
# lets the caller say that rows are not packed.
AttentionInterface.register("causal_sdpa", sdpa_attention_forward)


def build_model(preset: ModelPreset, *, vocab_size: int, dropout: float) -> GPT2LMHeadModel:
    """A GPT-2 with fresh weights from torch's generator, on torch's default device, in training mode.

    Args:
        preset: the sizes.
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
        # The same function as GPT-2's "gelu_new", as one operation instead of eight: less to trace, and less to keep for backward.
        activation_function="gelu_pytorch_tanh",
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="causal_sdpa",
    )
    return GPT2LMHeadModel(config).train()
