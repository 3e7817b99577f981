"""How do loss, speed and memory of GPT-2 change when it is sharded over 8 devices instead of 1?

Trains a preset of examples/gpt2 on real text twice, each run in its own process: sharded over
emulated CPU devices, and on one device. The loss curves must agree. Emulated devices share the
cores of this machine, so the sharded run uses less memory per device but need not be faster. Writes
a table, a plot and TensorBoard logs. Options that are not listed here go to both runs of the
recipe.

Run: scripts/bench.sh, or python -m benchmarks.gpt2_spmd --preset small --steps 30
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.report import Table, argument_parser, publish, verdict
from examples.gpt2.presets import PRESETS

matplotlib.use("Agg")  # files only: there may be no display
from matplotlib import pyplot as plt

# Float32 sums in another order, over more steps than the 20 of loss_agreement.py.
MAX_LOSS_DIFFERENCE = 1e-3
RESULTS = Path("results")


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: its name in the report, a folder name, and its own options."""

    name: str
    folder: str
    options: Sequence[str]


def runs(*, devices: int, mesh: str) -> tuple[Run, Run]:
    """The sharded run, and the run on one device."""
    sharded = Run(
        f"{devices} devices, {mesh}",
        f"{devices}-devices-{mesh.replace('=', '').replace(',', '-')}",
        ["--devices", str(devices), "--mesh", mesh],
    )
    return sharded, Run("1 device", "1-device", ["--devices", "1"])


def train(run: Run, *, common: Sequence[str], folder: Path) -> dict[str, Any]:
    """Runs the recipe, with its output on the console, and returns its report.

    Raises:
        RuntimeError: the run failed.
    """
    logs = folder / "tensorboard" / run.folder
    results = folder / "runs" / f"{run.folder}.json"
    # Otherwise TensorBoard would join this run and an earlier one in one curve.
    shutil.rmtree(logs, ignore_errors=True)
    results.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "examples.gpt2.train",
        *common,
        *run.options,
        "--log-dir",
        str(logs),
        "--results",
        str(results),
    ]
    print(f"\n== {run.name}: {' '.join(['python', *command[1:]])}", flush=True)
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(
            f"the run on {run.name} ended with {done.returncode}; its last lines are above."
        )
    report: dict[str, Any] = json.loads(results.read_text())
    return report


def mib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"


def rows_for(reports: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The report's table: one row per quantity, one column per run."""

    def row(label: str, cell: Any) -> list[str]:
        return [label, *(cell(report) for report in reports.values())]

    def evaluation(report: Mapping[str, Any]) -> str:
        return (
            f"{report['evals'][-1]['loss']:.4f} ({report['evals'][-1]['perplexity']:.1f})"
            if report["evals"]
            else "-"
        )

    def timed(key: str, text: str, scale: float = 1.0) -> Any:
        return lambda report: "-" if not report[key] else text.format(report[key] * scale)

    first = next(iter(reports.values()))
    return [
        row("parameters", lambda report: f"{report['num_params']:,}"),
        row("steps", lambda report: str(len(report["losses"]))),
        row("loss, first step", lambda report: f"{report['losses'][0]:.4f}"),
        row("loss, last step", lambda report: f"{report['losses'][-1]:.4f}"),
        row("evaluation loss (perplexity)", evaluation),
        row("step time", timed("step_time_s", "{:.0f} ms", 1e3)),
        row(f"{first['unit']}/s", timed("items_per_s", "{:,.0f}")),
        *(
            row(
                f"MFU, {formula}",
                lambda report, formula=formula: f"{report['mfu'].get(formula, 0):.2%}",
            )
            for formula in first["mfu"]
        ),
        row("peak memory of the step, per device", lambda report: mib(report["peak_bytes"])),
        row(
            "  of it arguments (parameters, optimizer, batch)",
            lambda report: mib(report["argument_bytes"]),
        ),
        row("  of it temporary", lambda report: mib(report["temp_bytes"])),
        row("compiles", lambda report: f"{report['compiles']} in {report['compile_s']:.0f} s"),
        row("whole run", lambda report: f"{report['wall_s']:.0f} s"),
    ]


def plot(reports: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Writes an image with loss curves, step times and memory, side by side."""
    figure, (curves, times, memory) = plt.subplots(
        1, 3, figsize=(14, 4.2), width_ratios=(2, 1, 1.3), layout="constrained"
    )
    names = list(reports)
    for (name, report), style in zip(reports.items(), ("-", "--", ":"), strict=False):
        curves.plot(range(1, len(report["losses"]) + 1), report["losses"], style, label=name)
    curves.set(xlabel="step", ylabel="training loss", title="Loss")
    curves.legend()
    times.bar(
        names,
        [(report["step_time_s"] or 0.0) for report in reports.values()],
        color="tab:gray",
        width=0.6,
    )
    times.set(ylabel="seconds", title="Step time (the devices share the cores)")
    arguments = [(report["argument_bytes"] or 0) / 2**20 for report in reports.values()]
    temporary = [(report["temp_bytes"] or 0) / 2**20 for report in reports.values()]
    memory.bar(names, arguments, label="parameters, optimizer, batch", width=0.6)
    memory.bar(names, temporary, bottom=arguments, label="temporary", width=0.6)
    memory.set(ylabel="MiB per device", title="Memory of the step")
    memory.margins(y=0.25)  # room for the legend above the taller bar
    memory.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def largest_relative_difference(curves: Sequence[Sequence[float]]) -> float:
    """The largest difference between the first curve and the others, over their common steps."""
    first, *others = curves
    return max(
        (abs(a - b) / abs(a) for other in others for a, b in zip(first, other, strict=False)),
        default=0.0,
    )


def main() -> int:
    parser = argument_parser(__doc__)
    parser.set_defaults(out=RESULTS)
    parser.add_argument(
        "--preset",
        default="small",
        choices=list(PRESETS),
        help="preset of examples.gpt2.train (default small)",
    )
    parser.add_argument(
        "--steps", type=int, default=30, help="optimizer steps of each run (default 30)"
    )
    parser.add_argument(
        "--batch", type=int, default=8, help="sequences in a step, over all devices (default 8)"
    )
    parser.add_argument(
        "--devices", type=int, default=8, help="emulated devices of the sharded run (default 8)"
    )
    parser.add_argument("--mesh", default="fsdp=8", help="mesh of the sharded run (default fsdp=8)")
    args, others = parser.parse_known_args()
    common = [
        "--preset",
        args.preset,
        "--steps",
        str(args.steps),
        "--batch",
        str(args.batch),
        "--warmup",
        str(min(20, args.steps // 3)),
    ]
    common += ["--eval-every", "0", *others]

    reports = {}
    for run in runs(devices=args.devices, mesh=args.mesh):
        reports[run.name] = train(run, common=common, folder=args.out)
    difference = largest_relative_difference([report["losses"] for report in reports.values()])
    sources = {report["peak_source"] for report in reports.values()}
    notes = [
        "MFU counts the model's own FLOPs. 6N: matrices only. 6N+12LdS: attention over the whole "
        "square (PaLM). 6N+6LdS: over its causal half. N counts the tied token table once.",
        f"Peak of a device for MFU: {'; '.join(sorted(sources))}. "
        "Memory is the compiler's own analysis of the train step.",
        f"{verdict(difference <= MAX_LOSS_DIFFERENCE)}: losses agree within "
        f"{MAX_LOSS_DIFFERENCE:g} (largest relative difference {difference:.1e}).",
    ]
    plot(reports, args.out / "gpt2_spmd.png")
    table = Table(
        f"GPT-2, preset {args.preset}, {args.steps} steps", ["", *reports], rows_for(reports), notes
    )
    data = {"reports": reports, "largest_relative_loss_difference": difference}
    print()
    publish("gpt2_spmd", table, data, folder=args.out)
    print(f"plot: {args.out / 'gpt2_spmd.png'}")
    print(f"TensorBoard: tensorboard --logdir {args.out / 'tensorboard'}")
    return 0 if difference <= MAX_LOSS_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
