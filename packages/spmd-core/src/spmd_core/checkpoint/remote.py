"""Folders in a store of objects, by tensorstore's drivers: gs://, s3://, and memory:// for tests.

A store of objects has no locks that end with a process, and no rename of a folder. So a step is
whole when an object of its own is there, which is written last; and a run that begins takes the
folder over: the one before it is told at its next save.
"""

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spmd_core.errors import CheckpointError

NEEDED = (
    "checkpoints are written with the packages tensorstore and google-crc32c; got {}. "
    "Run: pip install 'spmd-core[checkpoint]'"
)
"""The error's text, without its cause, where one of the packages is missing."""

try:
    import google_crc32c  # noqa: F401 - ocdbt.py has it
    import tensorstore as ts
except ImportError as missing:
    raise ImportError(NEEDED.format(missing)) from missing

SCHEMES = ("gs://", "s3://", "memory://")
WHOLE = "_CHECKPOINT_METADATA"
"""What a whole step has, by Orbax's name. It is written last."""

CONTEXT = ts.Context()
"""Has what memory:// holds."""

_LOCK = ".lock"


class RemotePath:
    """A path in a store of objects, with those of pathlib's methods that checkpoints need.

    Args:
        url: its address.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.url.rpartition("/")[0])

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    def is_file(self) -> bool:
        return self._read().state == "value"

    def is_dir(self) -> bool:
        return bool(_result(self._inside().list))

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator["RemotePath"]:
        names = {key.decode().partition("/")[0] for key in _result(self._inside().list)}
        return (self / name for name in sorted(names))

    def read_text(self, encoding: str = "utf-8") -> str:
        found = self._read()
        if found.state != "value":
            raise FileNotFoundError(f"there is no {self}")
        text: str = found.value.decode(encoding)
        return text

    def write_text(self, text: str) -> None:
        _result(lambda: self.parent._inside().write(self.name, text.encode()))

    def unlink(self) -> None:
        _result(lambda: self.parent._inside().write(self.name, None))

    def rmtree(self) -> None:
        """Removes all that is inside."""
        _result(lambda: self._inside().delete_range(ts.KvStore.KeyRange()))

    def _inside(self) -> Any:
        return _result(lambda: ts.KvStore.open(f"{self.url}/", context=CONTEXT))

    def _read(self) -> Any:
        return _result(lambda: self.parent._inside().read(self.name))


Folder = Path | RemotePath


def url(folder: Folder) -> str:
    """The address of a folder, for tensorstore."""
    return folder.url if isinstance(folder, RemotePath) else f"file://{folder.as_posix()}"


def folder_at(folder: str | os.PathLike[str]) -> Folder:
    """A local or shared folder, or an address.

    Raises:
        CheckpointError: it is an address of another kind.
    """
    text = os.fspath(folder)
    if "://" not in text:
        return Path(text).expanduser().resolve()
    if not text.startswith(SCHEMES):
        raise CheckpointError(
            "checkpoints lie in a local or shared folder, or at an address that begins with "
            f"{' or '.join(SCHEMES[:2])}; got {text!r}. Pass one of these."
        )
    return RemotePath(text)


def _result(call: Callable[[], Any]) -> Any:
    """What tensorstore's future of a call gives."""
    try:
        return call().result()
    except ValueError as error:  # as it reports what the store refuses
        raise OSError(None, str(error)) from error


class RemoteLock:
    """The right to write into a folder, until another run takes it.

    Args:
        folder: where.
    """

    def __init__(self, folder: RemotePath) -> None:
        self._path = folder / _LOCK
        here = {"host": socket.gethostname(), "process": os.getpid()}
        self._mine = json.dumps({**here, "token": secrets.token_hex(8)})
        self._path.write_text(self._mine)

    def check(self) -> None:
        """Raises CheckpointError if another run has taken it."""
        there = self._path.read_text() if self._path.is_file() else ""
        if there != self._mine:
            raise CheckpointError(
                f"one run at a time writes into a folder of checkpoints; {self._path.parent} was "
                f"taken over by another: {there or 'which has ended'}. End one of the two, or name "
                "another folder."
            )

    def release(self) -> None:
        """Gives the right up."""
        if self._path.is_file() and self._path.read_text() == self._mine:
            self._path.unlink()


def remove_leftovers(folder: RemotePath) -> None:
    """Removes steps that are not whole."""
    for path in folder.iterdir():
        if path.name.isdecimal() and not (path / WHOLE).is_file():
            path.rmtree()


def remove_step(path: RemotePath) -> None:
    """Removes a step: after a kill at any moment, it is whole or a leftover."""
    (path / WHOLE).unlink()
    path.rmtree()
