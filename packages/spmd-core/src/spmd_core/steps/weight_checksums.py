"""Checksums in safetensors files: of the header and of each piece of the data, in the metadata.

The format allows texts in its header. Files without the text of this module have no checksums, and
are read unchecked.
"""

import os
import re
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spmd_core.errors import DataError

NAME = "spmd.crc32"  # of the text in the metadata
# A second text in each file with checksums: it reveals a damaged name of the first one.
WITNESS = {"spmd.has": "crc32"}
PIECE_BYTES = 1 << 22  # a block of a tensor is checked by the pieces that it touches
_MAX_THREADS = 8  # that read pieces
_READ_BYTES = 1 << 18  # at a time: data in a core's cache is summed twice as fast
_DIGITS = 8  # of a CRC-32, in hexadecimal


def placeholder(num_bytes: int) -> str:
    """A text of the length of the checksums of a file with `num_bytes` bytes of data."""
    return "0" * (_DIGITS * (1 + _num_pieces(num_bytes)))


def _num_pieces(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_BYTES)


class Sums:
    """The checksums of data that arrives in parts."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._current, self._free = 0, PIECE_BYTES

    def add(self, data: memoryview) -> None:
        """Adds the next bytes of the data."""
        while len(data):
            part, data = data[: self._free], data[self._free :]
            self._current = zlib.crc32(part, self._current)
            self._free -= len(part)
            if not self._free:
                self._done.append(self._current)
                self._current, self._free = 0, PIECE_BYTES

    def text(self, header: bytes) -> str:
        """The checksums of the header, which contains the placeholder, and of each piece."""
        rest = [self._current] if self._free < PIECE_BYTES else []
        return "".join(f"{n:08x}" for n in (zlib.crc32(header), *self._done, *rest))


def found(path: Path, header: bytes, metadata: Mapping[str, str]) -> "Checked | None":
    """The checksums of a file; None if it has none.

    Args:
        path: the file.
        header: its header, as it is in the file.
        metadata: the texts in the header.

    Raises:
        DataError: the header is damaged.
    """
    if NAME in metadata:
        return Checked(path, header, metadata[NAME])
    if WITNESS.keys() & metadata.keys():
        raise _damage(path, "its checksums")
    return None


def _damage(path: Path, what: str) -> DataError:
    return DataError(
        "weights are read from files that are as they were written; "
        f"{str(path)!r} is damaged: {what} differ from the checksum that it carries. "
        "Copy or download it again, or load an earlier save."
    )


class Checked:
    """The checksums in a file; raises DataError if the bytes differ.

    Args:
        path: the file.
        header: its header, as it is in the file.
        text: its text under `NAME`.

    Raises:
        DataError: the header is damaged.
    """

    def __init__(self, path: Path, header: bytes, text: str) -> None:
        self._path, self._begin = path, 8 + len(header)
        self._num_bytes = path.stat().st_size - self._begin
        blank = placeholder(self._num_bytes)
        place = header.find(f'"{NAME}":"{text}"'.encode())
        if not re.fullmatch("[0-9a-f]+", text) or len(text) != len(blank) or place < 0:
            raise _damage(self._path, "its checksums")
        place += len(NAME) + 4
        original = header[:place] + blank.encode() + header[place + len(text) :]
        sums = [int(text[i : i + _DIGITS], 16) for i in range(0, len(text), _DIGITS)]
        if zlib.crc32(original) != sums[0]:
            raise _damage(self._path, "its header")
        self._sums = sums[1:]
        self._right: set[int] = set()  # pieces that were read and are right

    def check(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Reads the pieces that ranges of the file touch, each once.

        Args:
            ranges: pairs of the first byte and the one after the last, from the beginning of the
                file.

        Raises:
            DataError: a piece is damaged.
        """
        wanted: set[int] = set()
        for first, end in ranges:
            if first < end:
                first, end = first - self._begin, end - self._begin
                wanted.update(range(first // PIECE_BYTES, _num_pieces(end)))
        numbers = sorted(wanted - self._right)
        with (
            self._path.open("rb", buffering=0) as file,
            ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads,
        ):
            found = threads.map(lambda number: self._piece_sum(file.fileno(), number), numbers)
            for number, crc in zip(numbers, found):
                if crc != self._sums[number]:
                    start = self._begin + number * PIECE_BYTES
                    end = min(start + PIECE_BYTES, self._begin + self._num_bytes)
                    raise _damage(self._path, f"bytes {start:,} to {end - 1:,}")
        self._right.update(numbers)

    def _piece_sum(self, file: int, number: int) -> int:
        place, end = number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, self._num_bytes)
        crc = 0
        while part := os.pread(file, min(_READ_BYTES, end - place), self._begin + place):
            crc = zlib.crc32(part, crc)
            place += len(part)
        return crc
