"""The options of a ResNet run, what each means, and what they must satisfy together.

Plain values: neither torch nor jax is imported, so that a wrong option is reported at once.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.resnet_spatial.presets import MESH_AXES, MODELS
from examples.training.choices import MOST_ROWS, MOST_WORKERS
from examples.training.knobs import (
    KnobError,
    add_smoke,
    knob,
    nearest_multiple,
    parse,
    parser_of,
)
from examples.training.mesh_sizes import Sizes, check_axes, mesh_sizes
from examples.training.run_config import RunConfig, check_run_config


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """All options of a run; `--help` prints a line for each."""

    model: str = knob(
        "resnet50", "which network; smoke and small are for images of 32 pixels", choices=MODELS
    )
    mesh: str = knob(
        "",
        "device mesh with axes among data, height and width, as in data=2,height=2,width=2; auto: "
        "the mesh and the shardings are found for the first step; empty: one device",
        resumable=True,
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
    classes: int = knob(1000, "classes of fake data; others know theirs", least=1, most=MOST_ROWS)
    image_size: int = knob(224, "rows and columns of an image", least=1, most=2**14)
    workers: int = knob(
        4, "threads that read image files", resumable=True, least=1, most=MOST_WORKERS
    )
    skip_unreadable: bool = knob(
        False,
        "take the next image for one that cannot be read, instead of an error",
        action=argparse.BooleanOptionalAction,
    )
    batch: int = knob(64, "images in a step, over all devices", least=1, most=MOST_ROWS)
    lr: float = knob(0.0, "peak learning rate; 0: 0.1 for each 256 images of a batch")
    momentum: float = knob(0.9, "Nesterov momentum of SGD")
    weight_decay: float = knob(1e-4, "weight decay of convolutions and matrices; others have none")
    label_smoothing: float = knob(0.1, "share of a label that all classes get, from 0 to 1")
    ema: float = knob(
        0.0, "decay of an exponential moving average of the weights, evaluated too; 0: none"
    )
    clip: float = knob(0.0, "clip gradients to this norm; 0: no clipping")
    eval_batches: int = knob(4, "batches in an evaluation; 0: no evaluations", resumable=True)


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


def config_from(argv: Sequence[str] | None, *, usage: str | None = None) -> TrainConfig:
    """The command line as a configuration.

    Args:
        argv: without the program; None: this process's.
        usage: stands on top of --help, up to its legend.
    """
    parser = parser_of(TrainConfig, module="examples.resnet_spatial.train", usage=usage)
    add_smoke(parser, SMOKE)
    return parse(parser, TrainConfig, argv, smoke=SMOKE)


def with_defaults(config: TrainConfig) -> TrainConfig:
    """The configuration with values for options left open, after checking all options.

    The checks need no device and no image.

    Raises:
        KnobError: an option is out of range, or two options do not fit together.
    """
    check_run_config(config, axis="height")
    config = dataclasses.replace(config, lr=config.lr or 0.1 * config.batch / 256)
    for name in ("label_smoothing", "ema"):
        if not 0 <= getattr(config, name) < 1:
            raise KnobError(
                f"--{name.replace('_', '-')} is a share, at least 0 and below 1; got "
                f"{getattr(config, name)}. Pass for instance 0.1, or 0 for none."
            )
    if config.data == "shapes" and config.image_size < 16:
        raise KnobError(
            f"images of shapes need at least 16 rows, so that the shapes differ; got --image-size "
            f"{config.image_size}. Pass for instance --image-size 32."
        )
    check_mesh(config, mesh_sizes(config.named_mesh, num_emulated=config.devices))
    return config


def check_mesh(config: TrainConfig, sizes: Sizes) -> None:
    """Checks that a mesh fits the batch and the images.

    Args:
        config: the options.
        sizes: of the mesh's axes; with one that is not known, the axes' names alone are checked.

    Raises:
        KnobError: an axis has another name, or images do not fit the axes.
    """
    check_axes(config.mesh, sizes, MESH_AXES)
    if None in sizes.values():
        return
    num_parts = sizes.get("data") or 1
    if config.batch % num_parts:
        raise KnobError(
            f"--batch must divide by the mesh axis data; got {config.batch} for data={num_parts}. "
            f"Pass for instance --batch {nearest_multiple(config.batch, num_parts)}."
        )
    for axis in ("height", "width"):
        num_rows = sizes.get(axis) or 1
        if num_rows > config.image_size:
            raise KnobError(
                f"each device must have a part of an image: --image-size must be at least the mesh "
                f"axis {axis}; got {config.image_size} for {axis}={num_rows}. Pass --image-size "
                f"{num_rows} or more, or a smaller axis."
            )
