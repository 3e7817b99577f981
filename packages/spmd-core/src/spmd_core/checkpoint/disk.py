"""Writes blocks of arrays to a disk: zarr 3 in an OCDBT database, a checksum for each chunk.

tensorstore reads the result. It is not what writes it: that takes a core as long as the disk takes,
for copies into the system's cache and slower checksums, while steps on the CPU's devices need the
cores.
"""

import functools
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmd_core import dtypes, files
from spmd_core.checkpoint import ocdbt
from spmd_core.checkpoint.blocks import in_chunks, relative
from spmd_core.checkpoint.direct import DirectFile
from spmd_core.checkpoint.pace import Pace
from spmd_core.checkpoint.staging import Staged
from spmd_core.checkpoint.threads import Threads
from spmd_core.runtime import buffers

NUM_FILES = 4
"""So many files are written at a time, unless each would have fewer than `_FILE_BYTES`."""

# What reads waits at the beginning of each file: from there on, the system reads ahead.
_FILE_BYTES = 64 << 20
# So much is written at a time, of whole pages. Its checksum holds Python's lock for 0.3 ms.
_PIECE_BYTES = 4 << 20
CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]


@dataclass(frozen=True)
class _Chunk:
    """A chunk of an array.

    Attributes:
        key: in the database.
        data: what the block has of it.
        shape: of the chunk, of which the last one along a dim may have less.
    """

    key: bytes
    data: np.ndarray
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.data.dtype.itemsize


def write(
    arrays: Mapping[str, Staged], folder: Path, threads: Threads, pace: Pace | None = None
) -> None:
    """Writes this process's blocks into a new database; waits until they are on the disk.

    Args:
        arrays: by name; each has blocks.
        folder: of the database; is made, in a folder that is there. Those who rename it must have
            its own name on the disk.
        threads: of which each writes a file.
        pace: at which they write; None: as fast as they can.

    Raises:
        OSError: as the disk reports it.
    """
    if not arrays:
        return
    (folder / "d").mkdir(parents=True)
    entries: list[ocdbt.Entry] = [
        (f"{name}/zarr.json".encode(), json.dumps(zarr_metadata(array)).encode())
        for name, array in arrays.items()
    ]
    for found in _in_threads(folder, _parts([*_chunks(arrays)]), threads, pace):
        entries += found
    write_index(entries, folder)


def write_index(entries: list[ocdbt.Entry], folder: Path) -> None:
    """Makes a database of what lies in files of its folder, or of folders in it.

    Args:
        entries: where.
        folder: of the database; has a folder `d`.

    Raises:
        OSError: as the disk reports it.
    """
    nodes, manifest = ocdbt.index(entries, "d/nodes")
    for name, content in {"d/nodes": nodes, "manifest.ocdbt": manifest}.items():
        with (folder / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    files.sync_folder(folder / "d")
    files.sync_folder(folder)


def zarr_metadata(array: Staged) -> dict[str, Any]:
    """What zarr 3 has of an array as `zarr.json`."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.chunks)}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": _fill_value(dtypes.to_torch(array.dtype)),
        "codecs": CODECS,
    }


def _fill_value(dtype: torch.dtype) -> Any:
    """Zero as zarr 3 writes it; no chunk is missing, so nothing has it but what no one reads."""
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return [0.0, 0.0]
    return 0.0 if dtype.is_floating_point else 0


def _chunks(arrays: Mapping[str, Staged]) -> Iterator[_Chunk]:
    for name, array in arrays.items():
        for index, block in array.blocks:
            if 0 in block.shape:
                continue
            for part in in_chunks(index, array.chunks):
                numbers = (s.start // size for s, size in zip(part, array.chunks))
                key = "/".join([name, "c", *map(str, numbers)]).encode()
                yield _Chunk(key, block[relative(part, index)], array.chunks)


def _parts(chunks: Sequence[_Chunk]) -> list[list[_Chunk]]:
    """The chunks of each file, of about as many bytes each."""
    num_bytes = sum(chunk.num_bytes for chunk in chunks)
    num = min(NUM_FILES, max(1, num_bytes // _FILE_BYTES))
    parts: list[list[_Chunk]] = [[] for _ in range(num)]
    before = 0
    for chunk in chunks:
        parts[min(num - 1, before * num // max(1, num_bytes))].append(chunk)
        before += chunk.num_bytes
    return parts


def _in_threads(
    folder: Path, parts: Sequence[Sequence[_Chunk]], threads: Threads, pace: Pace | None
) -> list[list[ocdbt.Entry]]:
    """Writes a file of each part at the same time; returns what lies where in each."""
    errors: list[BaseException] = []
    return threads.all(
        functools.partial(_write_file, folder, f"d/{number}", part, errors, pace)
        for number, part in enumerate(parts)
    )


def _write_file(
    folder: Path,
    name: str,
    chunks: Sequence[_Chunk],
    errors: list[BaseException],
    pace: Pace | None,
) -> list[ocdbt.Entry]:
    """Writes a file; returns what lies where.

    Ends early when there are errors, to which it adds its own: all files are of one save.
    """
    try:
        with closing(DirectFile(folder / name)) as file:
            return _appended(file, name, chunks, errors, pace)
    except BaseException as error:
        errors.append(error)
        raise


def _appended(
    file: DirectFile,
    name: str,
    chunks: Sequence[_Chunk],
    errors: Sequence[BaseException],
    pace: Pace | None,
) -> list[ocdbt.Entry]:
    """Writes what a file of this name has; returns what lies where."""
    entries: list[ocdbt.Entry] = []
    before = time.thread_time()
    for chunk in chunks:
        data = _contiguous(chunk).reshape(-1).view(np.uint8)
        num_bytes = len(data) + ocdbt.CHECKSUM_BYTES
        is_inline = num_bytes <= ocdbt.MAX_INLINE_BYTES
        checksum, offset = 0, 0
        for start in range(0, len(data), _PIECE_BYTES):
            if errors:
                return entries
            piece = data[start : start + _PIECE_BYTES]
            checksum = ocdbt.checksum(piece, checksum)
            if not is_inline:
                at = file.append(piece)
                offset = offset if start else at
                # All pieces but the last have whole pages, so that the next one lies behind it.
                assert at == offset + start
            if pace is not None:
                now = time.thread_time()
                pace.rest(len(piece), now - before)
                before = now
        end = ocdbt.encoded(checksum)
        if is_inline:
            entries.append((chunk.key, data.tobytes() + end))
        else:
            file.extend(np.frombuffer(end, np.uint8))
            entries.append((chunk.key, ocdbt.Place(name, offset, num_bytes)))
    file.finish()
    return entries


def _contiguous(chunk: _Chunk) -> np.ndarray:
    """The data of all of a chunk: as it lies there, or a copy, with zeros beyond the array."""
    data = chunk.data
    if data.shape == chunk.shape and data.flags.c_contiguous:
        return data
    whole = dtypes.numpy_view(buffers.host_block(chunk.shape, dtypes.to_torch(data.dtype)))
    whole[tuple(slice(n) for n in data.shape)] = data
    return whole
