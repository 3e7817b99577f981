"""The options of a GPT-2 run, what each means, and what they must satisfy together.

Plain values: neither torch nor jax is imported, so that a wrong option is reported at once.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.gpt2.presets import BATCH_AXES, PRESETS
from examples.training.choices import (
    MOST_ROWS,
    MOST_TOKENS,
    MOST_WORKERS,
    PYTHON_STDLIB,
    REMAT_POLICIES,
    TEXT_CACHE_DIR,
)
from examples.training.knobs import (
    KnobError,
    add_smoke,
    knob,
    nearest_multiple,
    parse,
    parser_of,
)
from examples.training.mesh_sizes import Sizes, check_axes, check_heads, mesh_sizes, num_devices
from examples.training.run_config import RunConfig, check_mesh_auto, check_run_config

# The mesh axes that each strategy takes.
STRATEGIES = {
    "spmd": ("data", "fsdp", "tensor"),
    "fsdp": ("data", "fsdp"),
    "ddp": ("data",),
    "pipeline": ("pipe", "data", "fsdp", "tensor"),
}
# What options do for which --mesh auto has no place.
NOT_WITH_MESH_AUTO = {
    "strategy": "shards over axes that have names",
    "microbatches": "is about a pipeline, whose stages are along an axis that has a name",
    "schedule": "is about a pipeline, whose stages are along an axis that has a name",
    "mesh_devices": "gives a part of the devices to the mesh, and a mesh that is found has all",
    "pack": "reads in each process the documents of its part of a mesh that is known before",
}


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """All options of a run; `--help` prints a line for each."""

    preset: str = knob(
        "124M", "model size", choices=sorted(PRESETS, key=lambda name: PRESETS[name].num_params())
    )
    mesh: str = knob(
        "",
        "device mesh with axes among pipe, data, fsdp and tensor, as in data=2,fsdp=4; auto: the "
        "mesh and the shardings are found for the first step; empty: one device",
        resumable=True,
    )
    strategy: str = knob(
        "spmd",
        "spmd: marks alone, any mesh; fsdp: each block gathers its parameters (fully_shard), mesh "
        "axes fsdp and data; ddp: replicated parameters, mesh axis data; pipeline: blocks as "
        "stages along mesh axis pipe, beside any others",
        choices=tuple(STRATEGIES),
        resumable=True,
    )
    microbatches: int = knob(
        0, "microbatches of a pipeline; 0: as many as it has stages", resumable=True
    )
    schedule: str = knob(
        "1f1b",
        "of a pipeline; gpipe: all forwards, then all backwards; 1f1b: memory does not grow with "
        "the microbatches; circular: as gpipe, with smaller bubbles",
        choices=("gpipe", "1f1b", "circular"),
        resumable=True,
    )
    rounds: int = knob(
        2,
        "chunks of blocks that a stage has, with --schedule circular",
        resumable=True,
        least=2,
    )
    mesh_devices: int = knob(
        0, "how many of the devices the mesh takes, the first ones; 0: all", resumable=True
    )
    init: str = knob(
        "auto",
        "where weights are drawn; auto: on the host up to 350M (a seed gives the same weights on "
        "every mesh), on the device above",
        choices=("auto", "host", "device"),
        resumable=True,
    )
    batch: int = knob(0, "sequences in a step, over all devices; 0: the preset's", most=MOST_ROWS)
    accumulate: int = knob(
        1,
        "parts of a batch that are computed one after the other; gradients are reduced once",
        least=1,
        most=MOST_ROWS,
    )
    seq: int = knob(0, "tokens in a sequence; 0: the preset's", most=MOST_TOKENS)
    min_lr: float = knob(
        -1.0,
        "learning rate at the end of the cosine decay; negative: a tenth of the peak",
        least=-math.inf,
    )
    weight_decay: float = knob(
        0.1, "weight decay of matrices and tables; biases and layer norms have none"
    )
    remat: str = knob(
        "none",
        "what a block computes again in backward instead of keeping it; none; full: everything; "
        "products: all but matrix products; attention: all but attention; offload: everything, "
        "from inputs that are kept in the memory of the host",
        choices=("none", *REMAT_POLICIES),
        resumable=True,
    )
    scan: bool = knob(
        False,
        "run the blocks as loops of the program: the square root of their number, at most 6, "
        "which compiles as fast as so many blocks",
        action=argparse.BooleanOptionalAction,
        resumable=True,
    )
    dropout: float = knob(
        0.0, "probability of dropping an embedding, attention weight or residual", most=1
    )
    data: Sequence[str] = knob(
        (PYTHON_STDLIB,),
        "files, folders, a hub dataset (name or name:configuration), or python-stdlib",
        type=str,
        nargs="+",
        resumable=True,
    )
    max_mb: float = knob(0.0, "how much of the text to use, in millions of bytes; 0: all")
    vocab: int = knob(0, "tokens of the BPE vocabulary; 0: the preset's", most=MOST_TOKENS)
    pad_vocab: int = knob(
        128,
        "round the model's vocabulary up to a multiple of this; 1: no padding",
        least=1,
        most=MOST_ROWS,
    )
    pack: bool = knob(
        False,
        "pack whole documents into sequences, none of which sees another, in place of cutting the "
        "text at every --seq tokens",
        action=argparse.BooleanOptionalAction,
    )
    workers: int = knob(
        0,
        "processes that read batches, with --pack; 0: a thread of this one",
        resumable=True,
        most=MOST_WORKERS,
    )
    cache_dir: str = knob(TEXT_CACHE_DIR, "folder for tokenizers and tokens", resumable=True)

    def recorded_because(self) -> str:
        """Each microbatch of schedule 1f1b replays random numbers, which no captured step may."""
        if self.strategy == "pipeline" and self.schedule == "1f1b" and self.dropout:
            return "a captured step has no dropout in a pipeline with --schedule 1f1b"
        return ""


SMOKE: dict[str, Any] = {
    "preset": "smoke",
    "steps": 12,
    "warmup": 2,
    "max_mb": 0.5,
    "eval_every": 6,
    "eval_batches": 2,
    "log_every": 1,
}


def config_from(
    argv: Sequence[str] | None, *, usage: str | None = None, module: str = "examples.gpt2.train"
) -> TrainConfig:
    """The command line as a configuration.

    Args:
        argv: without the program; None: this process's.
        module: the command, for --help.
        usage: stands on top of --help, up to its legend.
    """
    parser = parser_of(TrainConfig, module=module, usage=usage)
    add_smoke(parser, SMOKE)
    return parse(parser, TrainConfig, argv, smoke=SMOKE)


def with_defaults(config: TrainConfig) -> TrainConfig:
    """The configuration with the preset's values for options left open, after checking all options.

    The checks need no device and no text.

    Raises:
        KnobError: an option is out of range, or two options do not fit together.
    """
    check_run_config(config, axis="fsdp")
    check_mesh_auto(config, NOT_WITH_MESH_AUTO, example="fsdp")
    preset = PRESETS[config.preset]
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
    if config.workers and not config.pack:
        raise KnobError(
            f"--workers read packed documents; got --workers {config.workers} and no --pack. Add "
            "--pack, or leave --workers out."
        )
    if config.scan and config.strategy == "pipeline":
        raise KnobError(
            "--scan runs the blocks as loops, and a pipeline has stages of them; got --strategy "
            "pipeline. Leave out one of them."
        )
    if config.pack and config.strategy == "pipeline":
        raise KnobError(
            "--pack gives blocks the documents of a batch, and a pipeline's blocks take nothing "
            "but activations; got --strategy pipeline. Take another strategy, or leave out --pack."
        )
    if config.seq > preset.positions:
        raise KnobError(
            f"--seq must not pass the preset's position table; got {config.seq} for {preset.name} "
            f"with {preset.positions} positions. Shorten it."
        )
    if config.strategy != "spmd" and not config.mesh:
        axis = {"ddp": "data", "pipeline": "pipe"}.get(config.strategy, "fsdp")
        raise KnobError(
            f"--strategy {config.strategy} splits the batch over a mesh; got none. Add for "
            f"instance --mesh {axis}=8."
        )
    if config.batch % config.accumulate:
        raise KnobError(
            f"--batch must divide by --accumulate; got {config.batch} and {config.accumulate}. "
            f"Pass for instance --batch {nearest_multiple(config.batch, config.accumulate)}."
        )
    if config.mesh_devices and not config.mesh:
        raise KnobError(
            f"--mesh-devices says how many devices a mesh takes; got {config.mesh_devices} and no "
            f"--mesh. Add for instance --mesh fsdp={config.mesh_devices}."
        )
    if config.named_mesh:
        if config.devices:
            check_mesh_devices(config, config.devices)
        num_emulated = config.mesh_devices or config.devices
        check_mesh(config, mesh_sizes(config.mesh, num_emulated=num_emulated, example="fsdp"))
    return config


def check_mesh_devices(config: TrainConfig, available: int) -> None:
    """Raises KnobError if --mesh-devices passes the number of devices."""
    if config.mesh_devices > available:
        raise KnobError(
            f"--mesh-devices must not pass the number of devices; got {config.mesh_devices} of "
            f"{available}. Pass at most {available}, or start with more --devices."
        )


def check_mesh(config: TrainConfig, sizes: Sizes) -> None:
    """Checks that a mesh fits the strategy, the batch and the preset.

    Args:
        config: with the preset's values for options left open.
        sizes: of the mesh's axes; with one that is not known, the axes' names alone are checked.

    Raises:
        KnobError: the shardings do not know an axis, or what the mesh splits does not divide by it.
    """
    strategy = f"--strategy {config.strategy}"
    check_axes(config.mesh, sizes, STRATEGIES[config.strategy], option=strategy)
    for axis, of, does in (
        ("fsdp", "fsdp", "which splits the parameters"),
        ("pipe", "pipeline", "along which the stages are split"),
    ):
        if config.strategy == of and axis not in sizes:
            size = "*" if None in sizes.values() else num_devices(sizes)
            raise KnobError(
                f"{strategy} needs a mesh axis {axis}, {does}; got {config.mesh!r}. Pass for "
                f"instance --mesh {axis}={size}."
            )
    if None in sizes.values():
        return
    num_parts = config.accumulate * math.prod(sizes.get(axis) or 1 for axis in BATCH_AXES)
    factors = "data x fsdp x --accumulate"
    if config.strategy == "pipeline":
        _check_pipeline(config, sizes["pipe"] or 1)
        num_parts *= config.microbatches or sizes["pipe"] or 1
        factors += " x --microbatches"
    if config.batch % num_parts:
        raise KnobError(
            f"--batch must divide by {factors}; got {config.batch} for "
            f"{num_parts}. Pass for instance --batch "
            f"{nearest_multiple(config.batch, num_parts)}."
        )
    preset = PRESETS[config.preset]
    by = sizes.get("tensor") or 1
    check_heads(by, preset.num_heads, of=preset.name, other="another preset")


def _check_pipeline(config: TrainConfig, num_stages: int) -> None:
    """Raises KnobError if a pipeline does not fit the devices or the preset's layers."""
    if config.mesh_devices:
        raise KnobError(
            "--strategy pipeline takes all devices; got --mesh-devices "
            f"{config.mesh_devices}. Leave it out."
        )
    num_layers = PRESETS[config.preset].num_layers
    chunks = num_stages * (config.rounds if config.schedule == "circular" else 1)
    if num_layers % chunks:
        raise KnobError(
            "pipe x --rounds (with --schedule circular) must divide the layers; got "
            f"{chunks} for the {num_layers} of {config.preset}. Take a smaller pipe, or another "
            "preset."
        )
