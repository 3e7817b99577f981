"""Runs the commands of rows, each in a process of its own, and keeps what they give."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.published.remaining import MOST_AT_ONCE, Remaining, earlier, minutes
from benchmarks.published.rows import ROOT, Measured, Row, Store
from benchmarks.published.speed import Probe

LAST_LINES = 12  # of a failed command's output, in the reason
GRACE_S = 10.0  # for a command to end after an interruption
POLL_S = 0.02


def run(rows: Sequence[Row], store: Store) -> None:
    """Runs what the store has not got, with a progress bar and an estimate of the time left.

    Each row's result is kept as soon as it is known. A row that fails is kept with its reason, and
    the others go on. The rounds of each row are spread over the run, so that a change of the
    machine's speed reaches all rows. A row that is timed runs alone.

    Raises:
        KeyboardInterrupt: Ctrl-C; the commands that ran were ended, and all others are kept.
    """
    found = {row: store.of(row) for row in rows}
    left = [(row, n) for row in rows for n in range(len(found[row].runs), row.rounds)]
    waiting, running = deque(sorted(left, key=_order)), list[_Run]()
    with contextlib.ExitStack() as stack:
        is_timed = any(row.is_timed for row, _ in left)
        probe = stack.enter_context(Probe()) if is_timed else None
        total = sum(row.rounds for row in rows)
        progress = stack.enter_context(_Progress(left, total, Remaining(earlier(store.folder))))
        try:
            while waiting or running:
                while waiting and _may_start(waiting[0][0], running):
                    row, number = waiting.popleft()
                    if found[row].status == "failed":  # by an earlier run of the row
                        progress.skips(row)
                        continue
                    running.append(_Run(row, number, store, probe))
                    progress.shows([one.row for one in running])
                ended = [one for one in running if one.has_ended]
                for one in ended:
                    running.remove(one)
                    measured = found[one.row]
                    one.add_to(measured)
                    store.keep(measured)
                    progress.ends(measured, one.row)
                if not ended:
                    time.sleep(POLL_S)
        finally:
            for one in running:
                one.end()


class _Progress:
    """A bar over the runs, a line for each that ends, and the time that the others may take."""

    def __init__(self, left: Sequence[tuple[Row, int]], total: int, remaining: Remaining) -> None:
        self._left = Counter(row for row, _ in left)
        self._remaining = remaining
        # tqdm's own estimate takes all runs for equally long.
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt} runs, {elapsed}{postfix}"
        done = total - len(left)
        self._bar = tqdm(total=total, initial=done, disable=None, bar_format=form)

    def __enter__(self) -> "_Progress":
        if time_left := self._time_left():
            tqdm.write(f"{self._left.total()} runs to do: {time_left}, if nothing else runs here")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def shows(self, running: Sequence[Row]) -> None:
        """Names the rows that run."""
        self._bar.set_description("; ".join(f"{row.figure}: {row.name}" for row in running))

    def skips(self, row: Row) -> None:
        """Counts a run that does not start."""
        self._left[row] -= 1
        self._bar.update()

    def ends(self, measured: Measured, row: Row) -> None:
        """Prints the time of a run, or why it failed."""
        self._left[row] -= 1
        if measured.status == "failed":
            said = f"failed: {measured.reason.splitlines()[-1]}"
        else:
            self._remaining.add(row, measured.runs[-1]["seconds"])
            said = f"{measured.runs[-1]['seconds']:.0f} s"
        time_left = self._time_left()
        self._bar.set_postfix_str(time_left, refresh=False)
        self._bar.update()
        tqdm.write("; ".join(filter(None, (f"{row.figure}, {row.name}: {said}", time_left))))

    def _time_left(self) -> str:
        left = {row: number for row, number in self._left.items() if number}
        return f"about {minutes(self._remaining.seconds(left))} left" if left else ""


def _order(turn: tuple[Row, int]) -> tuple[float, bool, float]:
    row, number = turn
    return (number + 0.5) / row.rounds, not row.is_timed, 0.0 if row.is_timed else -row.weight


def _may_start(row: Row, running: Sequence["_Run"]) -> bool:
    """Whether a row can run beside these."""
    if not running:
        return True
    return len(running) < MOST_AT_ONCE and not any(
        r.is_timed for r in (row, *(o.row for o in running))
    )


class _Run:
    """One run of a row's command, which it starts.

    In a session of its own: Ctrl-C comes to this process alone, which then ends the command and the
    processes that it started.
    """

    def __init__(self, row: Row, number: int, store: Store, probe: Probe | None) -> None:
        self.row = row
        self._probe_s = probe.seconds() if probe and row.is_timed else None
        name = f"{row.figure}/{row.slug}/round-{number + 1}"
        self._folder = store.folder / "runs" / name
        logs = store.folder / "tensorboard" / name
        for old in (self._folder, logs):  # TensorBoard would join two runs in one curve
            shutil.rmtree(old, ignore_errors=True)
        self._folder.mkdir(parents=True)
        places = {"{run}": str(self._folder), "{logs}": str(logs)}
        command = [sys.executable]
        for argument in row.command:
            for key, value in places.items():
                argument = argument.replace(key, value)
            command.append(argument)
        # The programs that rows of this folder share are compiled once.
        env = {**os.environ, "SPMD_CACHE_DIR": str(store.folder / "programs"), **row.env}
        self._started, self._start = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.perf_counter()
        with self._output.open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """Whether the command has ended; does not wait."""
        return self._process.poll() is not None

    def add_to(self, measured: Measured) -> None:
        """Adds the run, which has ended, to what is measured, or the reason why it gave nothing."""
        seconds = time.perf_counter() - self._start
        try:
            if self._process.returncode not in self.row.exit_codes:
                raise ValueError(f"exit code {self._process.returncode}")
            samples = self.row.read(self._folder, seconds)
        except (OSError, ValueError, KeyError, TypeError) as error:
            lines = self._output.read_text(errors="replace").splitlines()
            last = [line for line in lines if line.strip()][-LAST_LINES:]
            told = f"{error} of {' '.join(self.row.command)}; its last lines:"
            measured.reason = "\n".join([told, *last])
            return
        measured.runs.append(
            {
                "started": self._started,
                "seconds": seconds,
                "probe_s": self._probe_s,
                "samples": samples,
            }
        )

    def end(self) -> None:
        """Ends the command and all that it started; waits."""
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def _output(self) -> Path:
        return self._folder / "output.txt"
