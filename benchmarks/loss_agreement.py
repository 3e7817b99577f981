"""Does the recipe's loss depend on the number of devices, the mesh, or eager execution?

The recipe examples/gpt2 trains for 20 steps from one seed on the default text: sharded in three
ways over 8 emulated devices, on 1 device, and in eager torch on the CPU. Each run has its own
process, as the number of devices is fixed per process. The figure is the largest relative
difference between the loss of any step and that of eager torch.

Most of the difference comes from the gradient norm: for a million elements, torch's float32 norm on
the CPU has an error of 1e-5 or more, and clipping scales every gradient by the norm. `--clip 0`
runs without clipping, and shows the difference that remains.

Run: python -m benchmarks.loss_agreement
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.options import number, whole
from benchmarks.report import Table, argument_parser, publish, verdict
from examples.gpt2.presets import PRESETS

MAX_DIFFERENCE = 1e-4
ORACLE = "eager torch on the CPU"
RUNS = {
    ORACLE: ["--device", "cpu"],
    "1 device": ["--devices", "1"],
    "8 devices, data=8": ["--devices", "8", "--mesh", "data=8"],
    "8 devices, fsdp=8": ["--devices", "8", "--mesh", "fsdp=8"],
    "8 devices, fsdp=4,tensor=2": ["--devices", "8", "--mesh", "fsdp=4,tensor=2"],
}


def run(options: list[str], *, common: list[str]) -> dict[str, Any]:
    """The report of one run of the recipe.

    Raises:
        RuntimeError: the run failed; the message holds the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "examples.gpt2.train",
            *common,
            *options,
            "--results",
            str(results),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command[1:])} ended with {done.returncode}:\n"
                f"{(done.stdout + done.stderr)[-3000:]}"
            )
        report: dict[str, Any] = json.loads(results.read_text())
        return report


def largest_relative_difference(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference over all steps.

    Raises:
        ValueError: the runs do not have the same number of steps.
    """
    if len(losses) != len(expected):
        raise ValueError(
            f"the runs must have the same number of steps; got {len(losses)} and {len(expected)}."
        )
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", help="preset of the recipe (default tiny)"
    )
    parser.add_argument("--steps", type=whole(), default=20, help="optimizer steps (default 20)")
    parser.add_argument(
        "--max-mb",
        type=number(),
        default=2.0,
        help="how much of the default text to use, in millions of bytes (default 2)",
    )
    parser.add_argument(
        "--clip",
        type=number(),
        default=1.0,
        help="clip gradients to this norm; 0: no clipping (default 1)",
    )
    args = parser.parse_args()
    common = [
        "--preset",
        args.preset,
        "--steps",
        str(args.steps),
        "--warmup",
        "5",
        "--max-mb",
        str(args.max_mb),
        "--eval-batches",
        "0",
    ]
    common += ["--clip", str(args.clip), "--log-every", "5", "--init", "host", "--no-progress"]

    reports, seconds = {}, {}
    for name, options in tqdm(RUNS.items(), desc="runs", disable=None):
        start = time.perf_counter()
        reports[name] = run(options, common=common)
        seconds[name] = time.perf_counter() - start
    expected = reports[ORACLE]["losses"]
    differences = {
        name: largest_relative_difference(report["losses"], expected)
        for name, report in reports.items()
    }
    holds = all(value <= MAX_DIFFERENCE for value in differences.values())

    rows = [
        [
            name,
            f"{report['losses'][0]:.6f}",
            f"{report['losses'][-1]:.6f}",
            f"{differences[name]:.1e}",
            f"{seconds[name]:.0f}",
        ]
        for name, report in reports.items()
    ]
    table = Table(
        f"Loss over {args.steps} steps, GPT-2 preset {args.preset}, fp32, "
        f"gradients {'clipped' if args.clip else 'not clipped'}",
        ["run", "first loss", "last loss", "largest relative difference", "seconds"],
        rows,
        [f"{verdict(holds)}: every run within {MAX_DIFFERENCE:g} of {ORACLE}, at every step."],
    )
    data = {
        "preset": args.preset,
        "steps": args.steps,
        "clip": args.clip,
        "losses": {name: report["losses"] for name, report in reports.items()},
        "largest_relative_difference": differences,
        "target": MAX_DIFFERENCE,
    }
    publish(
        "loss_agreement" if args.clip else "loss_agreement_unclipped", table, data, folder=args.out
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
