"""Where a run's numbers go: the console, TensorBoard, `metrics.jsonl`, and at the end a `Report`, as a table and as JSON."""

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm


@dataclass
class Report:
    """What a run did. Figures that could not be had are None: the steps were too few, or the device does not say.

    Attributes:
        config: every knob, as used.
        num_params: parameters, vocabulary padding included.
        num_devices, device_kind: what it ran on.
        mesh: size of each mesh axis; empty for one device.
        losses, grad_norms, lrs: one entry for each step that was run.
        evals: for each evaluation, `step`, `loss` and `perplexity`.
        step_time_s: median over the logged intervals of their time for a step; intervals with a compile or an evaluation do not count.
        num_timed_steps: how many steps those intervals held.
        tokens_per_s: over all devices.
        mfu: by formula (see mfu.py), as a fraction.
        peak_flops, peak_source: what the MFU is measured against, for one device.
        peak_bytes: the step program's peak memory on one device, from the compiler.
        argument_bytes, temp_bytes: of the same program: what enters (parameters, optimizer state, batch), and what it needs beside.
        program_flops, program_ops: the compiler's count of its FLOPs, and the recorded operations.
        compiles, executions, compile_s: of the whole run.
        wall_s: of the loop, everything included.
        interrupted: Ctrl-C ended it early.
    """

    config: dict[str, Any]
    num_params: int = 0
    num_devices: int = 1
    device_kind: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    evals: list[dict[str, float]] = field(default_factory=list)
    step_time_s: float | None = None
    num_timed_steps: int = 0
    tokens_per_s: float | None = None
    mfu: dict[str, float] = field(default_factory=dict)
    peak_flops: float = 0.0
    peak_source: str = ""
    peak_bytes: int | None = None
    argument_bytes: int | None = None
    temp_bytes: int | None = None
    program_flops: float | None = None
    program_ops: int | None = None
    compiles: int = 0
    executions: int = 0
    compile_s: float = 0.0
    wall_s: float = 0.0
    interrupted: bool = False

    def write(self, path: str | Path) -> None:
        """Writes the report as JSON, creating the folder."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def table(self) -> Table:
        """The main figures for people."""
        table = Table(
            title="GPT-2 run" + (" (interrupted)" if self.interrupted else ""), show_header=False
        )
        rows = [
            ("parameters", f"{self.num_params:,}"),
            (
                "devices",
                f"{self.num_devices} x {self.device_kind}"
                + (f", mesh {_axes_text(self.mesh)}" if self.mesh else ""),
            ),
            (
                "loss, first and last step",
                f"{self.losses[0]:.4f}, {self.losses[-1]:.4f} after {len(self.losses)} steps"
                if self.losses
                else "-",
            ),
            (
                "evaluation",
                f"loss {self.evals[-1]['loss']:.4f}, perplexity {self.evals[-1]['perplexity']:.2f}"
                if self.evals
                else "-",
            ),
            (
                "step",
                f"{self.step_time_s * 1e3:.1f} ms over {self.num_timed_steps} steps"
                if self.step_time_s
                else "- (too few steps to time)",
            ),
            ("tokens/s", f"{self.tokens_per_s:,.0f}" if self.tokens_per_s else "-"),
            *((f"MFU, {name}", f"{value:.2%}") for name, value in self.mfu.items()),
            ("peak of a device", f"{self.peak_flops / 1e12:.3g} TFLOP/s ({self.peak_source})"),
            (
                "step's memory on a device",
                _mib(self.peak_bytes, self.argument_bytes, self.temp_bytes),
            ),
            ("compiles", f"{self.compiles} in {self.compile_s:.1f} s"),
        ]
        for row in rows:
            table.add_row(*row)
        return table


class RunLog:
    """Takes a run's numbers as they come.

    Args:
        log_dir: folder for TensorBoard's event file, `metrics.jsonl` and `report.json`; empty writes no files.
        num_steps: length of the progress bar.
        shows_progress: whether there is a bar; it stays away where the console is not a terminal.

    Raises:
        ImportError: `log_dir` is given and TensorBoard is not installed.
    """

    def __init__(self, *, log_dir: str, num_steps: int, shows_progress: bool) -> None:
        self._folder = Path(log_dir).expanduser() if log_dir else None
        self._writer: Any = None
        self._lines: Any = None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = _summary_writer(self._folder)
            self._lines = (self._folder / "metrics.jsonl").open("a", buffering=1)
        self._bar = tqdm(
            total=num_steps,
            unit="step",
            disable=None if shows_progress else True,
            dynamic_ncols=True,
            leave=False,
        )

    def say(self, text: str) -> None:
        """A line on the console, above the bar."""
        tqdm.write(text)

    def settings(self, values: Mapping[str, Any]) -> None:
        """The configuration, as a text that TensorBoard shows."""
        if self._writer is not None:
            self._writer.add_text(
                "config", "\n".join(f"    {name}: {value}" for name, value in values.items())
            )

    def advance(self) -> None:
        """One step was sent to the device."""
        self._bar.update()

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Numbers of one step, to the files; None is left out."""
        known = {name: value for name, value in values.items() if value is not None}
        if self._writer is None:
            return
        for name, value in known.items():
            self._writer.add_scalar(name, value, step)
        self._lines.write(json.dumps({"step": step, "time": time.time(), **known}) + "\n")

    def finish(self, report: Report) -> None:
        """Prints the report, writes `report.json`, and closes everything."""
        self.close()
        if self._folder is not None:
            report.write(self._folder / "report.json")
        Console().print(report.table())

    def close(self) -> None:
        """Closes the bar and the files; may be repeated."""
        self._bar.close()
        if self._writer is not None:
            self._writer.close()
            self._lines.close()
            self._writer = None


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  optional, and slow to import
    except ImportError as error:
        raise ImportError(
            "--log-dir writes TensorBoard files; got no such package. Run: pip install tensorboard"
        ) from error
    return SummaryWriter(str(folder))


def _axes_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def _mib(peak: int | None, arguments: int | None, temporary: int | None) -> str:
    if not peak:
        return "-"
    return f"{peak / 2**20:,.1f} MiB at peak ({(arguments or 0) / 2**20:,.1f} arguments, {(temporary or 0) / 2**20:,.1f} temporary)"
