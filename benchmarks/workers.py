"""Runs many tasks in worker processes that may crash or hang, with a journal to resume from."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
Task = dict[str, Any]


def serve(answer: Callable[[Task], Any]) -> None:
    """A worker process: reads tasks from stdin, a JSON object per line, and prints the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an operator that prints to stdout must not look like an answer
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


class _Worker:
    """One worker process, which is restarted when it crashes or takes too long."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self._command, self._timeout_s = command, timeout_s
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._listener = threading.Thread(
            target=self._listen, args=(self._process, self._answers), daemon=True
        )
        self._listener.start()
        if self._answers.get() is None:
            raise RuntimeError(
                f"the worker did not start; run it by hand to see why: {' '.join(self._command)}"
            )

    @staticmethod
    def _listen(process: subprocess.Popen[str], answers: "queue.Queue[str | None]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                answers.put(line)
        answers.put(None)

    def ask(self, task: Task, lost: Callable[[Task, str], Any]) -> Any:
        """The answer; `lost(task, reason)` if the process dies or is too slow."""
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
        self.stop()
        self._start()
        return lost(task, what)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join()
        assert self._process.stdin is not None
        self._process.stdin.close()


def run(
    tasks: list[Task],
    command: Sequence[str],
    *,
    lost: Callable[[Task, str], Any],
    jobs: int,
    timeout_s: float,
    journal: Path,
    resume: bool,
    what: str,
    again: Callable[[Any], bool] = lambda answer: False,
) -> list[Any]:
    """All answers, in the order of the tasks. A progress bar counts the tasks.

    Each answer is appended to the journal as soon as it is known, so that `resume` continues an
    interrupted run.

    Args:
        tasks: JSON objects.
        command: starts a worker process, which calls `serve`.
        lost: the answer to a task whose worker died or was too slow, given what happened.
        jobs: worker processes.
        timeout_s: limit for one task.
        journal: the file; its folder is made.
        resume: whether answers that the journal has are taken from it.
        what: a label for the progress bar.
        again: whether a task with that answer in the journal runs again.
    """
    found: dict[int, Any] = {}
    if resume and journal.exists():
        known = {
            json.dumps(task): answer
            for task, answer in map(json.loads, journal.read_text().splitlines())
        }
        found = {
            i: known[json.dumps(task)]
            for i, task in enumerate(tasks)
            if json.dumps(task) in known and not again(known[json.dumps(task)])
        }
    waiting: queue.Queue[tuple[int, Task]] = queue.Queue()
    for i, task in enumerate(tasks):
        if i not in found:
            waiting.put((i, task))
    journal.parent.mkdir(parents=True, exist_ok=True)
    with (
        journal.open("a" if resume else "w") as lines,
        tqdm(total=len(tasks), initial=len(found), desc=what, disable=None) as bar,
    ):

        def work() -> None:
            worker = _Worker(command, timeout_s)
            while True:
                try:
                    i, task = waiting.get_nowait()
                except queue.Empty:
                    worker.stop()
                    return
                found[i] = worker.ask(task, lost)
                # A single call, which the interpreter's lock makes atomic.
                lines.write(json.dumps([task, found[i]]) + "\n")
                lines.flush()
                bar.update()

        threads = [threading.Thread(target=work) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [found[i] for i in sorted(found)]
