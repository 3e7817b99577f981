"""What does a step of GPT-2 take of a device, and send, by each strategy on eight devices?

The recipe's comparison at its smoke size: losses, peak memory, state and collectives of each
strategy on the meshes that it takes, compiled as users compile. Losses are read at the end, and
step times are not measured: emulated devices share the cores of one machine.

Run: python -m benchmarks.gpt2_strategies
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.options import new_file
from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--picture",
        type=new_file,
        default=Path(__file__).parents[1] / "docs" / "images" / "gpt2_strategies.png",
        help="where the picture goes (default: docs/images)",
    )
    args = parser.parse_args()

from examples.gpt2 import comparison
from examples.training.compare import COLUMNS, rows, sent

MAX_DIFFERENCE = 1e-4
STEPS = "50"
OPTIONS = ["--smoke", "--steps", STEPS, "--eval-batches", "0", "--devices", "8"]


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run's report."""
    names = ("losses", "peak_bytes", "argument_bytes", "program_flops", "collectives")
    return {**{name: report[name] for name in names}, "sent_bytes": sent(report)}


def main() -> int:
    comparison.compare_strategies([*OPTIONS, "--log-every", STEPS, "--no-progress"])
    reports = json.loads((comparison.FOLDER / "compare.json").read_text())
    shutil.copyfile(comparison.FOLDER / "compare.png", args.picture)
    lines = rows(reports)
    differences = [float(line[COLUMNS.index("difference")]) for line in lines]
    holds = max(differences) <= MAX_DIFFERENCE
    table = Table(
        "GPT-2's strategies on eight emulated devices",
        COLUMNS,
        lines,
        [
            f"Of `python -m examples.gpt2.comparison {' '.join(OPTIONS)}`. The difference is the "
            "largest of any step, relative to one device. Step times were not measured.",
            f"{verdict(holds)}: every strategy's losses are within {MAX_DIFFERENCE:g} of those of "
            "one device, at every step.",
        ],
    )
    data = {"strategies": {name: figures(report) for name, report in reports.items()}}
    publish("gpt2_strategies", table, data, folder=args.out)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
