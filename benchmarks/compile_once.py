"""How many programs does GPT-2's recipe compile up to its second step, and what do they cost?

The recipe as it is, whose state begins as an input of the step's program, and with that turned off
(`program/initial_state.py`), as the optimizer's calls are recorded: then the first step makes its
state inside of its program, and the second step has another one. In turns, each in a process of its
own without a cache on disk.

Run: python -m benchmarks.compile_once
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import trange

from benchmarks.options import whole
from benchmarks.report import Samples, Table, argument_parser, publish, verdict
from examples.gpt2.presets import PRESETS

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", help="of examples.gpt2.train (default tiny)"
    )
    parser.add_argument("--devices", type=whole(), default=4, help="emulated devices (default 4)")
    parser.add_argument("--rounds", type=whole(), default=3, help="runs of each kind (default 3)")
    parser.add_argument(
        "--only",
        choices=("an input", "as recorded"),
        help="one run in this process, as a line of JSON",
    )
    args = parser.parse_args()

from examples.gpt2.train import main as recipe
from spmd_core.program import initial_state

STEPS = 2
# State as an input of the program, or made inside of it, as the calls are recorded.
INPUT, RECORDED = "an input", "as recorded"
MOST = 0.65  # of the CPU time as recorded, where about the same program is compiled twice


def train(kind: str, preset: str, devices: int) -> dict[str, Any]:
    """The recipe in this process: programs, seconds of lowering and compiling, losses."""
    if kind == RECORDED:
        initial_state.find_state = lambda live, nodes, returned=(): initial_state.State()
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["--preset", preset, "--steps", str(STEPS), "--eval-batches", "0"]
        command += ["--max-mb", "1", "--no-progress", "--results", str(report)]
        command += ["--devices", str(devices), "--mesh", f"fsdp={devices}"]
        if recipe(command):
            raise SystemExit(f"the recipe failed: {' '.join(command)}")
        found = json.loads(report.read_text())
    return {
        "programs": found["compiles"],
        "compile_s": found["compile_s"],
        "cpu_s": time.process_time() - start,
        "losses": found["losses"],
    }


def run(kind: str, preset: str, devices: int) -> dict[str, Any]:
    """`train` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.compile_once", "--only", kind]
    command += ["--preset", preset, "--devices", str(devices)]
    env = {**os.environ, "SPMD_CACHE_DIR": ""}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    if args.only:
        print(json.dumps(train(args.only, args.preset, args.devices)))
        return 0
    runs: dict[str, list[dict[str, Any]]] = {INPUT: [], RECORDED: []}
    for number in trange(args.rounds, desc="rounds", disable=None):
        for kind in list(runs) if number % 2 else reversed(list(runs)):
            runs[kind].append(run(kind, args.preset, args.devices))
    samples = {
        kind: {name: [float(r[name]) for r in of] for name in ("compile_s", "cpu_s")}
        for kind, of in runs.items()
    }
    programs = {kind: max(r["programs"] for r in of) for kind, of in runs.items()}
    medians = {
        kind: {name: Samples(values).median for name, values in of.items()}
        for kind, of in samples.items()
    }
    ratios = {name: medians[INPUT][name] / medians[RECORDED][name] for name in samples[INPUT]}
    is_same = len({tuple(r["losses"]) for of in runs.values() for r in of}) == 1
    holds = {
        "one program": programs[INPUT] == 1,
        f"at most {MOST} of the CPU time": ratios["cpu_s"] <= MOST,
        "the same losses": is_same,
    }
    table = Table(
        f"Compiling GPT-2 {args.preset} up to its second step",
        ["state begins", "programs", "lowering and compiling", "CPU time of the run"],
        [
            [
                kind,
                str(programs[kind]),
                f"{medians[kind]['compile_s']:.1f} s",
                f"{medians[kind]['cpu_s']:.1f} s",
            ]
            for kind in runs
        ],
        [
            f"fsdp={args.devices} emulated devices, medians of {args.rounds} runs in turns. "
            f"Compiling takes {ratios['compile_s']:.2f} of the time on the clock, and the run "
            f"{ratios['cpu_s']:.2f} of the CPU time of all threads.",
            *(f"{name}: {verdict(of)}" for name, of in holds.items()),
        ],
    )
    data = {
        "preset": args.preset,
        "devices": args.devices,
        "programs": programs,
        "seconds": samples,
        "losses": runs[INPUT][0]["losses"],
    }
    publish("compile_once", table, data, folder=args.out)
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
