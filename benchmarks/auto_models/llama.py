"""Llama of the recipe, on sequences of random tokens."""

import dataclasses

import torch
from torch import Tensor, nn

import spmd_core as spmd
from benchmarks.auto_models.manual import mark_inputs, mark_parameters
from benchmarks.auto_models.model import Built, Model, adamw, tokens, train_step
from examples.llama_tp import shardings
from examples.llama_tp.model import build_model, next_token_loss
from examples.llama_tp.presets import BATCH_AXES, PRESETS, ModelPreset
from examples.training.remat import recompute

# Llama 3.1 8B, which the recipe lacks.
LLAMA_8B = ModelPreset("8B", 32, 4096, 14336, 32, 8, 128256, 2048, 64, 3e-4)
# By size: the preset, sequences of a batch, and whether blocks compute again in the backward.
SIZES = {
    "tiny": (dataclasses.replace(PRESETS["debug"], seq=32), 8, False),
    "small": (PRESETS["tiny"], 8, False),
    "1B": (PRESETS["1B"], 64, True),
    "8B": (LLAMA_8B, 64, True),
    "70B": (PRESETS["70B"], 64, True),
}


def build(size: str, device: str | torch.device) -> Built:
    """See `benchmarks.auto_models`; the inputs are tokens (B, T), and what follows each."""
    preset, batch, is_recomputed = SIZES[size]
    with torch.device(device):
        model = build_model(preset, vocab_size=preset.vocab_size, positions=preset.seq)
    if is_recomputed:
        recompute(model.model.layers, "full")
    optimizer = adamw(model, lr=preset.lr)
    step = train_step(model, optimizer, next_token_loss, is_bf16=size not in ("tiny", "small"))
    x, y = (tokens(preset.vocab_size, (batch, preset.seq), device) for _ in range(2))
    return model, optimizer, step, (x, y)


def by_plan(model: nn.Module, inputs: tuple[Tensor, ...], mesh: spmd.Mesh) -> None:
    """The recipe's FSDP, with sequence and loss parallelism where there is an axis tensor."""
    mark_inputs(inputs, mesh, (BATCH_AXES,))
    shardings.parallelize(model, mesh, sequence_parallel=True, loss_parallel=True)


def replicated(model: nn.Module, inputs: tuple[Tensor, ...], mesh: spmd.Mesh) -> None:
    """Data parallelism alone."""
    mark_inputs(inputs, mesh, (BATCH_AXES,))
    mark_parameters(model, mesh, {r".*": ()})


MANUAL = {"data": replicated, "fsdp": by_plan, "fsdp_tensor": by_plan}
MODEL = Model("llama", tuple(SIZES), build, MANUAL)
