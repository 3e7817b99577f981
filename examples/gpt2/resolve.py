"""The mesh and the model that the options of a GPT-2 run ask for, checked against the devices."""

from typing import Any

import torch
from transformers import GPT2LMHeadModel

import spmd_core as spmd
from examples.gpt2 import shardings
from examples.gpt2.config import TrainConfig, check_mesh, check_mesh_devices
from examples.gpt2.model import build_model
from examples.gpt2.presets import PRESETS, padded_vocab
from examples.training.command import mesh_of
from examples.training.meter import Work
from spmd_core.metrics import ModelSize

DRAWN_ON_HOST = 400_000_000  # the most parameters that --init auto draws on the host


def model_of(config: TrainConfig, device: torch.device) -> GPT2LMHeadModel:
    """The model on a device in training mode, with random weights by the seed."""
    torch.manual_seed(config.seed)
    with device if draws_on_device(config) else torch.device("cpu"):
        model = build_model(
            PRESETS[config.preset],
            vocab_size=padded_vocab(config.vocab, config.pad_vocab),
            dropout=config.dropout,
        )
    return model.to(device)


def draws_on_device(config: TrainConfig) -> bool:
    """Whether the weights are drawn on the device: the host may lack memory for a large model."""
    is_large = work_of(config).num_params > DRAWN_ON_HOST
    is_wanted = config.init == "device" or (config.init == "auto" and is_large)
    return is_wanted and config.device == "xla"


def work_of(config: TrainConfig) -> Work:
    """What a step computes."""
    preset = PRESETS[config.preset]
    num_params = preset.num_params(padded_vocab(config.vocab, config.pad_vocab))
    size = ModelSize(num_params, preset.num_layers, preset.width, config.seq)
    return Work.on_tokens(f"GPT-2 {preset.name}", size, batch=config.batch)


def parsed_mesh(config: TrainConfig) -> spmd.Mesh | None:
    """The mesh; None for one device, and for a mesh that is found.

    Raises:
        KnobError: the text is not a mesh, or the mesh does not fit emulated devices, the strategy,
            the batch or the preset.
        spmd.errors.MeshError: the mesh does not fit the devices.
    """
    if not config.named_mesh:
        return None
    available = spmd.global_runtime_device_count()
    check_mesh_devices(config, available)
    mesh = (
        spmd.parse_mesh(config.mesh, config.mesh_devices)
        if config.mesh_devices
        else mesh_of(config.mesh, available, num_emulated=config.devices)
    )
    check_mesh(config, mesh.shape())
    return mesh


def pipeline_options(config: TrainConfig, mesh: spmd.Mesh) -> dict[str, Any]:
    """What `shardings.pipeline` takes beside the model and the mesh."""
    return {
        "num_microbatches": config.microbatches or shardings.axis_size(mesh, "pipe"),
        "schedule": config.schedule,
        "rounds": config.rounds if config.schedule == "circular" else 1,
    }
