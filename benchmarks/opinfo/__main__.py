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
import fnmatch
import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import spmd_core as spmd
from benchmarks.opinfo import cases, samples
from benchmarks.opinfo.cases import Status
from benchmarks.opinfo.samples import DTYPES_BY_NAME, VARIANTS
from benchmarks.opinfo.summary import not_passed, overloads, summary
from benchmarks.report import argument_parser, publish

ROOT = Path(__file__).parents[2]


def _serve(num_devices: int) -> None:
    """A worker process: reads tasks from stdin, a JSON object per line, and prints their verdicts.

    Each answer is one line of JSON: the verdict as an object, or null.
    """
    spmd.config.cache_dir = None
    if num_devices:
        spmd.simulate(num_devices)
    if num_devices > 1:
        spmd.use_spmd()
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",)) if num_devices > 1 else None
    torch.set_num_threads(1)
    ops = {op.formatted_name: op for op in samples.entries()}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an operator that prints to stdout must not look like an answer
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        verdict = cases.examine(
            ops[task["entry"]],
            task["variant"],
            DTYPES_BY_NAME[task["dtype"]],
            mesh=mesh,
            limit=task["limit"],
        )
        print(json.dumps(None if verdict is None else asdict(verdict)), file=answers, flush=True)


class _Worker:
    """One worker process, which is restarted when it crashes or takes too long."""

    def __init__(self, num_devices: int, timeout_s: float) -> None:
        self._num_devices, self._timeout_s = num_devices, timeout_s
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._start()

    def _start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.opinfo",
            "--worker",
            "--devices",
            str(self._num_devices),
        ]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answers = queue.Queue()
        threading.Thread(
            target=self._listen, args=(self._process, self._answers), daemon=True
        ).start()
        if self._answers.get() is None:
            raise RuntimeError(
                f"the worker did not start; run it by hand to see why: {' '.join(command)}"
            )

    @staticmethod
    def _listen(process: subprocess.Popen[str], answers: "queue.Queue[str | None]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(line)
        answers.put(None)

    def ask(self, task: dict[str, Any]) -> dict[str, Any] | None:
        """The verdict as a dictionary; if the process dies or is too slow, an error verdict."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        try:
            answer = self._answers.get(timeout=self._timeout_s)
            what = "the process died"
        except queue.Empty:
            answer, what = None, f"no result within {self._timeout_s:.0f} s"
        if answer is not None:
            return json.loads(answer)
        self._process.kill()
        self._process.wait()
        self._start()
        facts = {name: task[name] for name in ("entry", "variant", "dtype")}
        return {
            **facts,
            "num_devices": self._num_devices,
            "status": str(Status.ERROR),
            "num_samples": 1,
            "detail": what,
            "loose": 0.0,
            "random": False,
            "lowered": [],
        }

    def stop(self) -> None:
        self._process.kill()


def run(
    tasks: list[dict[str, Any]],
    *,
    jobs: int,
    num_devices: int,
    timeout_s: float,
    journal: Path,
    resume: bool,
) -> list[dict[str, Any]]:
    """All verdicts, in the order of the tasks. A progress bar counts the tasks.

    Each verdict is appended to the journal as soon as it is known, so that `resume` continues an
    interrupted run.
    """
    found: dict[int, dict[str, Any] | None] = {}
    if resume and journal.exists():
        known = {
            json.dumps(task): verdict
            for task, verdict in map(json.loads, journal.read_text().splitlines())
        }
        found = {
            i: known[json.dumps(task)] for i, task in enumerate(tasks) if json.dumps(task) in known
        }
    waiting: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
    for i, task in enumerate(tasks):
        if i not in found:
            waiting.put((i, task))
    journal.parent.mkdir(parents=True, exist_ok=True)
    with (
        journal.open("a" if resume else "w") as lines,
        tqdm(total=len(tasks), initial=len(found), desc="entries x variants", disable=None) as bar,
    ):

        def work() -> None:
            worker = _Worker(num_devices, timeout_s)
            while True:
                try:
                    i, task = waiting.get_nowait()
                except queue.Empty:
                    worker.stop()
                    return
                found[i] = worker.ask(task)
                # A single call, which the interpreter's lock makes atomic.
                lines.write(json.dumps([task, found[i]]) + "\n")
                lines.flush()
                bar.update()

        threads = [threading.Thread(target=work) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [verdict for i in sorted(found) if (verdict := found[i]) is not None]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.prog = "python -m benchmarks.opinfo"
    parser.add_argument(
        "--ops",
        default="*",
        help="patterns of entries' full names, separated by commas (default: all)",
    )
    parser.add_argument(
        "--dtypes", default=",".join(DTYPES_BY_NAME), help="separated by commas (default: all)"
    )
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), help="separated by commas (default: all)"
    )
    parser.add_argument(
        "--devices", type=int, default=1, help="emulated devices (default 1); 0: the real ones"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=8,
        help="at most this many samples per entry and dtype, evenly spread (default 8; 0: all)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument(
        "--timeout",
        type=float,
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
    if args.worker:
        _serve(args.devices)
        return 0
    variants, dtypes = args.variants.split(","), args.dtypes.split(",")
    unknown = [name for name in (*variants, *dtypes) if name not in (*VARIANTS, *DTYPES_BY_NAME)]
    if unknown:
        parser.error(
            f"variants are {', '.join(VARIANTS)} and dtypes are {', '.join(DTYPES_BY_NAME)}; "
            f"got {', '.join(unknown)}"
        )
    chosen = [
        op
        for op in samples.entries()
        if any(
            fnmatch.fnmatch(name, p)
            for p in args.ops.split(",")
            for name in (op.formatted_name, op.name)
        )
    ]
    if not chosen:
        parser.error(f"--ops names no entry of torch's database: {args.ops}")
    tasks = [
        {"entry": op.formatted_name, "variant": variant, "dtype": dtype, "limit": args.samples}
        for op in chosen
        for variant in variants
        for dtype in dtypes
        if samples.applies(op, variant, DTYPES_BY_NAME[dtype])
    ]
    journal = args.out / f"opinfo_{args.devices}_devices.journal"
    verdicts = run(
        tasks,
        jobs=args.jobs,
        num_devices=args.devices,
        timeout_s=args.timeout,
        journal=journal,
        resume=args.resume,
    )
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
    sys.exit(main())
