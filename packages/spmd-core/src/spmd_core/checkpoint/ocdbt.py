"""Encodes the index of a database of tensorstore's format OCDBT, whose values lie in files already.

tensorstore writes values by itself through the system's cache of files, and takes no reference to
what another has written. The format is that of its documentation, "OCDBT storage format": a
manifest names the root of a B+tree; a node is a block of a file, with columns for the entries'
keys, lengths, files and offsets. All of it is written once, as one version, and not compressed.
"""

import itertools
import secrets
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import google_crc32c
import numpy as np

MAX_INLINE_BYTES = 1024
"""Values up to this size lie in the nodes."""

CHECKSUM_BYTES = 4
"""Of the checksum behind each value and each node."""

MANIFEST, NODE = b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"
"""What manifests and nodes begin with."""

# Nodes are at most of about this size; the database says the double, which those who change it use.
_NODE_BYTES = 500_000
# Of a reader's memory for an entry, beside its key and its value.
_ENTRY_BYTES = 64
_NO_COMPRESSION, _SINGLE, _ARITY_LOG2 = 0, 0, 4

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Place:
    """Where a value lies.

    Attributes:
        file: its path in the database's folder.
        offset, length: in bytes.
    """

    file: str
    offset: int
    length: int


Entry = tuple[bytes, bytes | Place]
"""A key, and its value or where that lies."""


@dataclass(frozen=True)
class _Child:
    """A node that is encoded.

    Attributes:
        first: its first key.
        place: where it will lie.
        num_keys, num_tree_bytes, num_value_bytes: of the keys below it, of it and the nodes below
            it, and of the values outside of nodes.
    """

    first: bytes
    place: Place
    num_keys: int
    num_tree_bytes: int
    num_value_bytes: int


def index(entries: Iterable[Entry], file: str) -> tuple[bytes, bytes]:
    """The nodes and the manifest of a database.

    Args:
        entries: at least one; each key once.
        file: the path in the database's folder that the nodes will have.

    Returns:
        What that file has, and what `manifest.ocdbt` has.
    """
    nodes = bytearray()
    ordered, height = sorted(entries), 0
    sizes = [len(key) + len(v if isinstance(v, bytes) else b"") for key, v in ordered]
    leaves = _split(ordered, [size + _ENTRY_BYTES for size in sizes])
    level = [_leaf(leaf, file, nodes) for leaf in leaves]
    while len(level) > 1:
        height += 1
        parts = _split(level, [len(child.first) + _ENTRY_BYTES for child in level])
        level = [_interior(part, height, file, nodes) for part in parts]
    return bytes(nodes), _manifest(level[0], height)


def _split(items: Sequence[_Item], sizes: Iterable[int]) -> list[list[_Item]]:
    """In parts of at most `_NODE_BYTES`, or of two items. Sizes: of the items, in bytes."""
    parts: list[list[_Item]] = [[]]
    num_bytes = 0
    for item, size in zip(items, sizes):
        if len(parts[-1]) > 1 and num_bytes + size > _NODE_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(item)
        num_bytes += size
    return parts


def _leaf(entries: Sequence[Entry], file: str, nodes: bytearray) -> _Child:
    places = [value for _, value in entries if isinstance(value, Place)]
    inline = [value for _, value in entries if isinstance(value, bytes)]
    table, ids = _files(place.file for place in places)
    body = b"".join(
        [
            table,
            _keys([key for key, _ in entries]),
            _varints(len(v) if isinstance(v, bytes) else v.length for _, v in entries),
            bytes(isinstance(value, Place) for _, value in entries),
            _varints(ids[place.file] for place in places),
            _varints(place.offset for place in places),
            *inline,
        ]
    )
    num_bytes = sum(place.length for place in places)
    return _appended(entries[0][0], 0, body, file, nodes, (len(entries), 0, num_bytes))


def _interior(children: Sequence[_Child], height: int, file: str, nodes: bytearray) -> _Child:
    table, ids = _files(child.place.file for child in children)
    body = b"".join(
        [
            table,
            # Keys of children are whole: no part of them stands here alone.
            _keys([child.first for child in children], [0] * len(children)),
            _varints(ids[child.place.file] for child in children),
            _varints(child.place.offset for child in children),
            _varints(child.place.length for child in children),
            _varints(child.num_keys for child in children),
            _varints(child.num_tree_bytes for child in children),
            _varints(child.num_value_bytes for child in children),
        ]
    )
    below = (
        sum(child.num_keys for child in children),
        sum(child.num_tree_bytes for child in children),
        sum(child.num_value_bytes for child in children),
    )
    return _appended(children[0].first, height, body, file, nodes, below)


def _appended(
    first: bytes, height: int, body: bytes, file: str, nodes: bytearray, below: tuple[int, int, int]
) -> _Child:
    """Adds a node to those before it; `below`: as `_Child` has it, without the node itself."""
    node = _with_checksum(NODE, bytes([height]) + body)
    place = Place(file, len(nodes), len(node))
    nodes += node
    num_keys, num_tree_bytes, num_value_bytes = below
    return _Child(first, place, num_keys, num_tree_bytes + len(node), num_value_bytes)


def _manifest(root: _Child, height: int) -> bytes:
    table, ids = _files([root.place.file])
    return _with_checksum(
        MANIFEST,
        b"".join(
            [
                secrets.token_bytes(16),  # tells databases apart
                _varints([_SINGLE, MAX_INLINE_BYTES, 2 * _NODE_BYTES]),
                bytes([_ARITY_LOG2]),
                _varints([_NO_COMPRESSION]),
                table,
                _varints([1, 1]),  # one version, number 1
                bytes([height]),
                _varints([ids[root.place.file], root.place.offset, root.place.length]),
                _varints([root.num_keys, root.num_tree_bytes, root.num_value_bytes]),
                struct.pack("<Q", time.time_ns()),
                _varints([0]),  # no nodes of older versions
            ]
        ),
    )


def _with_checksum(magic: bytes, body: bytes) -> bytes:
    version_and_compression = _varints([0, _NO_COMPRESSION])
    start = len(magic) + 8 + len(version_and_compression)
    length = struct.pack("<Q", start + len(body) + CHECKSUM_BYTES)
    block = magic + length + version_and_compression + body
    return block + encoded(checksum(block))


def checksum(data: bytes | np.ndarray, before: int = 0) -> int:
    """crc32c of bytes, or of a contiguous array of them.

    Args:
        data: the bytes.
        before: the checksum of those that come before them.
    """
    found: int = google_crc32c.extend(before, data)
    return found


def encoded(checksum: int) -> bytes:
    """A checksum as it is written behind what it is of."""
    return struct.pack("<I", checksum)


def _files(paths: Iterable[str]) -> tuple[bytes, dict[str, int]]:
    """A table of files, and the number of each in it."""
    ids = {path: number for number, path in enumerate(dict.fromkeys(paths))}
    encoded = [path.encode() for path in ids]
    columns = [
        _varints([len(encoded)]),
        _varints([0] * (len(encoded) - 1)),  # shares nothing with the path before it
        _varints(map(len, encoded)),
        _varints([0] * len(encoded)),  # lies in the database's own folder
    ]
    return b"".join([*columns, *encoded]), ids


def _keys(keys: Sequence[bytes], in_common: Sequence[int] = ()) -> bytes:
    """The number of keys, and the keys, each without what it shares with the one before it."""
    shared = [0, *(_num_shared(a, b) for a, b in itertools.pairwise(keys))]
    suffixes = [key[count:] for key, count in zip(keys, shared)]
    columns = [
        _varints([len(keys)]),
        _varints(shared[1:]),
        _varints(map(len, suffixes)),
        _varints(in_common),
    ]
    return b"".join([*columns, *suffixes])


def _num_shared(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _varints(values: Iterable[int]) -> bytes:
    """Numbers by 7 bits a byte, the lowest first; the highest bit says that more follow."""
    out = bytearray()
    for value in values:
        while value >= 0x80:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)
