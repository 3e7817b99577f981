"""Reads chunks from a disk that `disk.py` has written, each compared with its checksum.

A chunk is read a piece at a time into memory that the next chunk uses again, and the checksum is
of what has just come into the core's cache. tensorstore reads the same, and takes several times as
much of the cores: for futures, and for memory that is new for each read.
"""

import json
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmd_core import dtypes
from spmd_core.checkpoint import disk, index_reading, ocdbt
from spmd_core.checkpoint.arrays import Array
from spmd_core.checkpoint.index_reading import OtherFormError
from spmd_core.checkpoint.staging import Staged

# So much is read, and then compared, at a time. Its checksum holds Python's lock for 0.04 ms.
_PIECE_BYTES = 1 << 20
_MAX_FILES = 64


class DiskArrays:
    """The arrays of a database, as `Arrays` has them.

    Args:
        folder: of the database.

    Raises:
        OtherFormError: tensorstore may read it.
        OSError, ValueError: it is missing or damaged.
    """

    # On few cores, one reads as fast as several, which wait for each other.
    num_threads = max(1, min(4, (os.cpu_count() or 1) // 2))

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = index_reading.index(folder)
        self._arrays: dict[str, Array] = {}
        # Memory that no thread uses. Guarded by the GIL.
        self._free = deque[np.ndarray]()
        # Open files: the system reads ahead in one that is read on. Guarded by the lock.
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._files)

    def open(self, names: Iterable[str]) -> None:
        """See `Arrays`."""

    def array(self, name: str) -> Array:
        """See `Arrays`. Raises OtherFormError for one that only tensorstore may read."""
        if name not in self._arrays:
            text = self._index.get(f"{name}/zarr.json".encode())
            if text is None:
                raise FileNotFoundError(f"{self._folder} has no array {name!r}")
            self._arrays[name] = _array(text)
        return self._arrays[name]

    def chunk(
        self, name: str, number: tuple[int, ...], use: Callable[[np.ndarray], None] | None = None
    ) -> None:
        """See `Arrays`."""
        array = self._arrays[name]
        key = _key(name, number)
        found = self._index.get(key)
        num_bytes = math.prod(array.chunks) * array.dtype.itemsize
        if found is None:
            raise FileNotFoundError(f"{self._folder} has no chunk {key.decode()}")
        length = len(found) if isinstance(found, bytes) else found.length
        if length != num_bytes + ocdbt.CHECKSUM_BYTES:
            raise ValueError(f"{key.decode()} has {length} bytes, and not those of a chunk")
        if isinstance(found, bytes):
            data = np.frombuffer(bytearray(found[:num_bytes]), np.uint8)
            checksum, right = ocdbt.checksum(data), found[num_bytes:]
        else:
            data = self._memory(num_bytes if use is not None else min(num_bytes, _PIECE_BYTES))
            with self._opened(found.file) as file:
                checksum, right = _read(file, found.offset, num_bytes, data)
        if ocdbt.encoded(checksum) != right:
            raise ValueError(f"{key.decode()} is not what its checksum says")
        if use is not None:
            use(data[:num_bytes].view(array.dtype).reshape(array.chunks))
        if not isinstance(found, bytes):
            self._free.append(data)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """A file, which stays open if not too many are."""
        with self._lock:
            file = self._files.get(name)
            stays = file is not None or len(self._files) < _MAX_FILES
            if file is None:
                file = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            if stays:
                self._files[name] = file
        try:
            yield file
        finally:
            if not stays:
                os.close(file)

    def _memory(self, num_bytes: int) -> np.ndarray:
        """At least so many bytes."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(0, np.uint8)
        return memory if len(memory) >= num_bytes else np.empty(num_bytes, np.uint8)


def _key(name: str, number: tuple[int, ...]) -> bytes:
    return "/".join([name, "c", *map(str, number)]).encode()


def _array(text: Any) -> Array:
    """An array by what the database has as its `zarr.json`."""
    if not isinstance(text, bytes):
        raise OtherFormError
    try:
        found = json.loads(text)
        dtype = np.dtype(dtypes.to_jax(getattr(torch, found["data_type"])))
        chunks = tuple(found["chunk_grid"]["configuration"]["chunk_shape"])
        array = Array(tuple(found["shape"]), dtype, chunks)
    except (LookupError, TypeError, AttributeError) as error:
        raise OtherFormError from error
    if found != disk.zarr_metadata(Staged(array.shape, dtype, chunks, [])):
        raise OtherFormError
    return array


def _read(file: int, offset: int, num_bytes: int, memory: np.ndarray) -> tuple[int, bytes]:
    """Reads a chunk; returns its checksum, and what it must be.

    Args:
        file: is open.
        offset: in it, in bytes.
        num_bytes: of the chunk.
        memory: gets it, or has room for a piece, which gets one after the other.
    """
    checksum, end = 0, np.empty(ocdbt.CHECKSUM_BYTES, np.uint8)
    for start in range(0, num_bytes, _PIECE_BYTES):
        at = start if len(memory) >= num_bytes else 0
        piece = memory[at : at + min(_PIECE_BYTES, num_bytes - start)]
        # With the last piece comes the checksum: alone, it may be a page for which the disk waits.
        parts = [piece, end] if start + len(piece) == num_bytes else [piece]
        _read_all(file, offset + start, parts)
        checksum = ocdbt.checksum(piece, checksum)
    return checksum, end.tobytes()


def _read_all(file: int, offset: int, parts: list[np.ndarray]) -> None:
    while parts:
        count = os.preadv(file, [part.data for part in parts], offset)
        if not count:
            raise ValueError("a file ends early")
        offset += count
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = parts[0][count:]


def _close(files: dict[str, int]) -> None:
    while files:
        os.close(files.popitem()[1])
