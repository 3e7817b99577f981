"""Hugging Face's Llama from a preset, with random weights, and its loss; neither knows a mesh.

Legend: B sequences, T tokens of a sequence, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.llama_tp.presets import ModelPreset
from examples.training.attention import CAUSAL_SDPA


def build_model(preset: ModelPreset, *, vocab_size: int, positions: int) -> LlamaForCausalLM:
    """A Llama in training mode, with random weights, on torch's default device.

    Args:
        preset: the model's sizes.
        vocab_size: rows of the token table.
        positions: the longest sequence that it is meant for.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=preset.width,
        intermediate_size=preset.hidden,
        num_hidden_layers=preset.num_layers,
        num_attention_heads=preset.num_heads,
        num_key_value_heads=preset.num_kv_heads,
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation=CAUSAL_SDPA,
    )
    return LlamaForCausalLM(config).train()


def next_token_loss(model: nn.Module, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the tokens of a batch: a float32 scalar on the batch's device."""
    logits_BTV = model(x_BT).logits
    return F.cross_entropy(logits_BTV.float().transpose(1, 2), y_BT)
