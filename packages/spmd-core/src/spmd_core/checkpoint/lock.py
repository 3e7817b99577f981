"""One run at a time writes into a folder of checkpoints; what dead runs left there is removed.

The lock is one of the system's on a file, which ends with the process that has it, however that
ends.
"""

import fcntl
import json
import os
import shutil
import socket
from pathlib import Path

from spmd_core.checkpoint import remote
from spmd_core.checkpoint.remote import Folder, RemotePath
from spmd_core.errors import CheckpointError

LOCK_FILE = ".lock"
# What is added to the name of a step that is being written, as Orbax does; and to the name of one
# that is being removed.
UNFINISHED, REMOVED = ".orbax-checkpoint-tmp", ".removed"


class FolderLock:
    """The right to write into a folder, until `release` or the end of the process.

    Args:
        folder: exists.

    Raises:
        CheckpointError: another live run has it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_FILE
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _said(self._file)
            os.close(self._file)
            raise CheckpointError(
                f"one run at a time writes into a folder of checkpoints; {folder} has another, "
                f"which is alive: {holder}. Wait for its end, or name another folder."
            ) from None
        os.ftruncate(self._file, 0)
        here = {"host": socket.gethostname(), "process": os.getpid()}
        os.pwrite(self._file, json.dumps(here).encode(), 0)

    def release(self) -> None:
        """Gives the right up."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = -1


def _said(file: int) -> str:
    """What the holder of a lock wrote of itself."""
    try:
        found = json.loads(os.pread(file, 4096, 0))
        return f"process {found['process']} on {found['host']}"
    except (ValueError, KeyError, TypeError):  # it is about to write that
        return "a process that has just started"


def remove_leftovers(folder: Folder) -> None:
    """Removes steps that dead runs did not finish to write or to remove. Needs the lock."""
    if isinstance(folder, RemotePath):
        remote.remove_leftovers(folder)
        return
    for path in folder.iterdir():
        if path.is_dir() and (UNFINISHED in path.name or path.name.endswith(REMOVED)):
            shutil.rmtree(path)


def remove_step(path: Folder) -> None:
    """Removes a step: after a kill at any moment, it is whole or a leftover."""
    if isinstance(path, RemotePath):
        remote.remove_step(path)
        return
    target = path.with_name(path.name + REMOVED)
    path.rename(target)
    shutil.rmtree(target)
