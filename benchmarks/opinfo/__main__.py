"""How many entries of torch's operator database give the values of eager CPU torch?

Prints a table by variant and dtype; `benchmarks/opinfo/cases.py` defines the verdicts. Worker
processes examine the entries, so that an entry that crashes or hangs affects no other.

Run: python -m benchmarks.opinfo
         all entries on one device (about an hour)
     python -m benchmarks.opinfo --devices 8 --dtypes float32
         the first tensor of every sample is split over 8 devices
     python -m benchmarks.opinfo --ops 'linalg.*' --show
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
    parser.prog = "python -m benchmarks.opinfo"
    parser.add_argument(
        "--ops",
        default="*",
        help="patterns of entries' full names, separated by commas (default: all)",
    )
    parser.add_argument("--dtypes", help="separated by commas (default: all)")
    parser.add_argument("--variants", help="separated by commas (default: all)")
    parser.add_argument(
        "--devices",
        type=num_devices(0),
        default=1,
        help="emulated devices (default 1); 0: the real ones",
    )
    parser.add_argument(
        "--samples",
        type=whole(0),
        default=8,
        help="at most this many samples per entry and dtype, evenly spread (default 8; 0: all)",
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
        "--show", action="store_true", help="print the table with the failures and write no files"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

import torch

import spmd_core as spmd
from benchmarks import workers
from benchmarks.opinfo import cases, samples
from benchmarks.opinfo.cases import Status
from benchmarks.opinfo.samples import DTYPES_BY_NAME, VARIANTS
from benchmarks.opinfo.summary import not_passed, overloads, summary


def _serve(num_devices: int) -> None:
    """A worker process; its answers are verdicts as objects, or null."""
    spmd.config.cache_dir = None
    if num_devices:
        spmd.simulate(num_devices)
    if num_devices > 1:
        spmd.use_spmd()
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",)) if num_devices > 1 else None
    torch.set_num_threads(1)
    ops = {op.formatted_name: op for op in samples.entries()}

    def examine(task: dict[str, Any]) -> dict[str, Any] | None:
        verdict = cases.examine(
            ops[task["entry"]],
            task["variant"],
            DTYPES_BY_NAME[task["dtype"]],
            mesh=mesh,
            limit=task["limit"],
        )
        return None if verdict is None else asdict(verdict)

    workers.serve(examine)


def _lost(task: dict[str, Any], what: str) -> dict[str, Any]:
    """The verdict where the worker died or was too slow."""
    facts = {name: task[name] for name in ("entry", "variant", "dtype", "num_devices")}
    return {
        **facts,
        "status": str(Status.ERROR),
        "num_samples": 1,
        "detail": what,
        "loose": 0.0,
        "random": False,
        "lowered": [],
    }


def main(args: argparse.Namespace) -> int:
    if args.worker:
        _serve(args.devices)
        return 0
    variants = args.variants.split(",") if args.variants else list(VARIANTS)
    dtypes = args.dtypes.split(",") if args.dtypes else list(DTYPES_BY_NAME)
    check_names("--variants", variants, VARIANTS)
    check_names("--dtypes", dtypes, DTYPES_BY_NAME)
    selected("--ops", args.ops, samples.names())
    chosen = samples.matching(args.ops)
    tasks = [
        {
            "entry": op.formatted_name,
            "variant": variant,
            "dtype": dtype,
            "limit": args.samples,
            "num_devices": args.devices,
        }
        for op in chosen
        for variant in variants
        for dtype in dtypes
        if samples.applies(op, variant, DTYPES_BY_NAME[dtype])
    ]
    journal = args.out / f"opinfo_{args.devices}_devices.journal"
    found = workers.run(
        tasks,
        [sys.executable, "-m", "benchmarks.opinfo", "--worker", "--devices", str(args.devices)],
        lost=_lost,
        jobs=args.jobs,
        timeout_s=args.timeout,
        journal=journal,
        resume=args.resume,
        what="entries x variants",
    )
    verdicts = [verdict for verdict in found if verdict is not None]
    journal.unlink()
    table = summary(verdicts, num_devices=args.devices, limit=args.samples)
    if args.show:
        table.show()
        return 0
    publish(
        f"opinfo_{args.devices}_devices",
        table,
        {"not_passed": not_passed(verdicts), "overloads": overloads(verdicts)},
        folder=args.out,
    )
    return 1 if any(v["status"] == Status.WRONG for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main(args))
