"""GPT-2 of the recipe, on sequences of random tokens."""

import dataclasses

import torch
from torch import Tensor, nn

import spmd_core as spmd
from benchmarks.auto_models.manual import mark_inputs
from benchmarks.auto_models.model import Built, Model, adamw, tokens, train_step
from examples.gpt2 import shardings
from examples.gpt2.model import build_model, next_token_loss
from examples.gpt2.presets import BATCH_AXES, PRESETS, padded_vocab
from examples.training.remat import recompute

# By size: the preset, sequences of a batch, and whether blocks compute again in the backward.
SIZES = {
    "tiny": ("smoke", 8, False),
    "small": ("tiny", 8, False),
    "124M": ("124M", 64, False),
    "1.5B": ("1.5B", 64, True),
    "4B": ("4B", 64, True),
}


def build(size: str, device: str | torch.device) -> Built:
    """See `benchmarks.auto_models`; the inputs are tokens (B, T), and what follows each."""
    name, batch, is_recomputed = SIZES[size]
    preset = PRESETS[name]
    if size == "tiny":
        preset = dataclasses.replace(preset, seq=32)
    vocab_size = padded_vocab(preset.vocab_size, 128)
    with torch.device(device):
        model = build_model(preset, vocab_size=vocab_size, dropout=0.0)
    if is_recomputed:
        recompute(model.transformer.h, "full")
    optimizer = adamw(model, lr=preset.lr)
    step = train_step(model, optimizer, next_token_loss, is_bf16=size not in ("tiny", "small"))
    x, y = (tokens(preset.vocab_size, (batch, preset.seq), device) for _ in range(2))
    return model, optimizer, step, (x, y)


def by_marks(model: nn.Module, inputs: tuple[Tensor, ...], mesh: spmd.Mesh) -> None:
    """The recipe's strategies ddp and spmd: marks of parameters, hidden states and logits."""
    mark_inputs(inputs, mesh, (BATCH_AXES,))
    shardings.parallelize(model, mesh, "spmd")


def by_units(model: nn.Module, inputs: tuple[Tensor, ...], mesh: spmd.Mesh) -> None:
    """The recipe's strategy fsdp: `fully_shard` of each block."""
    mark_inputs(inputs, mesh, (BATCH_AXES,))
    shardings.parallelize(model, mesh, "fsdp")


MANUAL = {"data": by_marks, "fsdp": by_marks, "fsdp_tensor": by_marks, "fully_shard": by_units}
MODEL = Model("gpt2", tuple(SIZES), build, MANUAL)
