"""How many of torch's own operator tests pass? Every entry of torch's database against eager CPU torch, as a table by variant and dtype.

What a verdict means stands in `benchmarks/opinfo_cases.py`. Entries are examined in worker processes: one that crashes or hangs costs itself alone.

Run: python -m benchmarks.opinfo                                     all of it, on one device (an hour or so)
     python -m benchmarks.opinfo --devices 8 --dtypes float32        with the first tensor of every sample split over 8 devices
     python -m benchmarks.opinfo --ops 'linalg.*' --show             some entries, and what is wrong with them
"""

import argparse
import fnmatch
import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import spmd_core as spmd
from benchmarks import opinfo_cases, opinfo_samples
from benchmarks.opinfo_cases import Status
from benchmarks.opinfo_samples import DTYPES, VARIANTS
from benchmarks.report import Table, argument_parser, publish

ROOT = Path(__file__).parents[1]
_NAMES = {str(d).removeprefix("torch."): d for d in DTYPES}


def _serve(num_devices: int) -> None:
    """A worker: reads tasks from stdin, one JSON object a line, and answers each with a line of verdicts."""
    spmd.config.cache_dir = None
    if num_devices:
        spmd.simulate(num_devices)
    if num_devices > 1:
        spmd.use_spmd()
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",)) if num_devices > 1 else None
    torch.set_num_threads(1)
    ops = {op.formatted_name: op for op in opinfo_samples.entries()}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an operator prints is not an answer
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        verdict = opinfo_cases.examine(
            ops[task["entry"]],
            task["variant"],
            _NAMES[task["dtype"]],
            mesh=mesh,
            limit=task["limit"],
        )
        print(json.dumps(None if verdict is None else asdict(verdict)), file=answers, flush=True)


class _Worker:
    """One worker process, started anew when it crashes or takes too long."""

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
        """The verdict as a dictionary; an error verdict when the process dies or is too slow."""
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
    """All verdicts, in the order of the tasks. A bar counts the tasks.

    Each verdict is appended to the journal when it is known, so that a run that is interrupted can go on with `resume`.
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
                lines.write(
                    json.dumps([task, found[i]]) + "\n"
                )  # one call, which the interpreter's lock keeps whole
                lines.flush()
                bar.update()

        threads = [threading.Thread(target=work) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [verdict for i in sorted(found) if (verdict := found[i]) is not None]


def summary(verdicts: list[dict[str, Any]], *, num_devices: int, limit: int) -> Table:
    """The table by variant and dtype, and what is not right by name."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for v in verdicts:
        counts[v["variant"], v["dtype"]][v["status"]] += 1
        counts[v["variant"], v["dtype"]]["loose"] += v["status"] == Status.PASSED and v["loose"] > 0
    rows = []
    for variant in VARIANTS:
        for dtype in _NAMES:
            c = counts.get((variant, dtype))
            if c is None:
                continue
            applicable = sum(c[s] for s in Status) - c[Status.EXCLUDED]
            share = f"{100 * c[Status.PASSED] / applicable:.1f}%" if applicable else "-"
            rows.append(
                [
                    variant,
                    dtype,
                    str(applicable),
                    *(str(c[s]) for s in Status if s is not Status.EXCLUDED),
                    share,
                    str(c["loose"]),
                    str(c[Status.EXCLUDED]),
                ]
            )
    columns = [
        "variant",
        "dtype",
        "applicable",
        "passed",
        "host fallback",
        "error",
        "wrong",
        "passed %",
        "of these loose",
        "excluded",
    ]
    notes = [
        f"torch {torch.__version__}, {num_devices} device(s)"
        + (
            ", the first tensor of every sample split along its longest dim"
            if num_devices > 1
            else ""
        )
        + (f"; at most {limit} samples of an entry, evenly spread." if limit else "; all samples."),
        "Excluded: "
        + "; ".join(
            sorted(
                {
                    f"{v['entry']} ({v['detail']})"
                    for v in verdicts
                    if v["status"] == Status.EXCLUDED
                }
            )
        )
        + ".",
    ]
    for status in (Status.WRONG, Status.ERROR, Status.HOST):
        for v in verdicts:
            if v["status"] == status:
                cause = opinfo_cases.KNOWN.get((v["entry"], v["variant"]), ("", ""))[1]
                notes.append(
                    f"**{status}**: {v['entry']}, {v['variant']}, {v['dtype']}: {cause or _cell(v['detail'])}"
                )
    deviations: dict[str, float] = {}
    for v in verdicts:
        if v["loose"]:
            deviations[v["entry"]] = max(deviations.get(v["entry"], 0.0), v["loose"])
    if deviations:
        listed = ", ".join(
            f"{name} {size:.1e}" for name, size in sorted(deviations.items(), key=lambda d: -d[1])
        )
        notes.append(f"Loose (largest deviation, relative above 1): {listed}.")
    return Table(f"torch's operator database on {num_devices} device(s)", columns, rows, notes)


def _not_passed(verdicts: list[dict[str, Any]]) -> list[str]:
    return [
        f"{v['entry']} {v['variant']} {v['dtype']}: {v['status']}: {_cell(v['detail'])}"
        for v in verdicts
        if v["status"] != Status.PASSED
    ]


def _overloads(verdicts: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """For each overload that took part in an entry that passed: the dtypes, and the entries' names."""
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: {"dtypes": set(), "entries": set()})
    for v in verdicts:
        for name in v["lowered"] if v["status"] == Status.PASSED else ():
            seen[name]["dtypes"].add(v["dtype"])
            seen[name]["entries"].add(v["entry"])
    return {
        name: {what: " ".join(sorted(found)) for what, found in seen[name].items()}
        for name in sorted(seen)
    }


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:200]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--ops",
        default="*",
        help="pattern of entries' full names, several separated by commas (default: all)",
    )
    parser.add_argument(
        "--dtypes", default=",".join(_NAMES), help="separated by commas (default: all)"
    )
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), help="separated by commas (default: all)"
    )
    parser.add_argument(
        "--devices", type=int, default=1, help="emulated devices (default 1); 0: the machine's own"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=8,
        help="samples of an entry and dtype at most, evenly spread (default 8; 0: all)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=300,
        help="seconds that one entry and variant may take (default 300)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with a run of the same arguments that was interrupted",
    )
    parser.add_argument(
        "--show", action="store_true", help="print the table and what failed, write nothing"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _serve(args.devices)
        return 0
    variants, dtypes = args.variants.split(","), args.dtypes.split(",")
    unknown = [name for name in (*variants, *dtypes) if name not in (*VARIANTS, *_NAMES)]
    if unknown:
        parser.error(
            f"variants are {', '.join(VARIANTS)} and dtypes are {', '.join(_NAMES)}; got {', '.join(unknown)}"
        )
    chosen = [
        op
        for op in opinfo_samples.entries()
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
        if opinfo_samples.applies(op, variant, _NAMES[dtype])
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
        {"not_passed": _not_passed(verdicts), "overloads": _overloads(verdicts)},
        folder=args.out,
    )
    return 1 if any(v["status"] == Status.WRONG for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
