"""Does a run that is killed again and again end with the losses of one that nothing disturbed?

    python -m benchmarks.killed_run
        GPT-2's recipe in 2 processes with 4 devices each, one of which is killed ten times
    python -m benchmarks.killed_run --kills 3 --processes 2,1
        fewer kills, and one process after the first of them

`scripts/launch.sh --restarts` starts the recipe, which saves every few steps, and a SIGKILL ends
one of its processes at a random moment: while it starts, in a step, in a save. The table has the
seconds from each kill until another process named the one that was killed, if it did before
`launch.sh` ended it, and until all were started again.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.options import whole
from benchmarks.report import Table, argument_parser, publish

if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.prog = "python -m benchmarks.killed_run"
    parser.add_argument("--kills", type=whole(), default=10, help="how many (default 10)")
    parser.add_argument("--processes", default="2", help="as for launch.sh (default 2)")
    parser.add_argument("--steps", type=whole(), default=60, help="of the run (default 60)")
    parser.add_argument("--save-every", type=whole(), default=3, help="steps (default 3)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the moments")
    args = parser.parse_args()

ROOT = Path(__file__).parents[1]
DEVICES = 8  # at the first start
_STEP = re.compile(r"\[0\] step +(\d+) +loss")
_MOST_S = 600.0


@dataclass(frozen=True)
class Kill:
    """What came of a kill.

    Attributes:
        process: the one that was killed, of `count`.
        step: the last one that the run had logged; 0 before the first.
        told_s: seconds until another process named it; None without another one.
        again_s: seconds until all were started again.
    """

    process: int
    count: int
    step: int
    told_s: float | None
    again_s: float


class Launched:
    """The recipe under `scripts/launch.sh`.

    Args:
        processes, restarts: as for `launch.sh`.
        options: of the recipe.
    """

    def __init__(self, processes: str, restarts: int, options: list[str]) -> None:
        first = int(processes.partition(",")[0])
        command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--processes", processes]
        command += ["--devices-per-process", str(DEVICES // first), "--restarts", str(restarts)]
        command += ["--", sys.executable, "-m", "examples.gpt2.train", "--smoke"]
        command += ["--mesh", "fsdp=*", "--eval-batches", "0", "--log-every", "1", "--no-progress"]
        self.begin_s = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self._popen = subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as said:
            for line in said:
                self.lines.append((time.monotonic(), line.rstrip()))

    def processes(self) -> list[int]:
        """Their numbers in the system."""
        path = Path(f"/proc/{self._popen.pid}/task/{self._popen.pid}/children")
        return [int(word) for word in path.read_text().split()]

    def until(self, pattern: "re.Pattern[str]", *, after: int = 0) -> tuple[float, "re.Match[str]"]:
        """The first line with a pattern, and its time.

        Args:
            pattern: looked for.
            after: how many lines are left out.

        Raises:
            RuntimeError: the run ends without it, or it does not come.
        """
        deadline = time.monotonic() + _MOST_S
        while True:
            has_ended = self._popen.poll() is not None
            for at, line in self.lines[after:]:
                if found := pattern.search(line):
                    return at, found
            if has_ended or time.monotonic() > deadline:
                raise RuntimeError(f"no line with {pattern.pattern!r}:\n{self.text()}")
            time.sleep(0.02)

    def end(self) -> int:
        """Waits for its end; the exit code."""
        code = self._popen.wait(_MOST_S)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        """Ends it, whatever it does."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGINT)
            self._popen.wait(30)

    def text(self) -> str:
        """Its last lines."""
        return "\n".join(line for _, line in self.lines[-40:])


def undisturbed(folder: Path, processes: str, steps: int) -> tuple[list[float], float]:
    """The losses of a run, and how many seconds its steps took."""
    results = folder / "undisturbed.json"
    run = Launched(
        processes.partition(",")[0], 0, ["--steps", str(steps), "--results", str(results)]
    )
    try:
        if run.end():
            raise RuntimeError(f"a run that nothing disturbs must end well:\n{run.text()}")
    finally:
        run.kill()
    times = [at for at, line in run.lines if _STEP.search(line)]
    losses: list[float] = json.loads(results.read_text())["losses"]
    return losses, times[-1] - times[0]


def killed(
    folder: Path,
    processes: str,
    steps: int,
    *,
    save_every: int,
    kills: int,
    loop_s: float,
    seed: int,
) -> tuple[list[Kill], list[float]]:
    """Kills a run so often.

    Returns:
        What came of each kill; and the losses of the last start's steps.

    Raises:
        RuntimeError: it did not come to its end.
    """
    draw, found = random.Random(seed), list[Kill]()
    results = folder / "killed.json"
    options = ["--steps", str(steps), "--results", str(results), "--checkpoint"]
    options += [str(folder / "run"), "--save-every", str(save_every)]
    run = Launched(processes, kills, options)
    try:
        begins = 0  # the lines of earlier starts
        for _ in tqdm(range(kills), desc="kills", disable=None):
            if draw.random() < 0.7:
                run.until(_STEP, after=begins)
                time.sleep(draw.uniform(0, loop_s / 8))
            else:
                time.sleep(draw.uniform(0.1, 12))
            found.append(_kill(run, draw, begins))
            begins = next(i for i, (_, line) in enumerate(run.lines) if f"{len(found)} of" in line)
        code = run.end()
        if code:
            raise RuntimeError(f"the last start must end well; got code {code}:\n{run.text()}")
    finally:
        run.kill()
    losses: list[float] = json.loads(results.read_text())["losses"]
    return found, losses


def _kill(run: Launched, draw: random.Random, begins: int) -> Kill:
    there = run.processes()
    process, before = draw.randrange(len(there)), len(run.lines)
    steps = [m for _, line in run.lines[begins:] if (m := _STEP.search(line))]
    os.kill(there[process], signal.SIGKILL)
    at = time.monotonic()
    again, _ = run.until(re.compile(r"^launch: starting"), after=before)
    # jax calls process 0 the leader.
    name = re.compile(
        rf"^\[(?!{process}\])\d+\].*(process {process}\b|/task:{process}\b"
        + (r"|leader)" if process == 0 else ")")
    )
    told = [when for when, line in run.lines[before:] if name.search(line)]
    return Kill(
        process,
        len(there),
        int(steps[-1][1]) if steps else 0,
        told[0] - at if told else None,
        again - at,
    )


def main(args: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="killed-run-"))
    try:
        expected, loop_s = undisturbed(folder, args.processes, args.steps)
        found, losses = killed(
            folder,
            args.processes,
            args.steps,
            save_every=args.save_every,
            kills=args.kills,
            loop_s=loop_s,
            seed=args.seed,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    apart = max(abs(a - b) for a, b in zip(losses, expected[-len(losses) :], strict=True))
    table = Table(
        f"GPT-2, killed {len(found)} times",
        ("process", "after step", "named by another after", "started again after"),
        [
            [
                f"{kill.process} of {kill.count}",
                str(kill.step) if kill.step else "none yet",
                "-" if kill.told_s is None else f"{kill.told_s:.1f} s",
                f"{kill.again_s:.1f} s",
            ]
            for kill in found
        ],
        [
            "launch.sh names the process at once, and ends the others 10 s later; before that, "
            "those with - had not named it.",
            f"Last loss {losses[-1]!r}; of the undisturbed run {expected[-1]!r}. The last start's "
            f"{len(losses)} losses are within {apart:.1e} of that run's.",
        ],
    )
    result = {"kills": [vars(kill) for kill in found], "last": losses[-1], "apart": apart}
    publish("killed_run", table, result, folder=args.out)
    return 0 if apart <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main(args))
