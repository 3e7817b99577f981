"""What does a step of each recipe cost when it is captured, against the same step recorded?

Each recipe runs as it is, with its smoke options, on 8 emulated devices, in a process of its own.
Its step function is captured, and it is also recorded at each call, in turns of several steps, on
the same model, optimizer and batches. Devices are idle when a step begins. Reported are the CPU
time of the thread that calls the step, which is what Python costs before the device has all of the
step, and the CPU time of all threads and the time on the clock until the step is done.

Run: python -m benchmarks.captured_recipes
"""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.options import whole
from benchmarks.report import Samples, Stopwatch, Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=whole(), default=5, help="turns of each kind (default 5)")
    parser.add_argument("--only", help="one recipe, as a line of JSON")
    args = parser.parse_args()

import spmd_core as spmd

MESHES = {
    "gpt2": "fsdp=4,tensor=2",
    "llama_tp": "data=4,tensor=2",
    "resnet_spatial": "data=2,height=2,width=2",
}
DEVICES = 8
CAPTURED, RECORDED = "captured", "recorded"
TURN = 8  # steps of a turn; the first one, in which the state changes hands, is not counted
WARM_UP = 4  # steps of each kind that compile and capture
SETTLE_S = 0.03  # until XLA's threads sleep


class InTurns:
    """A step, captured in one turn and recorded in the next.

    Args:
        step: a recipe's.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        options: Any = {"full_graph": True, "name": "train"}
        self.steps = {
            CAPTURED: spmd.compile(step, capture=True, **options),
            RECORDED: spmd.compile(step, **options),
        }
        self.num_calls = 0
        self.found: dict[str, dict[str, Samples]] = {
            kind: {name: Samples() for name in ("host", "cpu", "wall")} for kind in self.steps
        }

    def __call__(self, *batch: Any) -> Any:
        """Runs a step and waits for it."""
        turn, position = divmod(self.num_calls, TURN)
        kind = (CAPTURED, RECORDED)[turn % 2]
        self.num_calls += 1
        spmd.sync(wait=True)
        time.sleep(SETTLE_S)
        start_s = time.thread_time()
        with Stopwatch() as whole_step:
            results = self.steps[kind](*batch)
            host_s = time.thread_time() - start_s
            spmd.sync(wait=True)
        if turn >= 2 and position:
            found = self.found[kind]
            found["host"].add(host_s)
            found["cpu"].add(whole_step.cpu_s)
            found["wall"].add(whole_step.wall_s)
        return results


def train(recipe: str, rounds: int) -> dict[str, Any]:
    """A recipe's steps in this process: seconds of each kind."""
    config = importlib.import_module(f"examples.{recipe}.config")
    module: Any = importlib.import_module(f"examples.{recipe}.train")
    made: list[InTurns] = []

    def in_turns(config: Any) -> Callable[[Any], Any]:
        def decorate(step: Any) -> Any:
            made.append(InTurns(step))
            return made[-1]

        return decorate

    module.one_program = in_turns
    options = {**config.SMOKE, "devices": DEVICES, "mesh": MESHES[recipe], "progress": False}
    options |= {"steps": (2 + 2 * rounds) * TURN, "eval_batches": 0}
    module.run(config.TrainConfig(**options))
    (steps,) = made
    captured: Any = steps.steps[CAPTURED]
    program = max(spmd.metrics.programs(), key=lambda program: program.executions)
    return {
        "operations": program.num_ops,
        "replayed": captured.replayed,
        "recorded": captured.recorded,
        "seconds": {
            kind: {name: samples.values for name, samples in of.items()}
            for kind, of in steps.found.items()
        },
    }


def run(recipe: str, rounds: int) -> dict[str, Any]:
    """`train` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.captured_recipes", "--only", recipe]
    command += ["--rounds", str(rounds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(recipe: str, found: dict[str, Any]) -> list[str]:
    """A recipe's line of the table."""
    medians = {
        kind: {name: 1e3 * Samples(values).median for name, values in of.items()}
        for kind, of in found["seconds"].items()
    }
    mine, right = medians[CAPTURED], medians[RECORDED]
    return [
        f"{recipe}, {MESHES[recipe]}",
        str(found["operations"]),
        f"{mine['host']:.1f}, {right['host']:.1f} ms",
        f"{mine['cpu']:.1f}, {right['cpu']:.1f} ms",
        f"{mine['cpu'] / right['cpu']:.2f}",
        f"{mine['wall']:.1f}, {right['wall']:.1f} ms",
        f"{mine['wall'] / right['wall']:.2f}",
    ]


def main() -> int:
    if args.only:
        print(json.dumps(train(args.only, args.rounds)))
        return 0
    runs = {recipe: run(recipe, args.rounds) for recipe in MESHES}
    is_replayed = all(
        found["recorded"] <= WARM_UP and found["replayed"] >= args.rounds * TURN
        for found in runs.values()
    )
    columns = ["recipe", "operations", "Python, CPU: captured, recorded", "step, CPU", "ratio"]
    table = Table(
        "Captured and recorded steps of the recipes",
        [*columns, "step, wall", "ratio"],
        [row(recipe, found) for recipe, found in runs.items()],
        [
            f"Medians of {args.rounds * (TURN - 1)} steps of each kind, in turns of {TURN}, with "
            f"the smoke options on {DEVICES} emulated devices. Python's part is the CPU time of "
            "the thread that calls the step.",
            f"{verdict(is_replayed)}: captured steps were replayed.",
        ],
    )
    options = {"rounds": args.rounds}
    publish("captured_recipes", table, {"options": options, "runs": runs}, folder=args.out)
    return 0 if is_replayed else 1


if __name__ == "__main__":
    sys.exit(main())
