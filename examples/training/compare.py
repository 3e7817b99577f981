"""Runs a recipe in several ways, each in a process of its own, and compares their reports."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.training.log import console
from spmd_core import files

COLUMNS = (
    *("", "loss, last", "difference", "step", "GFLOP", "peak", "state", "sent"),
    "collectives of a step: number, kind, axes, sent by a device",
)


class CompareError(RuntimeError):
    """A run failed."""


@dataclass(frozen=True)
class Variant:
    """One way to run the recipe: its name in the table, and its own options."""

    name: str
    options: Sequence[str]


def compare(
    module: str, variants: Sequence[Variant], *, common: Sequence[str], folder: Path
) -> dict[str, dict[str, Any]]:
    """Runs every variant, prints the table, and writes `compare.md`, `.json` and `.png`.

    Losses are compared with those of the first variant.

    Args:
        module: the recipe, which `python -m` runs; it takes --results.
        variants: the ways to run it.
        common: options of all.
        folder: for the files.

    Returns:
        The reports, by the variants' names.

    Raises:
        CompareError: a run failed; its output is on the console.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reports: dict[str, dict[str, Any]] = {}
    for number, variant in enumerate(variants, start=1):
        print(f"[{number}/{len(variants)}] {variant.name}", flush=True)
        results = folder / "runs" / f"{number}.json"
        results.unlink(missing_ok=True)
        command = [sys.executable, "-m", module, *common, *variant.options]
        done = subprocess.run([*command, "--results", str(results)], check=False)
        if done.returncode:
            raise CompareError(
                f"every run of a comparison must succeed; got exit code {done.returncode} of "
                f"{' '.join(['python', *command[1:]])}. Its last lines are above."
            )
        reports[variant.name] = json.loads(results.read_text())
    lines = rows(reports)
    _show(lines)
    files.write_text(folder / "compare.json", json.dumps(reports, indent=1) + "\n")
    files.write_text(folder / "compare.md", _markdown(lines))
    _plot(reports, folder / "compare.png")
    print(f"written: {folder / 'compare'}.md, .json and .png")
    return reports


def num_real_devices() -> int:
    """The number of devices, from a process that ends: the runs need the devices themselves."""
    script = "import spmd_core; print(spmd_core.global_runtime_device_count())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def rows(reports: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row of the table for each report, in the order of `COLUMNS`."""
    first = next(iter(reports.values()))["losses"]
    return [
        (
            name,
            f"{report['losses'][-1]:.4f}",
            f"{difference(first, report['losses']):.0e}",
            f"{report['step_time_s'] * 1e3:,.0f} ms" if report["step_time_s"] else "-",
            f"{report['program_flops'] / 1e9:,.2f}" if report["program_flops"] else "-",
            _mib(report["peak_bytes"]),
            _mib(report["argument_bytes"]),
            _mib(sent(report)),
            "; ".join(
                f"{c['number']} {c['kind']} {c['axes']} {_mib(c['moved_bytes'])}"
                for c in report["collectives"]
            )
            or "none",
        )
        for name, report in reports.items()
    ]


def difference(expected: Sequence[float], losses: Sequence[float]) -> float:
    """The largest relative difference between two loss curves."""
    return max(abs(a - b) / abs(a) for a, b in zip(expected, losses, strict=True))


def sent(report: Mapping[str, Any]) -> float:
    """The bytes that a device sends in a step."""
    return sum(c["moved_bytes"] for c in report["collectives"])


def _mib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"


def _show(lines: Sequence[Sequence[str]]) -> None:
    table = Table(title="A step on each device")
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if 0 < i < len(COLUMNS) - 1 else "left")
    for line in lines:
        table.add_row(*line)
    console().print(table)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def _plot(reports: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Writes an image with losses, memory and communication, side by side."""
    import matplotlib  # noqa: PLC0415  (slow to import, and only comparisons need it)

    matplotlib.use("Agg")  # files only: there may be no display
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, (curves, memory, traffic) = plt.subplots(
        1, 3, figsize=(15, 4.5), width_ratios=(1.6, 1, 1), layout="constrained"
    )
    names = list(reports)
    for name, report in reports.items():
        curves.plot(range(1, len(report["losses"]) + 1), report["losses"], label=name)
    curves.set(xlabel="step", ylabel="training loss", title="Loss")
    curves.legend()
    mib = 2**20
    arguments = [(report["argument_bytes"] or 0) / mib for report in reports.values()]
    peaks = [(report["peak_bytes"] or 0) / mib for report in reports.values()]
    memory.barh(names, peaks, color="tab:blue", label="peak")
    memory.barh(names, arguments, color="tab:orange", label="of it state and batch")
    memory.set(xlabel="MiB per device", title="Memory of the step")
    memory.legend()
    kinds = sorted({c["kind"] for report in reports.values() for c in report["collectives"]})
    left = [0.0] * len(names)
    for kind in kinds:
        each = [
            sum(c["moved_bytes"] for c in report["collectives"] if c["kind"] == kind) / mib
            for report in reports.values()
        ]
        traffic.barh(names, each, left=left, label=kind)
        left = [a + b for a, b in zip(left, each)]
    traffic.set(xlabel="MiB sent by a device in a step", title="Communication")
    traffic.tick_params(labelleft=False)
    if kinds:
        traffic.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
    for axes in (memory, traffic):
        axes.invert_yaxis()
    figure.savefig(path, dpi=120)
    plt.close(figure)
