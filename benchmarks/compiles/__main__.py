"""Which operations compile for a TPU, and lower for CUDA, on a machine that has neither?

Takes the samples of torch's operator database, forward and gradient. Prints a table by variant and
dtype, and what does not compile, by reason. Worker processes compile, so that an entry that crashes
or hangs affects no other. For a TPU it needs libtpu: pip install 'spmd-core[tpu]'.

Run: python -m benchmarks.compiles
         for TPU v4 (about an hour)
     python -m benchmarks.compiles --target cuda
         lowers for CUDA, and compiles nothing (half an hour)
     python -m benchmarks.compiles --devices 4 --dtypes float32
         the first tensor of every sample is split over 4 of the topology's devices
     python -m benchmarks.compiles --ops 'linalg.*' --show
         some entries, and what is wrong with them
"""

import argparse
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.options import check_names, num_devices, num_jobs, number, selected, whole
from benchmarks.report import argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.prog = "python -m benchmarks.compiles"
    parser.add_argument(
        "--target", default="v4-8", help="a topology, such as v5e-8, or cuda (default: v4-8)"
    )
    parser.add_argument(
        "--devices", type=num_devices(), default=1, help="devices of a program (default 1)"
    )
    parser.add_argument(
        "--ops",
        default="*",
        help="patterns of entries' full names, separated by commas (default: all)",
    )
    parser.add_argument(
        "--dtypes",
        default="float32,bfloat16",
        help="names, separated by commas (default: float32,bfloat16)",
    )
    parser.add_argument(
        "--samples",
        type=whole(0),
        default=4,
        help="at most this many samples per entry and dtype, evenly spread (default 4; 0: all)",
    )
    parser.add_argument("--jobs", type=num_jobs(), default=2, help="worker processes (default 2)")
    parser.add_argument(
        "--timeout",
        type=number(0.1),
        default=300,
        help="time limit in seconds for one entry, variant and dtype (default 300)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted run of the same arguments",
    )
    parser.add_argument(
        "--show", action="store_true", help="print the table with the reasons and write no files"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

import torch

import spmd_core as spmd
from benchmarks import workers
from benchmarks.compiles.outcomes import DTYPES, Outcome, Status, examine
from benchmarks.compiles.summary import not_compiled, overloads, summary
from benchmarks.compiles.target import Target
from benchmarks.opinfo import samples

VARIANTS = ("forward", "gradient")


def _serve(target: Target) -> None:
    """A worker process; its answers are outcomes as objects, or null."""
    spmd.config.cache_dir = None
    torch.set_num_threads(1)
    ops = {op.formatted_name: op for op in samples.entries()}

    def answer(task: dict[str, Any]) -> dict[str, Any] | None:
        found = examine(
            ops[task["entry"]],
            task["variant"],
            DTYPES[task["dtype"]],
            target,
            limit=task["limit"],
        )
        return None if found is None else asdict(found)

    workers.serve(answer)


def _lost(task: dict[str, Any], what: str) -> dict[str, Any]:
    """The outcome where the worker died or was too slow."""
    return asdict(
        Outcome(task["entry"], task["variant"], task["dtype"], Status.FAILS, 1, f"XLA: {what}")
    )


def main(args: argparse.Namespace) -> int:
    if args.worker:
        _serve(Target(args.target, num_devices=args.devices))
        return 0
    dtypes = args.dtypes.split(",")
    check_names("--dtypes", dtypes, DTYPES)
    try:
        Target(args.target, num_devices=args.devices)
    except (spmd.errors.PlanError, ValueError) as error:
        parser.error(str(error))
    selected("--ops", args.ops, samples.names())
    chosen = samples.matching(args.ops)
    tasks = [
        {"entry": op.formatted_name, "variant": variant, "dtype": dtype, "limit": args.samples}
        for op in chosen
        for variant in VARIANTS
        for dtype in dtypes
        if samples.applies(op, variant, DTYPES[dtype])
    ]
    name = f"compiles_{args.target}_{args.devices}_devices"
    journal = args.out / f"{name}.journal"
    worker = [sys.executable, "-m", "benchmarks.compiles", "--worker"]
    found = workers.run(
        tasks,
        [*worker, "--target", args.target, "--devices", str(args.devices)],
        lost=_lost,
        jobs=args.jobs,
        timeout_s=args.timeout,
        journal=journal,
        resume=args.resume,
        what="entries x variants",
    )
    outcomes = [outcome for outcome in found if outcome is not None]
    journal.unlink()
    table = summary(outcomes, target=args.target, num_devices=args.devices, limit=args.samples)
    if args.show:
        table.show()
    else:
        data = {"not_compiled": not_compiled(outcomes), "overloads": overloads(outcomes)}
        publish(name, table, data, folder=args.out)
    return 1 if any(o["status"] == Status.FAILS for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(args))
