"""The options of a ResNet run, what each means, and what they must satisfy together.

Plain values: neither torch nor jax is imported, so that a wrong option is told at once.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.resnet_spatial import search
from examples.resnet_spatial.presets import MODELS
from examples.training.choices import RESUME_AUTO
from examples.training.knobs import KnobError, add_smoke, check_ranges, knob, parse, parser_of


@dataclass(frozen=True)
class TrainConfig:
    """All options of a run; `--help` prints a line for each."""

    model: str = knob(
        "resnet50", "which network; smoke and small are for images of 32 pixels", choices=MODELS
    )
    mesh: str = knob(
        "",
        "device mesh with axes among data, height and width, as in data=2,height=2,width=2; empty: "
        "one device",
        resumable=True,
    )
    devices: int = knob(0, "number of emulated CPU devices; 0: the real ones", resumable=True)
    device: str = knob(
        "xla",
        "xla, or cpu for eager torch without any sharding",
        choices=("xla", "cpu"),
        resumable=True,
    )
    dtype: str = knob(
        "fp32",
        "bf16 computes convolutions in bfloat16 under autocast; parameters stay in float32",
        choices=("fp32", "bf16"),
    )
    channels_last: bool = knob(
        False,
        "memory order (N, H, W, C) of images and weights, which eager torch computes faster; the "
        "xla device chooses orders itself",
        action=argparse.BooleanOptionalAction,
        resumable=True,
    )
    data: str = knob(
        "fake",
        "fake: random numbers; shapes: drawn on the fly; else a folder of images by class",
        resumable=True,
    )
    classes: int = knob(1000, "classes of fake data; others know theirs", least=1)
    image_size: int = knob(224, "rows and columns of an image", least=1)
    workers: int = knob(4, "threads that read image files", resumable=True, least=1)
    skip_unreadable: bool = knob(
        False,
        "take the next image for one that cannot be read, instead of an error",
        action=argparse.BooleanOptionalAction,
    )
    steps: int = knob(
        200,
        "optimizer steps, over which the learning rate decays; of a resumed run, all together",
        resumable=True,
        least=1,
    )
    batch: int = knob(64, "images in a step, over all devices", least=1)
    lr: float = knob(0.0, "peak learning rate; 0: 0.1 for each 256 images of a batch")
    warmup: int = knob(20, "steps of linear warm-up, before the cosine")
    momentum: float = knob(0.9, "Nesterov momentum of SGD")
    weight_decay: float = knob(1e-4, "weight decay of convolutions and matrices; others have none")
    label_smoothing: float = knob(0.1, "share of a label that all classes get, from 0 to 1")
    ema: float = knob(
        0.0, "decay of an exponential moving average of the weights, evaluated too; 0: none"
    )
    clip: float = knob(0.0, "clip gradients to this norm; 0: no clipping")
    seed: int = knob(0, "seed of the weights, and of the order and the cuts of images")
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
    eval_batches: int = knob(4, "batches in an evaluation; 0: no evaluations", resumable=True)
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
    "model": "smoke",
    "data": "shapes",
    "image_size": 32,
    "batch": 16,
    "steps": 12,
    "lr": 0.1,
    "warmup": 2,
    "eval_every": 6,
    "eval_batches": 2,
    "log_every": 1,
}


def config_from(
    argv: Sequence[str] | None, *, usage: str | None = None
) -> tuple[TrainConfig, search.Search | None]:
    """The command line as a configuration, with the search for batches if --max-batch is given.

    Args:
        argv: without the program; None: this process's.
        usage: stands on top of --help, up to its legend.

    Raises:
        KnobError: an option of the search is out of range.
    """
    parser = parser_of(TrainConfig, module="examples.resnet_spatial.train", usage=usage)
    add_smoke(parser, SMOKE)
    search.add_options(parser)
    config = parse(parser, TrainConfig, argv, smoke=SMOKE)
    return config, search.search_from(parser.parse_args(argv))


def with_defaults(config: TrainConfig) -> TrainConfig:
    """The configuration with values for options left open, after checking all options.

    The checks need no device and no image.

    Raises:
        KnobError: an option is out of range, or two options do not fit together.
    """
    check_ranges(config)
    config = dataclasses.replace(config, lr=config.lr or 0.1 * config.batch / 256)
    for name in ("label_smoothing", "ema"):
        if not 0 <= getattr(config, name) < 1:
            raise KnobError(
                f"--{name.replace('_', '-')} is a share, at least 0 and below 1; got "
                f"{getattr(config, name)}. Pass for instance 0.1, or 0 for none."
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
    if config.data == "shapes" and config.image_size < 16:
        raise KnobError(
            f"shapes need images of at least 16 rows to be told apart; got --image-size "
            f"{config.image_size}. Pass for instance --image-size 32."
        )
    if config.device == "cpu" and (config.mesh or config.devices):
        raise KnobError(
            f"a mesh needs the xla device; got --device cpu with --mesh {config.mesh!r} and "
            f"--devices {config.devices}. Leave out --device cpu."
        )
    if config.devices > 1 and not config.mesh:
        raise KnobError(
            f"without a mesh one device computes; got --devices {config.devices} and no --mesh. "
            f"Add for instance --mesh height={config.devices}."
        )
    return config
