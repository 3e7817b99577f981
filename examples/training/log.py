"""Writes a run's numbers to the console, TensorBoard, `metrics.jsonl` and a final `Report`."""

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import spmd_core as spmd
from examples.training.choices import MESH_AUTO
from examples.training.knobs import EXIT_INTERRUPTED
from spmd_core import files
from spmd_core.runtime.preemption import EXIT_PREEMPTED

# Lines of a file and of a pipe have no width. Tables take what they need of this.
_UNBOUNDED = 1 << 16


@dataclass
class Report:
    """The figures of one run.

    A figure is None where it is unknown: the run had too few steps, or the device does not report
    it.

    Attributes:
        config: every option, with the value that the run used.
        num_params: parameters, padding included.
        num_devices, device_kind: the devices that the run used.
        mesh: size of each mesh axis; empty for one device. Of --mesh auto, those that were found.
        resumed_at: the step of the saved run that this one went on from; 0 for a new run.
        losses, grad_norms, lrs: one entry per training step.
        evals: per evaluation, `step` and the figures that the recipe reports, such as `loss`.
        step_time_s: seconds per step, the median over the logged intervals; intervals with a
            compile or an evaluation do not count.
        step_time_quartiles_s: the first and the third quartile over the same intervals.
        num_timed_steps: steps within those intervals.
        unit: what a batch consists of, such as "tokens" or "images".
        items_per_s: items of that unit per second, over all devices.
        mfu: model FLOPs utilisation by formula (see `spmd_core.metrics`), as a fraction.
        peak_flops, peak_source: peak FLOP/s of one device, the MFU's denominator, and its source.
        peak_bytes: the step program's peak memory on one device, from the compiler.
        argument_bytes, temp_bytes: memory of the same program for its inputs (parameters,
            optimizer state, batch), and for its temporaries.
        program_flops, recorded_flops: FLOPs of the step program as the compiler counts them, and of
            its recorded operations by torch's formulas (`spmd_core.metrics.count_flops`).
        program_ops: recorded operations of the step program.
        bubble: of a pipeline, the part of a stage's ticks in which it is idle: `measured`, by the
            runs of blocks in the step program, and by the `formula` of its schedule.
        collectives: of the step program: `kind`, mesh `axes`, `number`, and `moved_bytes`, which a
            device sends in a step by the algorithm on a ring.
        compiles, executions, compile_s: totals of the whole run.
        wall_s: seconds in the training loop, evaluations and compiles included.
        interrupted: whether Ctrl-C or SIGTERM ended the run early.
        preempted: whether it was SIGTERM, to any of its processes.
    """

    config: dict[str, Any]
    num_params: int = 0
    num_devices: int = 1
    device_kind: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    resumed_at: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    evals: list[dict[str, float]] = field(default_factory=list)
    step_time_s: float | None = None
    step_time_quartiles_s: tuple[float, float] | None = None
    num_timed_steps: int = 0
    unit: str = "items"
    items_per_s: float | None = None
    mfu: dict[str, float] = field(default_factory=dict)
    peak_flops: float = 0.0
    peak_source: str = ""
    peak_bytes: int | None = None
    argument_bytes: int | None = None
    temp_bytes: int | None = None
    program_flops: float | None = None
    recorded_flops: int | None = None
    program_ops: int | None = None
    bubble: dict[str, float] | None = None
    collectives: list[dict[str, Any]] = field(default_factory=list)
    compiles: int = 0
    executions: int = 0
    compile_s: float = 0.0
    wall_s: float = 0.0
    interrupted: bool = False
    preempted: bool = False

    @property
    def exit_code(self) -> int:
        """The command's: of a run that came to its end, one that Ctrl-C ended, or SIGTERM."""
        if self.preempted:
            return EXIT_PREEMPTED
        return EXIT_INTERRUPTED if self.interrupted else 0

    def write(self, path: str | Path) -> None:
        """Writes the report as JSON, creating the folder."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def table(self) -> Table:
        """The main figures as a table for the console."""
        table = Table(
            title="Training run" + (" (interrupted)" if self.interrupted else ""), show_header=False
        )
        auto = "auto: " if self.config.get("mesh") == MESH_AUTO else ""
        rows = [
            ("parameters", f"{self.num_params:,}"),
            (
                "devices",
                f"{self.num_devices} x {self.device_kind}"
                + (f", mesh {auto}{axes_text(self.mesh)}" if self.mesh else ""),
            ),
            (
                "loss, first and last step",
                f"{self.losses[0]:.4f}, {self.losses[-1]:.4f} after {len(self.losses)} steps"
                if self.losses
                else "-",
            ),
            (
                "evaluation",
                figures_text(self.evals[-1]) if self.evals else "-",
            ),
            (
                "step",
                _step_text(self.step_time_s, self.step_time_quartiles_s, self.num_timed_steps),
            ),
            (f"{self.unit}/s", f"{self.items_per_s:,.0f}" if self.items_per_s else "-"),
            *((f"MFU, {name}", f"{value:.2%}") for name, value in self.mfu.items()),
            ("peak of a device", f"{self.peak_flops / 1e12:.3g} TFLOP/s ({self.peak_source})"),
            (
                "step's memory on a device",
                _mib(self.peak_bytes, self.argument_bytes, self.temp_bytes),
            ),
            *(
                (f"FLOPs of a step, {name}", f"{flops:.4g}")
                for name, flops in (
                    ("by torch's formulas", self.recorded_flops),
                    ("by the compiler", self.program_flops),
                )
                if flops is not None
            ),
            *(
                (
                    f"{c['number']} x {c['kind']} over {c['axes'] or '?'}",
                    f"{c['moved_bytes'] / 2**20:,.2f} MiB sent by a device in a step",
                )
                for c in self.collectives
            ),
            *(
                (f"pipeline idle, {name}", f"{value:.2%} of the ticks")
                for name, value in (self.bubble or {}).items()
            ),
            ("compiles", f"{self.compiles} in {self.compile_s:.1f} s"),
        ]
        for row in rows:
            table.add_row(*row)
        return table


class RunLog:
    """Writes a run's numbers to the console and to files while the run goes on.

    Of several processes only the first writes; in the others every method does nothing. In a plan
    (`spmd.plan`) no file is written.

    Args:
        log_dir: folder for TensorBoard's event file, `metrics.jsonl` and `report.json`; with an
            empty string no files are written.
        num_steps: length of the progress bar.
        first_step: steps of it that an earlier run has done.
        shows_progress: whether to show a progress bar; without a terminal there is none.

    Raises:
        ImportError: `log_dir` is given and TensorBoard is not installed.
    """

    def __init__(
        self, *, log_dir: str, num_steps: int, shows_progress: bool, first_step: int = 0
    ) -> None:
        self._is_writer = spmd.distributed.is_master()
        writes_files = log_dir and self._is_writer and not spmd.debugging.is_planning()
        self._folder = Path(log_dir).expanduser() if writes_files else None
        self._writer: Any = None
        self._lines: Any = None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = _summary_writer(self._folder)
            self._lines = (self._folder / "metrics.jsonl").open("a", buffering=1)
        self._bar = tqdm(
            total=num_steps,
            initial=first_step,
            unit="step",
            disable=None if shows_progress and self._is_writer else True,
            dynamic_ncols=True,
            leave=False,
        )

    def say(self, text: str) -> None:
        """Prints a line on the console, above the progress bar."""
        if self._is_writer:
            tqdm.write(text)

    def table(self, table: Table) -> None:
        """Prints a table on the console, before the progress bar moves."""
        if self._is_writer:
            console().print(table)

    def settings(self, values: Mapping[str, Any]) -> None:
        """Writes the configuration as a text for TensorBoard."""
        if self._writer is not None:
            self._writer.add_text(
                "config", "\n".join(f"    {name}: {value}" for name, value in values.items())
            )

    def picture(self, name: str, picture_HW3: np.ndarray, step: int = 0) -> None:
        """Writes a picture for TensorBoard: uint8 of shape (height, width, 3)."""
        if self._writer is not None:
            self._writer.add_image(name, picture_HW3, step, dataformats="HWC")

    def mesh(self, mesh: spmd.Mesh) -> None:
        """Writes a picture of the mesh for TensorBoard."""
        if self._writer is not None:
            # It draws with matplotlib, which is slow to import.
            from examples.training.pictures import mesh_picture  # noqa: PLC0415

            self.picture("mesh", mesh_picture(mesh))

    def advance(self) -> None:
        """Moves the progress bar by one step."""
        self._bar.update()

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes the numbers of one step to the files, without those that are None."""
        known = {name: value for name, value in values.items() if value is not None}
        if self._writer is None:
            return
        for name, value in known.items():
            self._writer.add_scalar(name, value, step)
        self._lines.write(json.dumps({"step": step, "time": time.time(), **known}) + "\n")

    def finish(self, report: Report) -> None:
        """Prints the report, writes `report.json` and TensorBoard's table, closes everything."""
        if self._writer is not None:
            self._hyperparameters(report)
        self.close()
        if self._folder is not None:
            report.write(self._folder / "report.json")
        self.table(report.table())

    def _hyperparameters(self, report: Report) -> None:
        """The run as one row of TensorBoard's table of runs."""
        kinds = (bool, int, float, str)
        options = {k: v if isinstance(v, kinds) else str(v) for k, v in report.config.items()}
        figures = {
            "loss": report.losses[-1] if report.losses else None,
            "step_time_s": report.step_time_s,
            "items_per_s": report.items_per_s,
            "peak_bytes": report.peak_bytes,
            **{f"eval_{k}": v for k, v in (report.evals or [{}])[-1].items() if k != "step"},
        }
        known = {f"run/{k}": v for k, v in figures.items() if v is not None}
        # In the run's own folder; by default each call makes another run.
        self._writer.add_hparams(options, known, run_name=".")

    def close(self) -> None:
        """Closes the progress bar and the files. A second call does nothing."""
        self._bar.close()
        if self._writer is not None:
            self._writer.close()
            self._lines.close()
            self._writer = None


def _summary_writer(folder: Path) -> Any:
    try:
        # An optional package, slow to import.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "--log-dir writes TensorBoard files; got no such package. Run: pip install tensorboard"
        ) from error
    return SummaryWriter(str(folder))


def console() -> Console:
    """rich's console, as wide as the terminal; without one, as wide as what is printed.

    `COLUMNS` in the environment sets its width.
    """
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=_UNBOUNDED)


def figures_text(figures: Mapping[str, float]) -> str:
    """The figures of an evaluation as "loss 5.1234, perplexity 167.9065", without the step."""
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items() if name != "step")


def axes_text(mesh: Mapping[str, int]) -> str:
    """A mesh as --mesh writes it."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def _step_text(
    median_s: float | None, quartiles_s: tuple[float, float] | None, num_steps: int
) -> str:
    if not median_s:
        return "- (too few steps to time)"
    spread = (
        ""
        if quartiles_s is None
        else f", quartiles {quartiles_s[0] * 1e3:.1f} to " + (f"{quartiles_s[1] * 1e3:.1f}")
    )
    return f"{median_s * 1e3:.1f} ms over {num_steps} steps{spread}"


def _mib(peak: int | None, arguments: int | None, temporary: int | None) -> str:
    if not peak:
        return "-"
    return (
        f"{peak / 2**20:,.1f} MiB at peak ({(arguments or 0) / 2**20:,.1f} arguments, "
        f"{(temporary or 0) / 2**20:,.1f} temporary)"
    )
