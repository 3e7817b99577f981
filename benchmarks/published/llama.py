"""What do tensor, sequence and loss parallelism save of Llama's memory, and what do they send?

Run: python -m benchmarks.published.llama --help
"""

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.published import command, plots, recipes
from benchmarks.published.figures import Figure
from benchmarks.published.plots import text
from benchmarks.published.report import Comparison, Picture, Section
from benchmarks.published.rows import Device, Measured, Row, Scale, Settings

NAME = "llama"
SEQUENCE, LOSS = "--sequence-parallel", "--loss-parallel"
ONE, NUM_EMULATED = "one device", 4
TP, TP_SP, TP_SP_LOSS, FSDP_TP = "TP", "TP + SP", "TP + SP + loss parallel", "FSDP x TP"


def plans(num_devices: int) -> dict[str, str]:
    """The recipe's options by plan; one device alone has none."""
    if num_devices < 4 or num_devices % 2:
        return {}
    tensor, both = f"--mesh tensor={num_devices}", f"--mesh fsdp={num_devices // 2},tensor=2"
    return {
        TP: tensor,
        TP_SP: f"{tensor} {SEQUENCE}",
        TP_SP_LOSS: f"{tensor} {SEQUENCE} {LOSS}",
        FSDP_TP: f"{both} {SEQUENCE} {LOSS}",
    }


def rows(settings: Settings) -> list[Row]:
    """The recipe by each plan, and on one device."""
    quick, on_cpu = settings.scale is Scale.QUICK, settings.device is Device.EMULATED
    num_devices = NUM_EMULATED if on_cpu else settings.num_devices
    base = "-m examples.llama_tp.train --eval-batches 0 --log-every 1 --no-progress"
    base += " --log-dir {logs} --results {run}/report.json"
    if on_cpu:
        base += f" --preset tiny --batch 8 --warmup 2 --max-mb 1 --seq {128 if quick else 256}"
        base += f" --steps {12 if quick else 16}"
    else:
        base += f" --preset {'125M' if quick else '1B'} --dtype bf16 --steps 20"
    found = []
    for name, options in {ONE: "", **plans(num_devices)}.items():
        n = 1 if name == ONE else num_devices
        words = f"{base} {options}" + (f" --devices {n}" if on_cpu else "")
        point = {"devices": n, "plan": name}
        found.append(Row(NAME, name, words.split(), recipes.trained, point, 1 if quick else 3))
    return found


# --- What is shown --------------------------------------------------------------------------------


def section(settings: Settings, measured: Mapping[str, Measured]) -> Section:
    """Peak memory, bytes sent and step time by plan."""

    def draw(figure: Any) -> None:
        panels = (
            ("peak_bytes", "peak of a device, MB", 1e-6),
            ("sent_bytes", "sent by a device in a step, MB", 1e-6),
            ("step_s", "step, ms", 1e3),
        )
        for axes, (name, label, scale) in zip(
            figure.subplots(1, 3, sharey=True), panels, strict=True
        ):
            plots.bars(axes, {row: m[name] for row, m in measured.items()}, scale=scale)
            axes.set(xlabel=label)
            axes.grid(axis="x", alpha=0.3)
        figure.suptitle("Llama by the tutorial's plans")

    one = measured.get(ONE)
    lines = [
        (
            name,
            plots.bytes_text(row["peak_bytes"].median),
            f"{row['peak_bytes'].median / one['peak_bytes'].median:.3f}" if one else "-",
            plots.bytes_text(row["argument_bytes"].median),
            plots.bytes_text(row["sent_bytes"].median),
            text(row["step_s"], ",.1f", 1e3),
            f"{row['last_loss'].median:.4f}",
        )
        for name, row in measured.items()
    ]
    columns = ("", "peak of a device", "of one device's", "of it state and batch")
    notes = [
        "Memory and bytes are the compiler's figures of the step's program. Emulated devices share "
        "this machine's cores: their step times say how much work a plan adds, not how fast it is."
    ]
    return Section(
        "Llama: the tutorial's plans",
        "The plans of PyTorch's tutorial on tensor parallelism, applied to an unchanged model.",
        (*columns, "sent by a device", "step, ms", "last loss"),
        lines,
        notes if settings.device is Device.EMULATED else (),
        _comparisons(measured),
        (Picture("llama", "Llama's memory, traffic and step time by plan", draw, (13.0, 3.8)),)
        if measured
        else (),
    )


def _comparisons(measured: Mapping[str, Measured]) -> list[Comparison]:
    if TP_SP not in measured or TP_SP_LOSS not in measured:
        return []
    before, after = (measured[name]["peak_bytes"].median for name in (TP_SP, TP_SP_LOSS))
    return [
        Comparison(
            "What loss parallelism saves of the peak",
            "25.9% to 20.5% of HBM, 0.79 times (torchtitan, Llama-7B, TP over 4)",
            f"{plots.bytes_text(before)} to {plots.bytes_text(after)}, {after / before:.2f} times",
            "Logits of another vocabulary and length have another share of the memory.",
        )
    ]


FIGURE = Figure(NAME, rows, section)

if __name__ == "__main__":
    sys.exit(command.alone(FIGURE, __doc__))
