"""Compares texts between processes on the host, where they must be equal in all.

The texts go through the key-value store of jax's coordination service, which process 0 hosts, and
not over the devices: no program has to run, and a process that does not answer in time is named.
"""

import hashlib
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from spmd_core import releases
from spmd_core.config import config
from spmd_core.errors import ProcessError
from spmd_core.runtime import devices, interrupts, presence

_distributed = releases.jax_module("jax._src.distributed", "global_state")
# How often process 0 has decided on each topic.
# Guarded by: `_lock`. Cleared by: never: all processes count alike.
_count: dict[str, int] = {}
# The series of this process, by name: those in use, and the newest, of which some may have ended
# here and not elsewhere.
# Guarded by: `_lock`. Cleared by: the end of the loop over the data.
_series: "weakref.WeakValueDictionary[str, Series]" = weakref.WeakValueDictionary()
# Guarded by: `_lock`. Cleared by: never: the newest stay.
_newest_series: "deque[Series]" = deque(maxlen=64)
_lock = threading.Lock()
# The longest pauses of a waiting process between two looks at the store: while it waits for the
# result of the first process of its group, and while it is that process.
_LOOK_S = 0.2
_MOST_PAUSE_S = 0.05
# How long a process waits before it asks the threads of the others, and how many of its newest
# texts it keeps to answer such questions.
_ASK_AFTER_S = 1.0
_NUM_KEPT = 256
_QUESTIONS = "spmd/asked/"


def client() -> Any:
    """jax's client of the coordination service; None in a program of one process."""
    return _distributed.global_state.client if devices.num_processes() > 1 else None


@interrupts.waits
def of_process_0(topic: str, text: str) -> str:
    """Process 0's text, in every process. A collective call: all must make it equally often.

    For what is measured, such as a time, before the program depends on it. Waits for process 0.

    Raises:
        ProcessError: process 0 did not come within `config.process_timeout_s`.
    """
    service = client()
    if service is None:
        return text
    with _lock:
        count = _count[topic] = _count.get(topic, 0) + 1
    key = f"spmd/{topic}/{count}"
    if _distributed.global_state.process_id == 0:
        service.key_value_set(key, text)
        return text
    try:
        found: str = service.blocking_key_value_get(key, round(config.process_timeout_s * 1000))
        return found
    except Exception as error:
        raise ProcessError(
            f"process 0 decides on the {topic} for all processes; got nothing from it within "
            f"{config.process_timeout_s:g} s. Look at its output; raise "
            "spmd.config.process_timeout_s if it is only slow."
        ) from error


class Abandoned(Exception):
    """A wait for other processes ended because nobody wants its result any more."""


class Series:
    """A sequence of texts that must be equal in all processes of a group.

    A process compares only a text that is new to it. A process to which its text is not new takes
    no part: its thread of `runtime.watch` answers with the text that it had at that position.

    Args:
        topic: names the series; equal in all processes, and of no other series of the group.
        processes: the group, this process among them.
    """

    def __init__(self, topic: str, processes: Sequence[int]) -> None:
        self._topic, self._group = topic, tuple(processes)
        # The name of a group may be long; keys are not.
        members = hashlib.sha256(repr(self._group).encode()).hexdigest()[:12]
        self._name = f"{topic}/{members}"
        self._newest: dict[int, str] = {}
        self._last: str | None = None
        self.count = 0
        with _lock:
            _series[self._name] = self
            _newest_series.append(self)

    def add(self, text: str) -> None:
        """Notes the next text."""
        self.count += 1
        self._newest[self.count] = text
        self._newest.pop(self.count - _NUM_KEPT, None)

    @interrupts.waits
    def disagreement(self, *, is_wanted: Callable[[], bool] = lambda: True) -> dict[int, str]:
        """Waits for the others, and compares the newest text of each.

        The first process of the group reads the texts of all; the others wait for its result, or
        read all texts themselves.

        Args:
            is_wanted: asked while this waits; another thread may change the answer to False.

        Returns:
            Each process's text, if they differ; else nothing.

        Raises:
            ProcessError: a process did not reach this position within `config.process_timeout_s`.
            Abandoned: `is_wanted` returned False.
        """
        service = client()
        if service is None or len(self._group) < 2:
            return {}
        own = _distributed.global_state.process_id
        folder = f"spmd/{self._name}/{self.count}"
        service.key_value_set(
            f"{folder}/text/{own}", self._newest[self.count], allow_overwrite=True
        )
        question = f"{_QUESTIONS}{own}/{self._name}"
        asks_at = time.monotonic() + _ASK_AFTER_S
        deadline = time.monotonic() + config.process_timeout_s
        warns_at = time.monotonic() + config.warn_process_after_s
        has_asked = False
        pause_s = 0.0005
        try:
            while (texts := self._found(service, folder, own, pause_s)) is None:
                if not is_wanted():
                    raise Abandoned
                if time.monotonic() > deadline:
                    raise self._timeout(service, _texts(service, folder))
                if time.monotonic() > warns_at:
                    warns_at = deadline
                    missing = self._missing(_texts(service, folder))
                    presence.say(f"{self._wait(missing)}; {_whereabouts(service, missing)}")
                if not has_asked and time.monotonic() > asks_at:
                    has_asked = True
                    service.key_value_set(question, str(self.count), allow_overwrite=True)
                pause_s = min(2 * pause_s, _LOOK_S)
        finally:
            if has_asked:
                service.key_value_delete(question)
        return texts if len(set(texts.values())) > 1 else {}

    def _found(self, service: Any, folder: str, own: int, pause_s: float) -> dict[int, str] | None:
        """The texts of all, or {} for equal ones; None, after a pause, if some are missing."""
        if own != self._group[0]:
            try:
                found = service.blocking_key_value_get(
                    f"{folder}/result", 1 + round(1000 * pause_s)
                )
                return {int(process): text for process, text in json.loads(found)}
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        texts = _texts(service, folder)
        if len(texts) == len(self._group):
            if own == self._group[0]:
                different = [*texts.items()] if len(set(texts.values())) > 1 else []
                service.key_value_set(f"{folder}/result", json.dumps(different))
            return texts
        if own == self._group[0]:
            time.sleep(min(pause_s, _MOST_PAUSE_S))
        return None

    def _missing(self, texts: dict[int, str]) -> list[int]:
        return sorted(set(self._group) - set(texts)) or [self._group[0]]

    def _wait(self, missing: list[int]) -> str:
        return (
            f"all processes must agree on the {self._topic} (number {self.count}); got nothing "
            f"from process {', '.join(map(str, missing))}"
        )

    def _timeout(self, service: Any, texts: dict[int, str]) -> ProcessError:
        missing = self._missing(texts)
        return ProcessError(
            f"{self._wait(missing)} within {config.process_timeout_s:g} s: "
            "it failed, or is in another part of the program. "
            f"{_whereabouts(service, missing).capitalize()}. "
            "Look at its output; raise spmd.config.process_timeout_s if it is only slow."
        )

    def close(self, text: str) -> None:
        """Ends the series: this text stands for all later positions."""
        self._last = text

    def text(self, number: int) -> str | None:
        """The text at a position; None if this process has none there yet, or no longer."""
        return self._newest.get(number, self._last if number > self.count else None)


def answer_questions(service: Any, process: int) -> None:
    """Tells processes that wait in `Series.disagreement` what this one had there.

    Args:
        service: jax's client of the coordination service.
        process: this process.
    """
    for key, number in service.key_value_dir_get(_QUESTIONS):
        asks, _, name = key.removeprefix(_QUESTIONS).partition("/")
        with _lock:
            series = _series.get(name)
        text = None if series is None or int(asks) == process else series.text(int(number))
        if text is not None:
            service.key_value_set(
                f"spmd/{name}/{number}/text/{process}", text, allow_overwrite=True
            )


def _whereabouts(service: Any, processes: list[int]) -> str:
    return "; ".join(presence.whereabouts(service, process) for process in processes[:3])


def _texts(service: Any, folder: str) -> dict[int, str]:
    """What has come so far, by process."""
    found = service.key_value_dir_get(f"{folder}/text/")
    return {int(key.rpartition("/")[2]): text for key, text in found}
