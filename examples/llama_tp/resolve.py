"""The model, the sizes and the mesh that the options of a Llama run ask for, checked together."""

import dataclasses

import spmd_core as spmd
from examples.llama_tp import shardings, weights
from examples.llama_tp.config import TrainConfig, check_options
from examples.llama_tp.presets import PRESETS, ModelPreset
from examples.training.command import mesh_of
from examples.training.knobs import KnobError, nearest_multiple, option


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


def draws_on_device(config: TrainConfig) -> bool:
    """Whether the weights are drawn on the device: the host may lack memory for a large model.

    Weights that come from files are recorded there too: they are replaced before any is drawn.
    """
    is_large = sizes(config).num_params(config.vocab) > DRAWN_ON_HOST
    from_files = bool(config.weights)
    return from_files or config.init == "device" or (config.init == "auto" and is_large)


def parsed_mesh(config: TrainConfig) -> spmd.Mesh | None:
    """The mesh, or None for one device.

    Raises:
        KnobError: the shardings do not know an axis, or sizes do not divide by the axes that split
            them.
        spmd.errors.MeshError: the text is not a mesh, or the mesh does not fit the devices.
    """
    parallel = [
        name
        for name in ("sequence_parallel", "loss_parallel")
        if getattr(config, name) and "tensor" not in config.mesh
    ]
    if parallel:
        raise KnobError(
            f"--{parallel[0].replace('_', '-')} splits over a mesh axis tensor; got --mesh "
            f"{config.mesh!r}. Add for instance tensor=4 to it."
        )
    if not config.mesh:
        return None
    mesh = mesh_of(config.mesh, spmd.global_runtime_device_count(), num_emulated=config.devices)
    known = shardings.MESH_AXES
    unknown = [axis for axis in mesh.shape() if axis not in known]
    if unknown:
        raise KnobError(
            f"mesh axes must be among {', '.join(known)}; got {unknown} in {config.mesh!r}. "
            "Rename them."
        )
    num_parts = shardings.num_batch_shards(mesh) * config.accumulate
    if config.batch % num_parts:
        raise KnobError(
            f"--batch must divide by data x fsdp x --accumulate; got {config.batch} for "
            f"{num_parts}. Pass for instance --batch {nearest_multiple(config.batch, num_parts)}."
        )
    model = sizes(config)
    num_heads, by = model.num_heads, shardings.axis_size(mesh, "tensor")
    if num_heads % by:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise KnobError(
            f"the axis tensor splits attention by heads, whose number it must divide; got "
            f"tensor={by} for the {num_heads} heads of {model.name}. Pass one of tensor="
            f"{', '.join(map(str, fitting))}, or another model."
        )
    if config.sequence_parallel and config.seq % by:
        raise KnobError(
            f"with --sequence-parallel the axis tensor must divide --seq; got tensor={by} for "
            f"{config.seq} tokens. Pass for instance --seq {nearest_multiple(config.seq, by)}."
        )
    context = shardings.axis_size(mesh, "context")
    parts = 2 * context * (by if config.sequence_parallel else 1)
    if context > 1 and config.seq % parts:
        raise KnobError(
            "the axis context cuts --seq into two equal parts for each device, and "
            f"--sequence-parallel into more; got {config.seq} tokens for {parts} parts. Pass for "
            f"instance --seq {nearest_multiple(config.seq, parts)}."
        )
    return mesh
