"""The mesh that the options of a GPT-2 run ask for, checked against devices and model."""

from typing import Any

import spmd_core as spmd
from examples.gpt2 import shardings
from examples.gpt2.config import STRATEGIES, TrainConfig
from examples.gpt2.presets import PRESETS, padded_vocab
from examples.training.command import mesh_of
from examples.training.knobs import KnobError, nearest_multiple

DRAWN_ON_HOST = 400_000_000  # the most parameters that --init auto draws on the host


def draws_on_device(config: TrainConfig) -> bool:
    """Whether the weights are drawn on the device: the host may lack memory for a large model."""
    num_params = PRESETS[config.preset].num_params(padded_vocab(config.vocab, config.pad_vocab))
    is_large = num_params > DRAWN_ON_HOST
    return config.init == "device" or (config.init == "auto" and is_large)


def parsed_mesh(config: TrainConfig) -> spmd.Mesh | None:
    """The mesh, or None for one device.

    Raises:
        KnobError: the shardings do not know an axis, or the batch does not divide by its shards.
        spmd.errors.MeshError: the text is not a mesh, or the mesh does not fit the devices.
    """
    if not config.mesh:
        return None
    available = spmd.global_runtime_device_count()
    if config.mesh_devices > available:
        raise KnobError(
            f"--mesh-devices must not pass the number of devices; got {config.mesh_devices} of "
            f"{available}. Pass at most {available}, or start with more --devices."
        )
    mesh = (
        spmd.parse_mesh(config.mesh, config.mesh_devices)
        if config.mesh_devices
        else mesh_of(config.mesh, available, num_emulated=config.devices)
    )
    known = STRATEGIES[config.strategy]
    unknown = [axis for axis in mesh.shape() if axis not in known]
    if unknown:
        raise KnobError(
            f"with --strategy {config.strategy} mesh axes must be among {', '.join(known)}; got "
            f"{unknown} in {config.mesh!r}. Rename them, or take another strategy."
        )
    if config.strategy == "fsdp" and "fsdp" not in mesh.shape():
        raise KnobError(
            f"--strategy fsdp needs a mesh axis fsdp, which splits the parameters; got "
            f"{config.mesh!r}. Pass for instance --mesh fsdp={mesh.size()}."
        )
    num_parts = shardings.num_batch_shards(mesh) * config.accumulate
    factors = "data x fsdp x --accumulate"
    if config.strategy == "pipeline":
        _check_pipeline(config, mesh)
        num_parts *= num_microbatches(config, mesh)
        factors += " x --microbatches"
    if config.batch % num_parts:
        raise KnobError(
            f"--batch must divide by {factors}; got {config.batch} for "
            f"{num_parts}. Pass for instance --batch "
            f"{nearest_multiple(config.batch, num_parts)}."
        )
    num_heads, by = PRESETS[config.preset].num_heads, shardings.axis_size(mesh, "tensor")
    if num_heads % by:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise KnobError(
            f"the axis tensor splits attention by heads, whose number it must divide; got "
            f"tensor={by} for the {num_heads} heads of {config.preset}. Pass one of tensor="
            f"{', '.join(map(str, fitting))}, or another preset."
        )
    return mesh


def num_microbatches(config: TrainConfig, mesh: spmd.Mesh) -> int:
    """Microbatches of a pipeline."""
    return config.microbatches or shardings.axis_size(mesh, "pipe")


def pipeline_options(config: TrainConfig, mesh: spmd.Mesh) -> dict[str, Any]:
    """What `shardings.pipeline` takes beside the model and the mesh."""
    return {
        "num_microbatches": num_microbatches(config, mesh),
        "schedule": config.schedule,
        "rounds": config.rounds if config.schedule == "circular" else 1,
    }


def _check_pipeline(config: TrainConfig, mesh: spmd.Mesh) -> None:
    """Raises KnobError if a pipeline does not fit the mesh or the preset's layers."""
    if "pipe" not in mesh.shape():
        raise KnobError(
            f"--strategy pipeline needs a mesh axis pipe, along which the stages are split; got "
            f"{config.mesh!r}. Pass for instance --mesh pipe={mesh.size()}."
        )
    if config.mesh_devices:
        raise KnobError(
            "--strategy pipeline takes all devices; got --mesh-devices "
            f"{config.mesh_devices}. Leave it out."
        )
    num_layers, stages = PRESETS[config.preset].num_layers, shardings.axis_size(mesh, "pipe")
    chunks = stages * (config.rounds if config.schedule == "circular" else 1)
    if num_layers % chunks:
        raise KnobError(
            "pipe x --rounds (with --schedule circular) must divide the layers; got "
            f"{chunks} for the {num_layers} of {config.preset}. Take a smaller pipe, or another "
            "preset."
        )
