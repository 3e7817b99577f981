"""The options of a GPT-2 run, what each means, and what they must satisfy together.

Plain values: neither torch nor jax is imported, so that a wrong option is told at once.
"""

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.gpt2.presets import PRESETS
from examples.gpt2.strategies import STRATEGIES
from examples.training.choices import PYTHON_STDLIB, REMAT_POLICIES, RESUME_AUTO, TEXT_CACHE_DIR
from examples.training.knobs import (
    KnobError,
    add_smoke,
    check_ranges,
    knob,
    nearest_multiple,
    parse,
    parser_of,
)


@dataclass(frozen=True)
class TrainConfig:
    """All options of a run; `--help` prints a line for each."""

    preset: str = knob(
        "124M", "model size", choices=sorted(PRESETS, key=lambda name: PRESETS[name].num_params())
    )
    mesh: str = knob(
        "",
        "device mesh with axes among pipe, data, fsdp and tensor, as in data=2,fsdp=4; empty: one "
        "device",
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
    devices: int = knob(0, "number of emulated CPU devices; 0: the real ones", resumable=True)
    mesh_devices: int = knob(
        0, "how many of the devices the mesh takes, the first ones; 0: all", resumable=True
    )
    device: str = knob(
        "xla",
        "xla, or cpu for eager torch without any sharding",
        choices=("xla", "cpu"),
        resumable=True,
    )
    dtype: str = knob(
        "fp32",
        "bf16 computes matrices in bfloat16 under autocast; parameters stay in float32",
        choices=("fp32", "bf16"),
    )
    init: str = knob(
        "auto",
        "where weights are drawn; auto: on the host up to 350M (a seed gives the same weights on "
        "every mesh), on the device above",
        choices=("auto", "host", "device"),
        resumable=True,
    )
    steps: int = knob(
        200,
        "optimizer steps, over which the learning rate decays; of a resumed run, all together",
        resumable=True,
        least=1,
    )
    batch: int = knob(0, "sequences in a step, over all devices; 0: the preset's")
    accumulate: int = knob(
        1,
        "parts of a batch that are computed one after the other; gradients are reduced once",
        least=1,
    )
    seq: int = knob(0, "tokens in a sequence; 0: the preset's")
    lr: float = knob(0.0, "peak learning rate; 0: the preset's")
    warmup: int = knob(20, "steps of linear warm-up")
    min_lr: float = knob(
        -1.0,
        "learning rate at the end of the cosine decay; negative: a tenth of the peak",
        least=-math.inf,
    )
    weight_decay: float = knob(
        0.1, "weight decay of matrices and tables; biases and layer norms have none"
    )
    clip: float = knob(1.0, "clip gradients to this norm; 0: no clipping")
    remat: str = knob(
        "none",
        "what a block computes again in backward instead of keeping it; none; full: everything; "
        "products: all but matrix products; attention: all but attention; offload: everything, "
        "from inputs that are kept in the memory of the host",
        choices=("none", *REMAT_POLICIES),
        resumable=True,
    )
    dropout: float = knob(
        0.0, "probability of dropping an embedding, attention weight or residual", most=1
    )
    seed: int = knob(0, "seed of the weights, the order of the batches and dropout")
    data: Sequence[str] = knob(
        (PYTHON_STDLIB,),
        "files, folders, a hub dataset (name or name:configuration), or python-stdlib",
        type=str,
        nargs="+",
        resumable=True,
    )
    max_mb: float = knob(0.0, "how much of the text to use, in millions of bytes; 0: all")
    vocab: int = knob(0, "tokens of the BPE vocabulary; 0: the preset's")
    pad_vocab: int = knob(
        128,
        "round the model's vocabulary up to a multiple of this; 1: no padding",
        least=1,
    )
    pack: bool = knob(
        False,
        "pack whole documents into sequences, none of which sees another, in place of cutting the "
        "text at every --seq tokens",
        action=argparse.BooleanOptionalAction,
    )
    workers: int = knob(
        0, "processes that read batches, with --pack; 0: a thread of this one", resumable=True
    )
    cache_dir: str = knob(TEXT_CACHE_DIR, "folder for tokenizers and tokens", resumable=True)
    checkpoint: str = knob(
        "",
        "file to save the run to, every --save-every steps, at the end and after Ctrl-C or "
        "SIGTERM; {step} in its name keeps each; empty: none",
        resumable=True,
    )
    save_every: int = knob(0, "steps between two saves; 0: only at the end", resumable=True)
    resume: str = knob(
        "",
        "saved run to go on from, also on another mesh; auto: the newest that --checkpoint names, "
        "or a new run where there is none yet; empty: a new run",
        resumable=True,
    )
    eval_every: int = knob(100, "steps between evaluations; 0: one at the end", resumable=True)
    eval_batches: int = knob(8, "batches in an evaluation; 0: no evaluations", resumable=True)
    log_every: int = knob(10, "steps between log lines", resumable=True, least=1)
    log_dir: str = knob(
        "",
        "folder for TensorBoard, metrics.jsonl and report.json; empty: no files",
        resumable=True,
    )
    results: str = knob("", "file for the report as JSON; empty: none", resumable=True)
    progress: bool = knob(
        True, "progress bar", action=argparse.BooleanOptionalAction, resumable=True
    )


SMOKE: dict[str, Any] = {
    "preset": "smoke",
    "steps": 12,
    "warmup": 2,
    "max_mb": 0.5,
    "eval_every": 6,
    "eval_batches": 2,
    "log_every": 1,
}


COMPARED = "results/gpt2_strategies"


def config_from(argv: Sequence[str] | None, *, usage: str | None = None) -> TrainConfig:
    """The command line as a configuration.

    Args:
        argv: without the program; None: this process's.
        usage: stands on top of --help, up to its legend.
    """
    parser = parser_of(TrainConfig, module="examples.gpt2.train", usage=usage)
    add_smoke(parser, SMOKE)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="runs every strategy, one after the other, and writes a table and a plot of losses, "
        f"memory and collectives into {COMPARED}",
    )
    return parse(parser, TrainConfig, argv, smoke=SMOKE)


def with_defaults(config: TrainConfig) -> TrainConfig:
    """The configuration with the preset's values for options left open, after checking all options.

    The checks need no device and no text.

    Raises:
        KnobError: an option is out of range, or two options do not fit together.
    """
    check_ranges(config)
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
    if config.resume == RESUME_AUTO and not config.checkpoint:
        raise KnobError(
            "--resume auto goes on from the file that --checkpoint names; got no --checkpoint. Add "
            "for instance --checkpoint run.pt."
        )
    if config.save_every and not config.checkpoint:
        raise KnobError(
            f"--save-every saves to a file; got {config.save_every} and no --checkpoint. Add for "
            "instance --checkpoint run.pt."
        )
    if config.workers and not config.pack:
        raise KnobError(
            f"--workers read packed documents; got --workers {config.workers} and no --pack. Add "
            "--pack, or leave --workers out."
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
    if config.device == "cpu" and (config.mesh or config.devices):
        raise KnobError(
            f"a mesh needs the xla device; got --device cpu with --mesh {config.mesh!r} and "
            f"--devices {config.devices}. Leave out --device cpu."
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
    if config.devices > 1 and not config.mesh:
        raise KnobError(
            f"without a mesh one device computes; got --devices {config.devices} and no --mesh. "
            f"Add for instance --mesh fsdp={config.devices}."
        )
    return config


def check_resumable(config: TrainConfig, saved: Mapping[str, Any]) -> None:
    """Raises KnobError if the optimizer's state of a saved run has another form.

    A pipeline's has the states of all stages in one tensor.
    """

    def stages(strategy: str, mesh: str, schedule: str, rounds: int) -> Any:
        found = [part for part in mesh.split(",") if part.strip().startswith("pipe=")]
        is_pipeline = strategy == "pipeline"
        return is_pipeline and (found, rounds if schedule == "circular" else 1)

    names = ("strategy", "mesh", "schedule", "rounds")
    now = stages(*(getattr(config, name) for name in names))
    before = stages(*(saved.get(name, getattr(TrainConfig(), name)) for name in names))
    if now != before:
        raise KnobError(
            "a pipeline's optimizer state is for its number of stages and rounds; got --strategy "
            f"{config.strategy} --mesh {config.mesh!r}, and a run of {saved['strategy']} on "
            f"{saved['mesh']!r}. Resume with the strategy, pipe and schedule of that run."
        )
