"""Does every process get an error that names the one that died, hung or differed, in a minute?

    python -m benchmarks.process_faults
        two processes on this machine for each fault, with the default times: a quarter of an hour
    python -m benchmarks.process_faults --warn-after 5 --give-up-after 10 sleep "killed 0"
        some of them, sooner

A fault is something that one process does in its tenth step, or a start that cannot work. The table
has the seconds from the fault to the first line in the output of the other process that names the
faulty one, and how the processes ended.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.options import check_names, number

PROGRAM = """
import os, re, signal, sys, threading, time
import torch
import spmd_core as spmd

how, victim, rank, port, warn_s, timeout_s = sys.argv[1], *map(float, sys.argv[2:])
spmd.config.warn_process_after_s, spmd.config.process_timeout_s = warn_s, timeout_s
spmd.simulate(1)
spmd.distributed.initialize(
    f"127.0.0.1:{int(port)}", 2, int(rank), timeout_s=int(timeout_s), heartbeat_timeout_s=30
)
spmd.use_spmd()
spmd.config.record_source_lines = how == "path"
mesh = spmd.Mesh(range(2), (2,), ("x",))
w = spmd.mark_sharding(torch.arange(12.0).reshape(4, 3).to("xla"), mesh, ("x",))
if how == "stop" and rank == victim:
    signal.signal(signal.SIGTERM, lambda number, frame: spmd.distributed.request_stop())


def fault():
    print("the fault begins", file=sys.stderr, flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "exit at once":
        os._exit(3)
    if how == "sleep":
        time.sleep(10_000)
    if how == "busy":
        while True:
            pass
    if how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if how == "holds python":
        re.match("(a+)+b", 60 * "a")
    if how == "exception":
        raise ValueError("no such file")
    if how == "exit":
        sys.exit(3)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGTERM)


for step in range(40):
    loss = (w * w).sum()
    if step == 10 and rank == victim:
        if how == "ends early":
            fault()
            break
        if how == "path":
            loss = loss + w.amax()  # the line that differs
        if how == "read":
            w.cpu()  # the read that differs
        fault()
    w = w * 0.9
    spmd.sync()
    loss.item()
    if how == "stop":
        time.sleep(0.1)  # or all steps would be over at once
    if how == "stop" and spmd.distributed.should_stop():
        print(f"stopped after step {step}", file=sys.stderr)
        break
"""

# What one process does; where the number matters, of each.
FAULTS = (
    *("killed 0", "killed 1", "stopped 0", "stopped 1", "exit at once 1", "sleep 0", "sleep 1"),
    *("busy 1", "lock 1", "holds python 1", "exception 0", "exception 1", "exit 0", "exit 1"),
    *("ends early 0", "ends early 1", "path 1", "read 1"),
)
STARTS = ("port taken", "wrong address", "too few")


@dataclass
class Process:
    """A process and what it has written to stderr.

    Attributes:
        lines: each with the time at which it came.
    """

    popen: "subprocess.Popen[str]"
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code; None if it is still there, and is then killed."""
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        self._reader.join(5)
        return self.popen.returncode

    def kill(self) -> None:
        """Ends it, whatever it does."""
        self.popen.kill()
        self.popen.wait()
        self._reader.join(5)
        assert self.popen.stderr is not None
        self.popen.stderr.close()

    @property
    def errors(self) -> str:
        """All that it has written."""
        return "\n".join(line for _, line in self.lines)

    def first(self, pattern: str) -> float | None:
        """When a line came that matches."""
        return next((at for at, line in self.lines if re.search(pattern, line)), None)


@dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Attributes:
        codes: how the processes ended; None if they had to be killed.
        errors: what they wrote to stderr.
        told_s: seconds from the fault to a line in the other process that names the faulty one;
            None if there is none.
    """

    codes: list[int | None]
    errors: list[str]
    told_s: float | None


def run(
    fault: str, folder: Path, *, warn_after_s: float = 30.0, give_up_after_s: float = 300.0
) -> Outcome:
    """Two processes of which one has a fault.

    Args:
        fault: one of `FAULTS`, or "stop 1", for which both end well; or one of `STARTS`.
        folder: for the script.
        warn_after_s, give_up_after_s: for `config`.
    """
    script = folder / "train.py"
    script.write_text(PROGRAM)
    how, _, number = fault.rpartition(" ")
    is_start = fault in STARTS
    victim = 0 if fault == "port taken" else 1 if is_start else int(number)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    begin = time.monotonic()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        if fault == "port taken":
            taken.listen()
        else:
            taken.close()
        others = {"port taken": [0], "too few": [0]}.get(fault, [0, 1])
        processes = []
        for rank in others:
            words = ["none" if is_start else how, victim, rank]
            words += [
                port + (fault == "wrong address" and rank == 1),
                warn_after_s,
                give_up_after_s,
            ]
            command = [sys.executable, str(script), *map(str, words)]
            processes.append(
                Process(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
            )
        try:
            # Both but a stopped one end by themselves.
            deadline = time.monotonic() + give_up_after_s + 90
            order = [*processes]
            if how == "stopped":
                order.sort(key=lambda p: p is processes[victim])
            codes = {}
            for process in order:
                is_stopped = how == "stopped" and process is processes[victim]
                left_s = 0.0 if is_stopped else max(deadline - time.monotonic(), 0.0)
                codes[id(process)] = process.wait(left_s)
        finally:
            for process in processes:
                process.kill()
    start = begin if is_start else (processes[victim].first("the fault begins") or begin)
    # What names it: its number, its line, or for a start the address.
    numbers = rf"process {victim}\b|^{victim}$|/task:{victim}\b|leader"  # jax calls process 0 so
    name = str(port) if is_start else numbers
    witness = processes[0 if is_start else 1 - victim]
    told = witness.first(name)
    return Outcome(
        [codes[id(process)] for process in processes],
        [process.errors for process in processes],
        None if told is None else told - start,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the faults, and returns 1 if a process was not told of one within a minute."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.process_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--warn-after", type=number(0.1), default=30.0, help="seconds (default: 30)"
    )
    parser.add_argument("--give-up-after", type=number(0.1), default=300.0, help="(default: 300)")
    parser.add_argument("--verbose", action="store_true", help="also shows what processes said")
    parser.add_argument("faults", nargs="*", default=[], help="(default: all)")
    options = parser.parse_args(argv)
    check_names("a fault", options.faults, [*FAULTS, *STARTS])
    folder = Path(os.environ.get("TMPDIR", "/tmp"))
    num_silent = 0
    for fault in options.faults or (*FAULTS, *STARTS):
        found = run(
            fault,
            folder,
            warn_after_s=options.warn_after,
            give_up_after_s=options.give_up_after,
        )
        is_told = found.told_s is not None and found.told_s < 60
        num_silent += not is_told
        told = "never" if found.told_s is None else f"after {found.told_s:.1f} s"
        print(f"{fault:16} told {told:14} exit codes {found.codes}", flush=True)
        if options.verbose or not is_told:
            for rank, errors in enumerate(found.errors):
                print("\n".join(f"    [{rank}] {line[:400]}" for line in errors.splitlines()[-12:]))
    print(f"{num_silent} faults of which a process was not told within a minute")
    return int(num_silent > 0)


if __name__ == "__main__":
    sys.exit(main())
