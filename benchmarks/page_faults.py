"""What does a step on emulated devices gain from temporaries that stay mapped between runs?

A training step of models of `benchmarks.auto_models` runs on eight emulated devices in two
processes in turns: one keeps the memory that programs free (`spmd_core.runtime.host_memory`), one
leaves glibc's allocator as it is by default. Compared are page faults and CPU time of a step.

    python -m benchmarks.page_faults
"""

import json
import os
import statistics
import subprocess
import sys

from benchmarks.options import whole
from benchmarks.report import Table, argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=whole(), default=3, help="of both processes (default 3)")
    parser.add_argument("--steps", type=whole(), default=6, help="that are measured (default 6)")
    parser.add_argument("--only", help="run this one, MODEL:STRATEGY; the script uses this")
    args = parser.parse_args()

import resource
import time

import torch
from tqdm import tqdm

import spmd_core as spmd
from benchmarks.auto_models import MODELS, mesh_of

CASES = ("gpt2:data", "gpt2:fsdp", "mixtral:data", "mixtral:fsdp")
# One of the variables with which `host_memory` leaves the allocator alone; this is its default.
BY_DEFAULT = {"MALLOC_MMAP_MAX_": "65536"}
KEPT, DEFAULT = "kept", "default"


def measured(case: str, steps: int) -> dict[str, float]:
    """Page faults and CPU seconds of a step, medians."""
    name, strategy = case.split(":")
    spmd.simulate(8)
    spmd.use_spmd()
    torch.manual_seed(0)
    net, _, step, inputs = MODELS[name].build("small", "xla")
    MODELS[name].manual[strategy](net, inputs, mesh_of(strategy, 8))
    faults, seconds = [], []
    for _ in range(3 + steps):
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
        step(*inputs)
        spmd.sync(wait=True)
        seconds.append(time.process_time() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before.ru_minflt)
    return {"faults": statistics.median(faults[3:]), "cpu_s": statistics.median(seconds[3:])}


def _run(case: str, how: str) -> dict[str, float]:
    words = [sys.executable, "-m", "benchmarks.page_faults", "--only", case]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        [*words, "--steps", str(args.steps)],
        env=variables | (BY_DEFAULT if how == DEFAULT else {}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if args.only:
        print(json.dumps(measured(args.only, args.steps)))
        return
    turns = [(case, how) for _ in range(args.rounds) for case in CASES for how in (KEPT, DEFAULT)]
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for case, how in tqdm(turns, desc="runs", disable=None):
        found.setdefault(case, {}).setdefault(how, []).append(_run(case, how))
    rows = []
    for case, of in found.items():
        median = {
            (how, what): statistics.median(x[what] for x in runs)
            for how, runs in of.items()
            for what in ("faults", "cpu_s")
        }
        rows.append(
            [
                case.replace(":", ", "),
                f"{median[DEFAULT, 'faults']:,.0f}",
                f"{median[KEPT, 'faults']:,.0f}",
                f"{median[DEFAULT, 'cpu_s'] * 1e3:,.0f} ms",
                f"{median[KEPT, 'cpu_s'] * 1e3:,.0f} ms",
                f"{median[KEPT, 'cpu_s'] / median[DEFAULT, 'cpu_s']:.2f}",
            ]
        )
    columns = ("model", "page faults", "kept mapped", "CPU time", "kept mapped", "ratio")
    title = "Page faults and CPU time of a step on 8 emulated devices"
    publish("page_faults", Table(title, columns, rows, []), found, folder=args.out)


if __name__ == "__main__":
    main()
