"""The mesh that the options of a GPT-2 run ask for, checked against devices and model."""

from typing import Any

import spmd_core as spmd
from examples.gpt2 import shardings
from examples.gpt2.config import TrainConfig, check_mesh, check_mesh_devices
from examples.gpt2.presets import PRESETS, padded_vocab
from examples.training.command import mesh_of

DRAWN_ON_HOST = 400_000_000  # the most parameters that --init auto draws on the host


def draws_on_device(config: TrainConfig) -> bool:
    """Whether the weights are drawn on the device: the host may lack memory for a large model."""
    num_params = PRESETS[config.preset].num_params(padded_vocab(config.vocab, config.pad_vocab))
    is_large = num_params > DRAWN_ON_HOST
    return config.init == "device" or (config.init == "auto" and is_large)


def parsed_mesh(config: TrainConfig) -> spmd.Mesh | None:
    """The mesh, or None for one device.

    Raises:
        KnobError: the text is not a mesh, or the mesh does not fit emulated devices, the strategy,
            the batch or the preset.
        spmd.errors.MeshError: the mesh does not fit the devices.
    """
    if not config.mesh:
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
