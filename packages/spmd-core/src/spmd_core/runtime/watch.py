"""Checks that all processes start the same programs, and notices how other processes end.

Each process keeps a log for each group of processes that it runs programs with: a hash for each
start of a program, which covers all starts before it. A thread publishes the newest ones through
the store of jax's coordination service, and compares them with those of one neighbour in the group,
so that the cost does not grow with the number of processes. It also reads how processes ended, and
answers questions about the data that this process had (`runtime.agreement`). The devices take no
part. A program that is new to this process is compared before it is compiled; a known one costs its
thread a list entry.

Where processes differ, or one has failed, the thread has the next start of a program raise. If the
program does not come to one, because it waits for a device, the thread prints the error and ends
the process. A process that has started less than its neighbour for some time is named in all of
them (`runtime.presence`), and after `config.process_timeout_s` that is an error, too.
"""

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from spmd_core.config import config
from spmd_core.errors import ProcessError
from spmd_core.runtime import agreement, interrupts, presence, stopping
from spmd_core.runtime.start_log import (
    Start,
    StartLog,
    difference_text,
)

# How long the user's program may take to raise the error itself, and a failed process to publish
# its own.
_GRACE_S = 5.0
_MAX_LINES = 20_000
# How long process 0, which hosts the store, may take to answer before a message says so. jax would
# end this process after the heartbeat's timeout, and name nobody.
_STORE_S = 15.0
_TOGETHER = "all processes of a program end together"


class Watch:
    """The watch of one process over the others.

    Args:
        client: jax's client of the coordination service.
        process: this process's number.
        num_processes: how many there are.
    """

    def __init__(self, client: Any, process: int, num_processes: int) -> None:
        self._client, self._process, self._num_processes = client, process, num_processes
        self._logs: dict[tuple[int, ...], StartLog] = {}
        self._lock = threading.Lock()
        self._error: str | None = None
        self._still = presence.Stillness(client, process)
        self._num_pings = 0
        self._told: set[str] = set()
        self._starters: set[int] = set()  # the threads that start programs
        self._is_raised = threading.Event()
        self._is_over = threading.Event()
        self._has_failed = False
        self._looked_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="spmd-watch", daemon=True)
        self._store_thread = threading.Thread(
            target=self._run_beside, name="spmd-watch-store", daemon=True
        )

    def start(self) -> None:
        """Starts the thread, and tells the others when this process ends."""
        self._thread.start()
        if self._process:
            self._store_thread.start()
        hook = sys.excepthook

        def note_failure(kind: Any, error: BaseException, trace: Any) -> None:
            hook(kind, error, trace)
            if not issubclass(kind, SystemExit):
                is_told = self._error is not None and isinstance(error, ProcessError)
                self._tell({"failed": self._error if is_told else _said_by(error)})
                self._has_failed = True

        sys.excepthook = note_failure
        atexit.register(self.end)

    def note(
        self,
        group: tuple[int, ...],
        what: bytes,
        line: str,
        describe: Callable[[], list[str]],
        *,
        compares: bool,
    ) -> None:
        """Logs the start of a program, which follows.

        Args:
            group: the processes whose devices the program runs on, this one among them.
            what: the program and its scalar inputs, equal in processes that do the same.
            line: the user's.
            describe: see `Start`.
            compares: whether to wait until the neighbour has reached this start, and compare now.

        Raises:
            ProcessError: the processes differ, one has failed, or with `compares` the neighbour
                does not reach this start within `config.process_timeout_s`.
        """
        self._raise_if_over()
        with self._lock:
            self._starters.add(threading.get_ident())
            log = self._logs.get(group)
            if log is None:
                log = self._logs[group] = StartLog(group, self._process)
            start = log.add(what, line, describe)
        if compares:
            self._publish(log)
            self._wait_for_neighbour(log, start)

    def end(self) -> None:
        """Tells the others that this process ends; registered to run at its end."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if not self._has_failed and self._error is None:
            self._tell({"ended": {log.key: log.count for log in self._logs.values()}})
            return
        # jax would wait for the others, which wait for what this process should have started.
        time.sleep(1.0 if self._process else _GRACE_S)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    @interrupts.waits
    def _wait_for_neighbour(self, log: StartLog, start: Start) -> None:
        deadline = time.monotonic() + config.process_timeout_s
        pause_s = 0.0005
        while True:
            published = self._published(log)
            if published is not None and log.first_difference(published) is not None:
                self._compare(log)
            self._raise_if_over()
            if published is not None and published["last"] >= start.number:
                return
            if time.monotonic() > deadline:
                seen = (
                    "has started none"
                    if published is None
                    else f"started number {published['last']} at {published['line']}"
                )
                where = presence.whereabouts(self._client, log.neighbour)
                raise ProcessError(
                    "all processes start the same programs; this one is at number "
                    f"{start.number}, {start.line}, and process {log.neighbour} {seen} and did not "
                    f"come here within {config.process_timeout_s:g} s; {where}. Look at its "
                    "output; raise spmd.config.process_timeout_s if it is only slow."
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)

    def _raise_if_over(self) -> None:
        if self._error is not None:
            self._is_raised.set()
            raise ProcessError(self._error)

    def failure_of_others(self, error: BaseException) -> ProcessError | None:
        """Why a program over the devices of several processes failed, if another one is the cause.

        Waits some seconds for the others to answer.
        """
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        others = {p for group in [*self._logs] for p in group} - {self._process}
        self._num_pings += 1
        ping = presence.Ping(self._client, self._process, self._num_pings)
        deadline = time.monotonic() + _GRACE_S
        silent = others
        try:
            self._client.key_value_set(
                f"spmd/notice/{self._process}", json.dumps(ping.notice), allow_overwrite=True
            )
            while silent and self._error is None and time.monotonic() < deadline:
                time.sleep(0.05)
                silent = others - ping.answered()
            time.sleep(0.0 if silent else 1.0)  # another may be publishing its failure
        except Exception:
            silent = {0}
        if self._error is None and silent:
            names = ", ".join(map(str, sorted(silent)))
            self._stop(
                f"{_TOGETHER}; process {names} does not answer any more: it was killed, or its "
                f"host is gone. Look at its output, and start all again. It was noticed by: {text}"
            )
        return None if self._error is None else ProcessError(self._error)

    def _run(self) -> None:
        while not self._is_over.wait(config.compare_processes_every_s or 1.0):
            try:
                self._look()
            except Exception as error:
                if not self._is_over.is_set():
                    self._stop(
                        f"{_TOGETHER}; process 0, which keeps their common store, does not answer: "
                        f"it was killed, or its host is gone. Look at its output. {error}"
                    )
            if self._error is not None:
                if not self._is_raised.wait(_GRACE_S) and not self._is_over.is_set():
                    print(
                        f"spmd_core.errors.ProcessError: {self._error}", file=sys.stderr, flush=True
                    )
                    os._exit(1)
                return

    def _run_beside(self) -> None:
        """Warns while the other thread waits for the store, as its calls have no time limit."""
        is_told = False
        while not self._is_over.wait(1.0) and self._error is None:
            is_late = time.monotonic() - self._looked_at > min(
                _STORE_S, config.warn_process_after_s
            )
            if is_late and not is_told:
                presence.say(
                    "process 0, which keeps the common store of all processes, does not answer: it "
                    "is stopped, or its host cannot be reached. Look at its output."
                )
            is_told = is_late

    def _look(self) -> None:
        with self._lock:
            logs = list(self._logs.values())
        if config.compare_processes_every_s is not None:
            for log in logs:
                if log.count > log.num_published:
                    self._publish(log)
                self._compare(log)
                self._look_at_lag(log)
        self._still.look(tuple(log.count for log in logs))
        for key, text in self._client.key_value_dir_get("spmd/notice/"):
            self._read(int(key.rpartition("/")[2]), json.loads(text), logs)
        agreement.answer_questions(self._client, self._process)
        self._looked_at = time.monotonic()
        stopping.answer(self._client, self._process, self._num_processes)

    def _look_at_lag(self, log: StartLog) -> None:
        """Warns of a neighbour that has been behind for long, and then gives it up."""
        published = self._published(log)
        last = 0 if published is None else published["last"]
        seconds = log.lag.seconds(last, log.count)
        gives_up = seconds > config.process_timeout_s
        if not gives_up and (log.lag.is_told or seconds < config.warn_process_after_s):
            return
        log.lag.is_told = True
        text = (
            f"process {log.neighbour} has started {last} programs with the others, and process "
            f"{self._process} {log.count}, at {log.starts[-1].line}; "
            f"{presence.whereabouts(self._client, log.neighbour)}. Look at its output"
        )
        if gives_up:
            self._stop(
                f"{_TOGETHER}; the others have waited for {config.process_timeout_s:g} s: {text}; "
                "raise spmd.config.process_timeout_s if it is only slow."
            )
        else:
            self._say_in_all(
                f"{text}. All end if it does not come within spmd.config.process_timeout_s, "
                f"{config.process_timeout_s:g} s."
            )

    def _say_in_all(self, text: str) -> None:
        self._told.add(text)
        presence.say(text)
        self._tell({"says": text})

    def _publish(self, log: StartLog) -> None:
        with self._lock:
            text, log.num_published = log.text(), log.count
        self._client.key_value_set(
            f"spmd/path/{log.key}/{self._process}", text, allow_overwrite=True
        )

    def _published(self, log: StartLog) -> dict[str, Any] | None:
        text = _found(self._client, f"spmd/path/{log.key}/{log.neighbour}")
        return None if text is None else json.loads(text)

    def _compare(self, log: StartLog) -> None:
        published = self._published(log)
        start = None if published is None else log.first_difference(published)
        if start is None:
            return
        with self._lock:
            if self._error is not None:
                return
            self._tell({"asks": [log.neighbour, log.key, start.number]})
            self._describe(log, start.number)
        try:
            said = self._client.blocking_key_value_get(
                f"spmd/said/{log.key}/{start.number}/{log.neighbour}", round(_GRACE_S * 1000)
            )
            theirs = json.loads(said)
        except Exception:
            theirs = {"line": "an unknown line", "lines": []}
        ours = self._said(start)
        self._stop(
            difference_text(
                start.number, (self._process, ours), (log.neighbour, theirs), len(log.group)
            )
        )

    def _said(self, start: Start) -> dict[str, Any]:
        return {
            "line": start.line,
            "lines": start.describe()[:_MAX_LINES],
            "threads": len(self._starters),
        }

    def _describe(self, log: StartLog, number: int) -> None:
        found = next((s for s in log.starts if s.number == number), None)
        if found is not None:
            said = self._said(found)
            self._client.key_value_set(
                f"spmd/said/{log.key}/{number}/{self._process}",
                json.dumps(said),
                allow_overwrite=True,
            )

    def _read(self, process: int, notice: dict[str, Any], logs: list[StartLog]) -> None:
        if process == self._process:
            return
        if "pings" in notice:
            presence.answer_ping(self._client, self._process, notice)
        elif "says" in notice:
            if notice["says"] not in self._told:
                self._told.add(notice["says"])
                presence.say(notice["says"])
        elif "asks" in notice:
            asked, key, number = notice["asks"]
            for log in logs:
                if asked == self._process and log.key == key:
                    self._describe(log, number)
        elif "failed" in notice:
            said = notice["failed"]
            # A process that was told of another one's failure passes it on.
            self._stop(
                said
                if said.startswith(_TOGETHER)
                else f"{_TOGETHER}; process {process} has failed: {said}. Look at its output."
            )
        else:
            for log in logs:
                ended_at = notice["ended"].get(log.key, 0)
                if process in log.group and log.count > ended_at:
                    last = log.starts[-1]
                    self._stop(
                        "all processes start the same programs; "
                        f"process {process} ended after number {ended_at}, and this one went on to "
                        f"number {last.number} at {last.line}. "
                        "Give every process the same number of steps."
                    )

    def _stop(self, text: str) -> None:
        if self._error is None:
            self._error = text
            self._tell({"failed": text})

    def _tell(self, notice: dict[str, Any]) -> None:
        try:
            self._client.key_value_set(
                f"spmd/notice/{self._process}", json.dumps(notice), allow_overwrite=True
            )
        except Exception as error:  # process 0 is gone: jax ends all others then
            print(f"spmd_core: no other process could be told: {error}", file=sys.stderr)


def _said_by(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".rstrip(".: ")
    return text if len(text) < 2000 else f"{text[:2000]}..."


def _found(client: Any, key: str) -> str | None:
    """A value of the store; None if there is none."""
    try:
        found: str = client.key_value_try_get(key)
        return found
    except Exception as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


# The watch of this process; set by `initialize`.
# Guarded by: the GIL; inside, its own lock. Cleared by: never: a process joins once.
watch: Watch | None = None


def note_transfer(what: str, line: str, group: tuple[int, ...]) -> None:
    """Logs that this process and others exchange data outside of a program, in order with programs.

    Raises:
        ProcessError: see `Watch.note`.
    """
    if watch is not None and len(group) > 1 and config.compare_processes_every_s is not None:
        watch.note(group, what.encode(), line, lambda: [what], compares=True)


def failure_of_others(error: BaseException) -> ProcessError | None:
    """The error of a program that failed because another process has failed or is gone.

    Waits some seconds for the others to answer.

    Returns:
        None in one process, and where all others are well.
    """
    return None if watch is None else watch.failure_of_others(error)


def begin(client: Any, process: int, num_processes: int) -> None:
    """Starts the watch of this process, when it has joined the others."""
    global watch
    watch = Watch(client, process, num_processes)
    watch.start()
