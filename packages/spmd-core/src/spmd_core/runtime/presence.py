"""Which processes still answer, and at which line of the program each of them is.

Of a process whose program starts nothing for some seconds, the thread of `runtime.watch` publishes
the line that the main thread is at. So the user sees which sleep, loop or lock keeps the others
waiting. A process that publishes nothing is stopped or dead, or is in a call that holds the GIL.
"""

import json
import sys
import threading
import time
from collections.abc import Hashable
from typing import Any

from spmd_core import source_lines

# How long a process must have started nothing for its line to be published, and how often it is.
_STILL_S, _EVERY_S = 2.0, 2.0


def say(text: str) -> None:
    """Writes a line for the user to stderr."""
    print(f"spmd_core: {text}", file=sys.stderr, flush=True)


class Stillness:
    """Publishes where this process is while it starts nothing.

    Args:
        client: jax's client of the coordination service.
        process: this process.
    """

    def __init__(self, client: Any, process: int) -> None:
        self._client, self._process = client, process
        self._state: Hashable = None
        self._since = self._published = time.monotonic()

    def look(self, state: Hashable) -> None:
        """Notes what the process has started so far."""
        now = time.monotonic()
        if state != self._state:
            self._state, self._since = state, now
        if now - self._since < _STILL_S or now - self._published < _EVERY_S:
            return
        self._published = now
        ident = threading.main_thread().ident
        assert ident is not None
        line = source_lines.line_of_thread(ident)
        self._client.key_value_set(
            f"spmd/still/{self._process}",
            json.dumps([line, round(now - self._since), time.time()]),
            allow_overwrite=True,
        )


def whereabouts(client: Any, process: int) -> str:
    """Where a process that keeps others waiting is, as far as it has published that."""
    found = dict(client.key_value_dir_get("spmd/still/")).get(f"spmd/still/{process}")
    line, still_s, told_at = json.loads(found) if found is not None else ("", 0, 0.0)
    # Clocks of hosts differ by less.
    if time.time() - told_at > 10 * _EVERY_S:
        return (
            f"process {process} does not tell its line: it was killed, is stopped, or in a call "
            "that holds Python's lock"
        )
    return f"process {process} has been at {line} for {still_s} s"


class Ping:
    """Asks the threads of other processes whether they are alive.

    Args:
        client: jax's client of the coordination service.
        process: this process.
        number: of its questions.
    """

    def __init__(self, client: Any, process: int, number: int) -> None:
        self._client = client
        self._folder = f"spmd/pong/{process}/{number}/"
        self.notice = {"pings": self._folder}

    def answered(self) -> set[int]:
        """The processes that have answered."""
        return {
            int(key.rpartition("/")[2]) for key, _ in self._client.key_value_dir_get(self._folder)
        }


def answer_ping(client: Any, process: int, notice: dict[str, Any]) -> None:
    """Answers the `Ping` whose notice this is."""
    client.key_value_set(f"{notice['pings']}{process}", "here", allow_overwrite=True)
