"""Hugging Face's GPT-2 from a preset, with random weights, and its loss; neither knows a mesh.

Legend: A parts of a batch, B sequences of a part, T tokens of a sequence, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from examples.gpt2.presets import ModelPreset
from examples.training.attention import CAUSAL_SDPA
from spmd_data.packing import NO_TARGET


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


def next_token_loss(
    model: nn.Module,
    x_BT: torch.Tensor,
    y_BT: torch.Tensor,
    position_BT: torch.Tensor | None = None,
    document_BT: torch.Tensor | None = None,
    *,
    num_targets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross entropy over the tokens of a batch: a float32 scalar on the batch's device.

    Args:
        model: the model.
        x_BT, y_BT: tokens, and what follows each; -100 where nothing does.
        position_BT, document_BT: of packed documents.
        num_targets: what to divide the sum by, in place of the number of this part's targets.
    """
    packed = (
        {} if document_BT is None else {"position_ids": position_BT, "document_ids": document_BT}
    )
    logits_BTV = model(x_BT, **packed).logits
    scores, targets = logits_BTV.float().flatten(0, 1), y_BT.flatten()
    if num_targets is None:
        return F.cross_entropy(scores, targets)
    return F.cross_entropy(scores, targets, reduction="sum") / num_targets


def mean_targets(y_ABT: torch.Tensor) -> torch.Tensor:
    """The mean number of targets of a part, so that the parts' losses have the batch's mean."""
    return (y_ABT != NO_TARGET).sum() / len(y_ABT)
