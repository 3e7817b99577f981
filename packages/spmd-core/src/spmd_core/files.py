"""Writes files atomically and durably: under a temporary name first, with one writer for each."""

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# The errors of file systems that lack an operation.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.ENOLCK}


class Unfinished:
    """A new file beside the one that it replaces once it is complete.

    Its name is unique among the writers of all hosts. It is locked while this object is open, so
    that another writer can tell it from a leftover of a killed process, which it removes.

    Args:
        target: the file's final name, in an existing folder; a link is followed.

    Attributes:
        path: of the new file, which is empty: write to it by this name.
        target: as above, without links.

    Raises:
        OSError: the target is no regular file, or its folder is missing or cannot be written.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        with _explained(target):
            resolved = Path(target).expanduser().resolve()
            _require_folder(resolved)
            self.target = _regular(resolved)
            _remove_leftovers(self.target)
            while True:
                name = f"{_stem(self.target)}.{secrets.token_hex(8)}.part"
                self.path = self.target.with_name(name)
                self._file = os.open(self.path, _NEW, 0o666)
                if _is_locked(self._file) is not False and self.path.exists():
                    break
                # A writer that looked for leftovers at this moment has removed it.
                os.close(self._file)

    def sync(self) -> None:
        """Waits until the content is on the disk."""
        os.fsync(self._file)

    def put_in_place(self) -> None:
        """Gives the file its name, and the permissions of the file that it replaces.

        The content must be on the disk before (`sync`); the name is on the disk when `sync_folder`
        returns.
        """
        with suppress(FileNotFoundError):
            os.fchmod(self._file, stat.S_IMODE(self.target.stat().st_mode))
        self.path.replace(self.target)
        self._close()

    def discard(self) -> None:
        """Removes the file, unless it is in place."""
        if self._file >= 0:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)


@contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, the system's refusal of a path becomes a sentence, in an error of its type."""
    rule = "a file is written under a name that the system accepts, in a folder that it may change"
    try:
        yield
    except ValueError as error:  # such as a null character
        raise ValueError(f"{rule}; got {os.fspath(path)!r}: {error}. Correct the path.") from error
    except OSError as error:
        if error.errno is None:  # one of the sentences below
            raise
        text = f"{rule}; got {os.fspath(path)!r}: {error.strerror}. Name another path."
        raise OSError(error.errno, text) from error


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields the name of a new file, which replaces `path` when the block ends.

    At any moment, also after a kill or a loss of power, `path` is the earlier file, or the new one
    with all that was written. An error in the block removes the new file.

    Args:
        path: a file that may exist, in a folder that exists.

    Raises:
        OSError: `path` is no regular file, or the file cannot be written; the earlier one stays.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(f"{folder}/figures.txt") as scratch:
        ...         _ = scratch.write_text("1 2 3")
        ...     os.listdir(folder)
        ['figures.txt']
    """
    unfinished = Unfinished(path)
    try:
        yield unfinished.path
        unfinished.sync()
        unfinished.put_in_place()
    except BaseException:
        unfinished.discard()
        raise
    sync_folder(unfinished.target.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file's content by a text in UTF-8, atomically.

    Raises:
        OSError: see `replacing`.
    """
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Checks that a file could be written; creates its folder, and leaves nothing else.

    Raises:
        OSError: it could not, with the cause.
    """
    Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
    unfinished = Unfinished(path)
    try:
        os.write(unfinished._file, b"\0")
        unfinished.sync()
    finally:
        unfinished.discard()


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Inside, no other writer of this folder is inside, in any process that sees its locks."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(opened)


def _regular(path: Path) -> Path:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return path
    if not stat.S_ISREG(mode):
        kinds = {
            stat.S_ISDIR: "a folder",
            stat.S_ISCHR: "a device",
            stat.S_ISBLK: "a device",
            stat.S_ISFIFO: "a pipe",
            stat.S_ISSOCK: "a socket",
        }
        kind = next((kind for test, kind in kinds.items() if test(mode)), "something else")
        raise OSError(
            f"a file is written under a name that is free or a regular file's; {path} is {kind}. "
            "Name a file."
        )
    return path


def _require_folder(path: Path) -> None:
    if not path.parent.is_dir():
        kind = NotADirectoryError if path.parent.exists() else FileNotFoundError
        got = "is a file" if path.parent.exists() else "does not exist"
        raise kind(
            f"a file is written into a folder that exists; got {path}, where {path.parent} {got}. "
            "Make the folder, or correct the path."
        )


def _stem(target: Path) -> str:
    return target.name[:200]  # names may have 255 bytes


def _is_locked(file: int) -> bool | None:
    """Locks an open file; False if another process has locked it, None if no file can be locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_leftovers(target: Path) -> None:
    """Removes unfinished files of this target whose writers are gone."""
    pattern = re.compile(re.escape(_stem(target)) + r"\.[0-9a-f]{16}\.part")
    for name in os.listdir(target.parent):
        if not pattern.fullmatch(name):
            continue
        with suppress(OSError):  # another writer removes it, or it is another user's
            file = os.open(target.parent / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _is_locked(file):
                    (target.parent / name).unlink()
            finally:
                os.close(file)
