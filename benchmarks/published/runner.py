"""Runs rows, one command at a time and each in a process of its own, and keeps what they give."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.published.rows import ROOT, Measured, Row, Store

LAST_LINES = 12  # of a failed command's output, in the reason
GRACE_S = 10.0  # for a command to end after an interruption


def run(rows: Sequence[Row], store: Store) -> None:
    """Runs what the store has not got, with a progress bar.

    Each row's result is kept as soon as it is known. A row that fails is kept with its reason, and
    the others go on. Rows of a figure take turns, so that a change of the machine's speed reaches
    all of them.

    Raises:
        KeyboardInterrupt: Ctrl-C; the command that ran was ended, and all others are kept.
    """
    found = {row: store.of(row) for row in rows}
    left = [(row, n) for row in rows for n in range(len(found[row].runs), row.rounds)]
    turns = sorted(left, key=lambda turn: (figures(rows).index(turn[0].figure), turn[1]))
    total = sum(row.rounds for row in rows)
    with tqdm(total=total, initial=total - len(left), unit="run", disable=None) as bar:
        for row, number in turns:
            measured = found[row]
            if measured.status != "failed":  # by an earlier run of the row
                bar.set_description(f"{row.figure}: {row.name}")
                _run(row, measured, number, store)
                store.keep(measured)
                said = f"{measured.runs[-1]['seconds']:.0f} s" if measured.runs else ""
                if measured.status == "failed":
                    said = f"failed: {measured.reason.splitlines()[-1]}"
                tqdm.write(f"{row.figure}, {row.name}: {said}")
            bar.update()


def figures(rows: Sequence[Row]) -> list[str]:
    """The figures of the rows, in their order."""
    return list(dict.fromkeys(row.figure for row in rows))


def _run(row: Row, measured: Measured, number: int, store: Store) -> None:
    """Adds one run to what is measured, or the reason why there is none."""
    name = f"{row.figure}/{row.slug}/round-{number + 1}"
    folder = store.folder / "runs" / name
    logs = store.folder / "tensorboard" / name
    for old in (folder, logs):  # TensorBoard would join two runs in one curve
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)
    places = {"{run}": str(folder), "{logs}": str(logs)}
    command = [sys.executable]
    for argument in row.command:
        for key, value in places.items():
            argument = argument.replace(key, value)
        command.append(argument)
    # The programs that rows of this folder share are compiled once.
    env = {**os.environ, "SPMD_CACHE_DIR": str(store.folder / "programs"), **row.env}
    started, start = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.perf_counter()
    code = _child(command, env, folder / "output.txt")
    seconds = time.perf_counter() - start
    try:
        if code not in row.exit_codes:
            raise ValueError(f"exit code {code}")
        samples = row.read(folder, seconds)
    except (OSError, ValueError, KeyError, TypeError) as error:
        lines = (folder / "output.txt").read_text(errors="replace").splitlines()
        last = [line for line in lines if line.strip()][-LAST_LINES:]
        measured.reason = "\n".join([f"{error} of {' '.join(row.command)}; its last lines:", *last])
        return
    measured.runs.append({"started": started, "seconds": seconds, "samples": samples})


def _child(command: Sequence[str], env: Mapping[str, str], output: Path) -> int:
    """The exit code of a command, whose output goes to a file.

    In a session of its own: Ctrl-C comes to this process alone, which then ends the command and the
    processes that it started.
    """
    with output.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise
