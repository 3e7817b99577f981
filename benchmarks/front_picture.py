"""Draws the README's picture: GPT-2's peak memory on TPU v4 chips, and one program on two systems.

It measures nothing: its figures are those of `hbm.py` and `other_systems.py` in results/.

Run: python -m benchmarks.front_picture
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import hbm, memory_bound
from benchmarks.index import RESULTS
from benchmarks.options import existing
from benchmarks.published import plots
from benchmarks.published.hbm import num_params
from examples.gpt2.presets import PRESETS

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "front"
SIZES = ("0.5B", "1B", "2B", "4B")
CHIPS = (1, 4, 8, 16)
OURS, THEIRS = "this project", "torch_xla"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=existing("folder"), default=RESULTS, help="folder of the figures"
    )
    parser.add_argument("--picture", type=Path, default=PICTURE, help="what to write, no suffix")
    options = parser.parse_args(argv)
    peaks = json.loads((options.results / "hbm.json").read_text())["rows"]
    systems = json.loads((options.results / "other_systems.json").read_text())["systems"]
    picture = options.picture
    plots.save(lambda of: draw(of, peaks, systems), picture, size=(11.5, 4.2), kinds=["png"])
    print(f"written: {picture}.png")
    return 0


def draw(figure: Any, peaks: dict[str, Any], systems: dict[str, Any]) -> None:
    """Both panels, from the rows of hbm.json and the systems of other_systems.json."""
    memory, step = figure.subplots(1, 2, width_ratios=(3, 2))
    for i, chips in enumerate(CHIPS):
        name = "1 chip" if chips == 1 else f"{chips} chips"
        known = [(p, peak) for p in SIZES if (peak := _peak(peaks, p, chips)) is not None]
        sizes, color = [num_params(preset) / 1e9 for preset, _ in known], plots.COLORS[i]
        memory.plot(sizes, [peak / 1e9 for _, peak in known], "o-", color=color, label=name)
        bounds = [memory_bound.bound(PRESETS[p], fsdp=chips).total / 1e9 for p in SIZES]
        memory.plot([num_params(p) / 1e9 for p in SIZES], bounds, ":", color=color)
    memory.axhline(hbm.CAPACITY / 1e9, color="black", linewidth=1)
    memory.annotate("memory of a chip", (0.5, hbm.CAPACITY / 1e9), va="bottom", fontsize=8)
    memory.plot([], [], ":", color="gray", label="least possible")
    memory.set(xlabel="billion parameters", ylabel="peak of a chip, GB", ylim=(0, 40))
    memory.set(title="GPT-2 by fsdp, compiled for TPU v4")
    memory.grid(alpha=0.3)
    memory.legend(fontsize=8)

    labels = {THEIRS: f"torch_xla {systems[THEIRS]['version']}", OURS: "here, unchanged"}
    parts = {"wall_s": "wall time", "cpu_s": "CPU time, all threads"}
    width = 0.4
    for i, (part, label) in enumerate(parts.items()):
        samples = [[1e3 * s for s in systems[name][part]] for name in labels]
        places = [n + (i - 0.5) * width for n in range(len(labels))]
        heights = [statistics.median(of) for of in samples]
        drawn = step.bar(places, heights, width * 0.95, label=label, color=plots.COLORS[i])
        step.bar_label(drawn, fmt="%.0f", fontsize=8)
    step.set_xticks(range(len(labels)), list(labels.values()))
    step.set(ylabel="a step, ms", title="A torch_xla program, 4 CPU devices")
    step.margins(y=0.15)
    step.grid(axis="y", alpha=0.3)
    step.legend(fontsize=8)


def _peak(peaks: dict[str, Any], preset: str, chips: int) -> float | None:
    """Bytes of one chip; None where no program fits."""
    row = peaks[f"{preset} {'unsharded' if chips == 1 else f'fsdp={chips}'}"]["recipe"]
    return float(row["peak"]) if row.get("fits") else None


if __name__ == "__main__":
    sys.exit(main())
