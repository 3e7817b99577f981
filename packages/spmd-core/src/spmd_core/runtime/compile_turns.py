"""Has one process of a host compile a program that several need; the others read it from the disk.

Processes that find no entry in the same folder of compiled programs lock a file beside it. Who gets
the lock compiles. The others wait until it is free again, and look for the entry once more; if
there is none, as the compilation failed or its program cannot be stored, they compile, all at once.
The kernel frees the lock of a process that ends, however it ends.

Hosts do not wait for each other, even if they share the folder: each has processors of its own.
"""

import functools
import hashlib
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spmd_core import counters
from spmd_core.runtime import interrupts

fcntl: Any = None  # where it is missing, which is not a POSIX system, nobody waits
with suppress(ImportError):
    fcntl = importlib.import_module("fcntl")
SUFFIX = ".lock"
_MOST_S = 1800.0  # a wait that is longer ends: the program is compiled twice
_FIRST_PAUSE_S, _MOST_PAUSE_S, _LOOK_S = 0.01, 0.2, 1.0


class Turn:
    """One compilation of this process.

    Args:
        stores: whether it stores what it compiles. Others would wait in vain for one that does not.

    Attributes:
        key: the key of the entry that this process is to write; None if it need not write one.
    """

    def __init__(self, *, stores: bool) -> None:
        self.key: str | None = None
        self._stores = stores
        self._held: list[tuple[int, Path]] = []

    def after_miss(self, folder: Path, key: str, read: Callable[[], bytes | None]) -> bytes | None:
        """What another process compiled meanwhile; None if this one is to compile.

        Args:
            folder: the folder of compiled programs.
            key: the key that it has no entry for.
            read: looks for the entry again.
        """
        if fcntl is None:
            return None
        path = folder / f"{key[-64:]}.{_host()}{SUFFIX}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:  # a folder that is only read, for instance
            return None
        is_held = False
        try:
            is_held = self._stores and _lock(descriptor, fcntl.LOCK_EX)
            if is_held:
                os.utime(descriptor)  # a leftover of a process that was killed may be old
                os.pwrite(descriptor, f"{os.getpid():<20}".encode(), 0)
            else:
                _wait(descriptor)
            # Who had the lock may have written it just before this process got it.
            found = read()
            if found is not None:
                counters.count("programs_of_other_processes")
            elif is_held:
                self.key = key
                self._held.append((descriptor, path))
            return found
        except OSError:  # a file system without locks
            return None
        finally:
            if not self._held or self._held[-1][0] != descriptor:
                _free(descriptor, path if is_held else None)

    def is_written(self, key: str) -> None:
        """Notes that an entry was written."""
        if key == self.key:
            self.key = None

    def end(self) -> None:
        """Has the others go on."""
        while self._held:
            _free(*self._held.pop())


class _Thread(threading.local):
    """The turn of a thread; None if what it compiles is nothing to wait for."""

    turn: Turn | None = None


# Guarded by: thread-local storage. Cleared by: the end of the compilation.
this_thread = _Thread()


@contextmanager
def taken(*, stores: bool) -> Iterator[Turn]:
    """Around a compilation: if another process of this host compiles the same, this one waits.

    Args:
        stores: see `Turn`.
    """
    before = this_thread.turn
    turn = this_thread.turn = Turn(stores=stores)
    try:
        yield turn
    finally:
        this_thread.turn = before
        turn.end()


@interrupts.waits
def _wait(descriptor: int) -> None:
    """Waits until nobody holds the lock alone."""
    end = time.monotonic() + _MOST_S
    pause_s, looks_at = _FIRST_PAUSE_S, time.monotonic() + _LOOK_S
    while not _lock(descriptor, fcntl.LOCK_SH) and time.monotonic() < end:
        if time.monotonic() > looks_at:
            looks_at = time.monotonic() + _LOOK_S
            if not _goes_on(os.pread(descriptor, 20, 0)):
                return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def _lock(descriptor: int, how: int) -> bool:
    """Whether the lock was free to take."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free(descriptor: int, path: Path | None) -> None:
    """Gives the lock back; with a path, removes the file first."""
    if path is not None:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    # Explicitly: a process that was forked meanwhile has the descriptor, too.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _goes_on(owner: bytes) -> bool:
    """Whether the process that holds the lock runs.

    It may be stopped (Ctrl-Z), or have ended while a process that it had forked keeps the lock.
    """
    if not owner.strip().isdigit() or not Path("/proc/self/stat").exists():
        return True
    try:
        about = Path(f"/proc/{int(owner)}/stat").read_text()
    except OSError:
        return False
    state = about.rpartition(")")[2].split()[0]
    return state not in "TtZXx"


@functools.cache
def _host() -> str:
    """A name of this host, as long as it runs."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = socket.gethostname()
    return hashlib.sha256(text.encode()).hexdigest()[:8]
