"""Writes new files past the system's cache of files, from the memory in which the data lies.

A write through the cache copies the data on a core that a step may need, takes memory that the
program may need, and writes the whole of it to the disk at the end. A direct one needs memory,
offsets and lengths that are multiples of a page, so small data, and what a page's end cuts off,
goes through a buffer.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_PAGE_BYTES = 4096
_BUFFER_BYTES = 1 << 20
# From this size on, data is written from where it lies, from the next page of the file on.
_LARGE_BYTES = 128 << 10
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it


class DirectFile:
    """A new file, which grows at its end. Of one thread.

    A file system that has no direct writes gets the same bytes through the system's cache.

    Args:
        path: there is nothing.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o666)
        self._is_direct = bool(_DIRECT) and self._set_direct(_DIRECT)
        # Of the system's own pages, which begin where direct writes need it.
        self._buffer = np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8)
        self._filled = 0  # so much of it is to be written
        self._written = 0  # so much of the file is

    def append(self, data: np.ndarray) -> int:
        """Adds bytes; may wait for the disk.

        Args:
            data: contiguous, of dtype uint8 and of one dim. Nothing may change it until this
                returns, and no longer.

        Returns:
            The offset at which it begins: not always where the bytes before it end.

        Raises:
            OSError: as the disk reports it.
        """
        is_large = len(data) >= _LARGE_BYTES and data.ctypes.data % _PAGE_BYTES == 0
        if not is_large:
            start = self._written + self._filled
            self.extend(data)
            return start
        pages = self._padded()
        start = self._written + len(pages)
        whole = len(data) - len(data) % _PAGE_BYTES
        self._put([pages, data[:whole]])
        self.extend(data[whole:])
        return start

    def extend(self, data: np.ndarray) -> None:
        """Adds bytes where those before them end; otherwise as `append`."""
        while len(data):
            part = data[: _BUFFER_BYTES - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == _BUFFER_BYTES:
                self._put([self._padded()])

    def finish(self) -> None:
        """Waits until all is on the disk. Its size is then a multiple of a page."""
        self._put([self._padded()])
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file, also one that is not finished."""
        os.close(self._file)

    def _padded(self) -> np.ndarray:
        """What is in the buffer, with zeros up to the end of its last page; the buffer is empty."""
        end = -(-self._filled // _PAGE_BYTES) * _PAGE_BYTES
        self._buffer[self._filled : end] = 0
        self._filled = 0
        return self._buffer[:end]

    def _put(self, parts: Sequence[np.ndarray]) -> None:
        """Writes whole pages at the end of the file."""
        left = [part for part in parts if len(part)]
        while left:
            try:
                count = os.pwritev(self._file, [part.data for part in left], self._written)
            except OSError as error:
                # A file system may take the flag and refuse such writes, of larger pages or at all.
                if error.errno != errno.EINVAL or not self._is_direct or not self._set_direct(0):
                    raise
                self._is_direct = False
                continue
            if count % _PAGE_BYTES and self._is_direct:  # the disk is almost full
                self._set_direct(0)
                self._is_direct = False
            self._written += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]

    def _set_direct(self, flag: int) -> bool:
        """Has writes go past the cache, or with 0 through it; whether the file system can that."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~_DIRECT
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | flag)
        except OSError:
            return False
        return True
