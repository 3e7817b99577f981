"""Builds Hugging Face's GPT-2 from a preset, with random weights and without a mesh."""

from transformers import GPT2Config, GPT2LMHeadModel

from examples.gpt2.presets import ModelPreset
from examples.training.attention import CAUSAL_SDPA


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
        attn_implementation=CAUSAL_SDPA,
    )
    return GPT2LMHeadModel(config).train()
