"""Reads the index of a database that `ocdbt.py` encoded: what lies where.

Only that form of the format OCDBT: one version, nothing compressed, no prefixes of subtrees. The
checksum of each node is compared. tensorstore reads other forms.
"""

import struct
from pathlib import Path

import numpy as np

from spmd_core.checkpoint import ocdbt
from spmd_core.checkpoint.ocdbt import Place

MANIFEST_FILE = "manifest.ocdbt"


class OtherFormError(Exception):
    """What is there has another form than this package's own."""


def index(folder: Path) -> dict[bytes, bytes | Place]:
    """What a database has: by key the value, or where it lies.

    Raises:
        OtherFormError: the database may be right, but has another form.
        ValueError: a checksum is another, or something is missing.
        OSError: a file cannot be read.
    """
    block = _Block((folder / MANIFEST_FILE).read_bytes(), ocdbt.MANIFEST, MANIFEST_FILE)
    block.skip(16)
    block.require(0)  # the kind of manifest: of one file
    block.numbers(2)
    block.skip(1)
    block.require(0)  # of new nodes: not compressed
    files = block.files()
    block.require(1)  # one version
    block.numbers(1)
    height = block.byte()
    (file,), (offset,), (length,) = block.numbers(1), block.numbers(1), block.numbers(1)
    block.numbers(3)
    block.skip(8)
    block.require(0)  # no nodes of older versions
    found: dict[bytes, bytes | Place] = {}
    contents: dict[str, bytes] = {}
    level = [Place(files[file], offset, length)]
    for left in range(height, -1, -1):
        below: list[Place] = []
        for place in level:
            if place.file not in contents:
                contents[place.file] = (folder / place.file).read_bytes()
            node = contents[place.file][place.offset : place.offset + place.length]
            below += _node(_Block(node, ocdbt.NODE, place.file), left, found)
        level = below
    return found


def _node(block: "_Block", height: int, found: dict[bytes, bytes | Place]) -> list[Place]:
    """Adds what a leaf has; returns where the nodes below another one lie."""
    if block.byte() != height:
        raise ValueError(f"{block.name} has a node of another height than the one above it says")
    files = block.files()
    keys = block.keys(is_leaf=height == 0)
    if height:
        of, offsets, lengths = (block.numbers(len(keys)) for _ in range(3))
        return [Place(files[i], start, size) for i, start, size in zip(of, offsets, lengths)]
    lengths, kinds = block.numbers(len(keys)), block.take(len(keys))
    num_places = sum(kinds)
    places = iter([*zip(block.numbers(num_places), block.numbers(num_places))])
    for key, length, kind in zip(keys, lengths, kinds):
        if kind:
            file, offset = next(places)
            found[key] = Place(files[file], offset, length)
        else:
            found[key] = block.take(length)
    return []


class _Block:
    """A manifest or a node, from its beginning on.

    Args:
        data: its bytes.
        magic: what it begins with.
        name: of its file, for messages.
    """

    def __init__(self, data: bytes, magic: bytes, name: str) -> None:
        body = data[: -ocdbt.CHECKSUM_BYTES]
        if (
            data[:4] != magic
            or data[4:12] != struct.pack("<Q", len(data))
            or ocdbt.encoded(ocdbt.checksum(body)) != data[len(body) :]
        ):
            raise ValueError(f"{name} is not what its checksum says")
        self.name, self._data, self._at = name, body, 12
        self.require(0)  # the version of the format
        self.require(0)  # not compressed

    def skip(self, count: int) -> None:
        """Leaves bytes out."""
        self._at += count

    def take(self, count: int) -> bytes:
        """The next bytes."""
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise ValueError(f"{self.name} ends early")
        self._at += count
        return found

    def byte(self) -> int:
        """The next byte."""
        return self.take(1)[0]

    def require(self, number: int) -> None:
        """Raises OtherFormError if the next number is another."""
        if self.numbers(1) != [number]:
            raise OtherFormError(self.name)

    def numbers(self, count: int) -> list[int]:
        """The next numbers, by 7 bits a byte, the lowest first."""
        if count < 8:  # without numpy, whose calls would take longer
            return [self._number() for _ in range(count)]
        data = np.frombuffer(self._data, np.uint8)[self._at : self._at + 10 * count]
        ends = np.flatnonzero(data < 0x80)[:count]  # the highest bit says that more follow
        if len(ends) < count:
            raise ValueError(f"{self.name} ends early")
        data = data[: ends[-1] + 1]
        self._at += len(data)
        starts = np.concatenate([[0], ends[:-1] + 1])
        place = np.arange(len(data)) - np.repeat(starts, np.diff(starts, append=len(data)))
        bits = (data & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
        found: list[int] = np.add.reduceat(bits, starts).tolist()
        return found

    def _number(self) -> int:
        found = shift = 0
        while (byte := self.byte()) >= 0x80:
            found |= (byte & 0x7F) << shift
            shift += 7
        return found | byte << shift

    def files(self) -> list[str]:
        """A table of files, whose paths are in the database's folder."""
        (count,) = self.numbers(1)
        shared, sizes = self._shared(count)
        if any(self.numbers(count)):  # lie in folders with tables of their own
            raise OtherFormError(self.name)
        return [path.decode() for path in self._joined(shared, sizes)]

    def keys(self, *, is_leaf: bool) -> list[bytes]:
        """The keys of a node."""
        (count,) = self.numbers(1)
        shared, sizes = self._shared(count)
        if not is_leaf and any(self.numbers(count)):  # parts of them stand here alone
            raise OtherFormError(self.name)
        return self._joined(shared, sizes)

    def _shared(self, count: int) -> tuple[list[int], list[int]]:
        """Of texts, how many bytes each shares with the one before it, and has besides."""
        return [0, *self.numbers(count - 1)], self.numbers(count)

    def _joined(self, shared: list[int], sizes: list[int]) -> list[bytes]:
        """Texts, of each of which the beginning is that of the one before it."""
        found, last = [], b""
        for count, size in zip(shared, sizes):
            last = last[:count] + self.take(size)
            found.append(last)
        return found
