"""The options that every recipe has, and what they must satisfy together.

Plain values: neither torch nor jax is imported, so that a wrong option is reported at once.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from examples.training.choices import MOST_DEVICES, RESUME_AUTO
from examples.training.knobs import KnobError, check_ranges, knob


@dataclass(frozen=True)
class RunConfig:
    """Options of a run that do not depend on the model; a recipe's configuration extends it."""

    mesh: str = knob("", "device mesh, as in data=2,fsdp=4; empty: one device", resumable=True)
    devices: int = knob(
        0, "number of emulated CPU devices; 0: the real ones", resumable=True, most=MOST_DEVICES
    )
    device: str = knob(
        "xla",
        "xla, or cpu for eager torch without any sharding",
        choices=("xla", "cpu"),
        resumable=True,
    )
    dtype: str = knob(
        "fp32",
        "bf16 computes products and convolutions in bfloat16 under autocast; parameters stay in "
        "float32",
        choices=("fp32", "bf16"),
    )
    steps: int = knob(
        200,
        "optimizer steps, over which the learning rate decays; of a resumed run, all together",
        resumable=True,
        least=1,
    )
    lr: float = knob(0.0, "peak learning rate; 0: the preset's")
    warmup: int = knob(20, "steps of linear warm-up, before the cosine decay")
    clip: float = knob(1.0, "clip gradients to this norm; 0: no clipping")
    seed: int = knob(0, "seed of the weights, the order of the data and all else that is random")
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
    capture: bool = knob(
        True,
        "run the step's program again, without recording it, once two steps agree",
        action=argparse.BooleanOptionalAction,
        resumable=True,
    )
    progress: bool = knob(
        True, "progress bar", action=argparse.BooleanOptionalAction, resumable=True
    )

    def check_resumable(self, before: Mapping[str, Any]) -> None:
        """Checks what a resumed run needs beside equal values of the options that must be equal.

        Args:
            before: the options of the saved run.

        Raises:
            KnobError: it cannot go on with these options.
        """

    def recorded_because(self) -> str:
        """Why no step of such a run can be captured, in words; empty: it can."""
        return ""


def check_run_config(config: RunConfig, *, axis: str) -> None:
    """Checks the ranges of all options, and those that every recipe has against each other.

    Args:
        config: the options, before the preset's values are filled in.
        axis: a mesh axis of the recipe, for the advice of an error.

    Raises:
        KnobError: an option is out of range, or two options do not fit together.
    """
    check_ranges(config)
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
    if config.device == "cpu" and (config.mesh or config.devices):
        raise KnobError(
            f"a mesh needs the xla device; got --device cpu with --mesh {config.mesh!r} and "
            f"--devices {config.devices}. Leave out --device cpu."
        )
    if config.devices > 1 and not config.mesh:
        raise KnobError(
            f"without a mesh one device computes; got --devices {config.devices} and no --mesh. "
            f"Add for instance --mesh {axis}={config.devices}."
        )
