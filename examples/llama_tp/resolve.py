"""The model, the sizes and the mesh that the options of a Llama run ask for, checked together."""

import dataclasses

import torch
from transformers import LlamaForCausalLM

import spmd_core as spmd
from examples.llama_tp import weights
from examples.llama_tp.config import TrainConfig, check_mesh, check_options
from examples.llama_tp.model import build_model
from examples.llama_tp.presets import PRESETS, ModelPreset
from examples.training.command import mesh_of
from examples.training.knobs import KnobError, nearest_multiple, option
from examples.training.meter import Work
from spmd_core.metrics import ModelSize


def with_defaults(config: TrainConfig) -> TrainConfig:
    """The configuration with the preset's values for options left open, after checking all options.

    The checks need no device and no text.

    Raises:
        KnobError: an option is out of range, or two options do not fit together.
    """
    check_options(config)
    preset = sizes(config)
    lr = config.lr or preset.lr
    config = dataclasses.replace(
        config,
        batch=config.batch or preset.batch,
        seq=config.seq or preset.seq,
        vocab=config.vocab or preset.vocab_size,
        lr=lr,
        min_lr=lr / 10 if config.min_lr < 0 else config.min_lr,
        data=tuple(config.data),
    )
    if config.weights:
        weights.check(config.weights, seq=config.seq)
    for name in ("export", "adapters"):
        weights.check_target(option(name), getattr(config, name), config.weights)
    if config.batch % config.accumulate:
        raise KnobError(
            f"--batch must divide by --accumulate; got {config.batch} and {config.accumulate}. "
            f"Pass for instance --batch {nearest_multiple(config.batch, config.accumulate)}."
        )
    return config


def sizes(config: TrainConfig) -> ModelPreset:
    """The model's sizes: the preset's, or those of the folder that --weights names.

    Raises:
        KnobError: the folder has no Llama.
    """
    preset = PRESETS[config.preset]
    return weights.sizes(config.weights, defaults=preset) if config.weights else preset


DRAWN_ON_HOST = 200_000_000  # the most parameters that --init auto draws on the host


def model_of(config: TrainConfig, device: torch.device) -> LlamaForCausalLM:
    """The model on a device in training mode, with random weights by the seed."""
    torch.manual_seed(config.seed)
    with device if draws_on_device(config) else torch.device("cpu"):
        if config.weights:
            model = LlamaForCausalLM(weights.model_config(config.weights)).train()
            if config.finds_mesh:  # into the host's memory: no device has its shards yet
                weights.load(model, config.weights)
        else:
            model = build_model(sizes(config), vocab_size=config.vocab, positions=config.seq)
    return model.to(device)


def draws_on_device(config: TrainConfig) -> bool:
    """Whether the weights are drawn on the device: the host may lack memory for a large model.

    Weights that come from files are recorded there too: they are replaced before any is drawn.
    With --mesh auto these come from the host: no device has its shards yet when they are read.
    """
    is_large = sizes(config).num_params(config.vocab) > DRAWN_ON_HOST
    is_wanted = config.init == "device" or (config.init == "auto" and is_large)
    if config.weights:
        is_wanted = not config.finds_mesh
    return is_wanted and config.device == "xla"


def work_of(config: TrainConfig, *, num_params: int, num_trained: int) -> Work:
    """What a step computes."""
    preset = sizes(config)
    size = ModelSize(num_params, preset.num_layers, preset.width, config.seq, num_trained)
    return Work.on_tokens(f"Llama {preset.name}", size, batch=config.batch)


def parsed_mesh(config: TrainConfig) -> spmd.Mesh | None:
    """The mesh; None for one device, and for a mesh that is found.

    Raises:
        KnobError: the text is not a mesh, or the mesh does not fit emulated devices, the plan, the
            batch, the sequences or the model.
        spmd.errors.MeshError: the mesh does not fit the devices.
    """
    mesh = (
        mesh_of(config.mesh, spmd.global_runtime_device_count(), num_emulated=config.devices)
        if config.named_mesh
        else None
    )
    check_mesh(config, mesh.shape() if mesh else {}, sizes(config))
    return mesh


def plan_options(config: TrainConfig) -> dict[str, bool]:
    """What `shardings.parallelize` takes beside the model and the mesh."""
    return {
        "sequence_parallel": config.sequence_parallel,
        "loss_parallel": config.loss_parallel,
        "has_adapters": bool(config.lora),
    }
