"""The options that every recipe has, and what they must satisfy together.

Plain values: neither torch nor jax is imported, so that a wrong option is reported at once.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from examples.training.choices import MESH_AUTO, MOST_DEVICES, RESUME_AUTO, SAVE_EVERY
from examples.training.knobs import KnobError, check_ranges, knob, option


@dataclass(frozen=True)
class RunConfig:
    """Options of a run that do not depend on the model; a recipe's configuration extends it."""

    mesh: str = knob(
        "",
        "device mesh, as in data=2,fsdp=4; auto: found for the first step; empty: one device",
        resumable=True,
    )
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
        "folder to save the run to, every --save-every steps, at the end and after Ctrl-C or "
        "SIGTERM; a run that is there goes on, also on another mesh; empty: none",
        resumable=True,
    )
    save_every: int = knob(
        SAVE_EVERY, "steps between two saves; 0: only at the end", resumable=True
    )
    keep: int = knob(3, "newest saved steps that stay; 0: all", resumable=True)
    resume: str = knob(
        RESUME_AUTO,
        "step in --checkpoint to go on from, which removes the later ones; auto: the newest, or a "
        "new run where there is none yet",
        resumable=True,
    )
    deadline: float = knob(
        30.0,
        "seconds after SIGTERM in which the run saves and ends with code 75; what takes longer "
        "ends with code 1, and has its earlier saves",
        resumable=True,
        least=0.1,
        most=10**6,
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

    @property
    def finds_mesh(self) -> bool:
        """Whether the mesh and the shardings are found automatically, over all devices."""
        return self.mesh == MESH_AUTO

    @property
    def named_mesh(self) -> str:
        """What --mesh names; empty for one device, and for a mesh that is found."""
        return "" if self.finds_mesh else self.mesh

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
    is_step = config.resume.isascii() and config.resume.isdecimal()
    if config.resume != RESUME_AUTO and not is_step:
        raise KnobError(
            f"--resume takes the number of a saved step, or {RESUME_AUTO}; got {config.resume!r}. "
            "Leave it out to go on from the newest step in --checkpoint."
        )
    for name, default in (("resume", RESUME_AUTO), ("save_every", SAVE_EVERY)):
        if getattr(config, name) != default and not config.checkpoint:
            raise KnobError(
                f"{option(name)} is about the folder of --checkpoint; got "
                f"{getattr(config, name)} and no --checkpoint. Add for instance --checkpoint run."
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


def check_mesh_auto(config: RunConfig, needs: Mapping[str, str], *, example: str) -> None:
    """Checks that no option is given that --mesh auto has no place for.

    Args:
        config: the options, before the preset's values are filled in.
        needs: what each of these options needs or does instead, by the names of their fields.
        example: an axis to name in an error.

    Raises:
        KnobError: one is given, and the mesh is to be found.
    """
    if not config.finds_mesh:
        return
    for name, need in needs.items():
        value = getattr(config, name)
        if value != type(config).__dataclass_fields__[name].default:
            given = option(name) if value is True else f"{option(name)} {value}"
            raise KnobError(
                f"--mesh auto finds the mesh and the shardings for the first step; got {given} "
                f"too, which {need}. Leave out {option(name)}, or name the axes of the mesh, for "
                f"instance --mesh {example}={config.devices or 8}."
            )
