"""A line on the terminal about work that takes long: nothing in a pipe, and nothing left behind.

The line is written to stderr if that is a terminal, some seconds after the work has begun, and
erased at its end. Of work inside of other work, the innermost has the line.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

QUIET_S = 2.0  # shorter work is not shown
_EVERY_S = 1.0
_ERASE = "\r\033[K"

# The works that have a line, the innermost last.
# Guarded by: its own lock. Cleared by: the end of each work.
_works: list["_Work"] = []
_lock = threading.Lock()


class _Work:
    def __init__(self, text: str, total_bytes: int, last: str) -> None:
        self.text, self.total_bytes, self.last = text, total_bytes, last
        self.done_bytes, self.start = 0, time.perf_counter()
        self.has_ended = threading.Event()

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes

    def line(self) -> str:
        done = ""
        if self.total_bytes:
            done = f": {self.done_bytes / 1e9:.1f} of {self.total_bytes / 1e9:.1f} GB"
        rest = f"{done}, {time.perf_counter() - self.start:.0f} s so far{self.last}"
        # A line that wraps is not erased as a whole.
        room = shutil.get_terminal_size().columns - 1 - len(rest)
        text = self.text if len(self.text) <= room else f"{self.text[: max(room - 3, 0)]}..."
        return text + rest


@contextmanager
def shown(
    text: str, *, total_bytes: int = 0, quiet_s: float | None = None, last: Callable[[], str] = str
) -> Iterator[Callable[[int], None]]:
    """Around work that may take long: a line on the terminal, once it has taken some seconds.

    Args:
        text: what is done.
        total_bytes: how many bytes it has to go through; 0: none that are counted.
        quiet_s: the seconds before the line; None: `QUIET_S`.
        last: called before the first line; what it ends with.

    Yields:
        A function that the work calls with the number of bytes that it has gone through.

    Example of the line:
        loading weights: 1.2 of 4.3 GB, 12 s so far
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield _ignore
        return
    work = _Work(text, total_bytes, "")
    with _lock:
        _works.append(work)
    delay = QUIET_S if quiet_s is None else quiet_s
    writer = threading.Thread(
        target=_write, args=(work, delay, last), name="spmd-progress", daemon=True
    )
    writer.start()
    try:
        yield work.advance
    finally:
        work.has_ended.set()
        writer.join()
        with _lock:
            _works.remove(work)


def _ignore(num_bytes: int) -> None:
    """What work outside of a terminal calls."""


def _write(work: _Work, delay: float, last: Callable[[], str]) -> None:
    """Runs in its own thread: updates the line until the work has ended."""
    if work.has_ended.wait(delay):
        return
    work.last = last()
    with suppress(OSError, ValueError):  # the terminal is gone
        while True:
            with _lock:
                if _works[-1] is work:
                    sys.stderr.write(f"{_ERASE}{work.line()}")
                    sys.stderr.flush()
            if work.has_ended.wait(_EVERY_S):
                break
        sys.stderr.write(_ERASE)
        sys.stderr.flush()
