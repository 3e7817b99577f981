"""Writes blocks of arrays to a disk: zarr 3 in an OCDBT database, a checksum for each chunk.

tensorstore reads the result, and merges it with those of other processes. It is not what writes it:
that takes a core as long as the disk takes, for copies into the system's cache and slower
checksums, while steps on the CPU's devices need the cores.
"""

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmd_core import dtypes, files
from spmd_core.checkpoint import ocdbt
from spmd_core.checkpoint.blocks import in_chunks, relative
from spmd_core.checkpoint.direct import DirectFile
from spmd_core.checkpoint.staging import Staged
from spmd_core.runtime import buffers

# So many files are written at a time, unless each would have fewer bytes.
_NUM_FILES, _FILE_BYTES = 4, 16 << 20
NICE = 10
"""Of the threads that write: beside a thread of the program, each gets a tenth of a core."""

_CODECS = [
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


def write(arrays: Mapping[str, Staged], folder: Path) -> None:
    """Writes this process's blocks into a new database; waits until they are on the disk.

    Args:
        arrays: by name; each has blocks.
        folder: of the database; is made, in a folder that is there. Those who rename it must have
            its own name on the disk.

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
    for found in _in_threads(folder, _parts([*_chunks(arrays)])):
        entries += found
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
        "codecs": _CODECS,
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
    num = min(_NUM_FILES, max(1, num_bytes // _FILE_BYTES))
    parts: list[list[_Chunk]] = [[] for _ in range(num)]
    before = 0
    for chunk in chunks:
        parts[min(num - 1, before * num // max(1, num_bytes))].append(chunk)
        before += chunk.num_bytes
    return parts


def _in_threads(folder: Path, parts: Sequence[Sequence[_Chunk]]) -> list[list[ocdbt.Entry]]:
    """Writes a file of each part at the same time; returns what lies where in each.

    Not by a pool of `concurrent.futures`, which takes nothing more when the program has ended: its
    last save goes on then.
    """
    found: list[list[ocdbt.Entry]] = [[] for _ in parts]
    errors: list[BaseException] = []

    def run(number: int) -> None:
        _give_way()
        try:
            found[number] = _write_file(folder, f"d/{number}", parts[number], errors)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(number,), name=f"checkpoint-file-{number}")
        for number in range(len(parts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def _write_file(
    folder: Path, name: str, chunks: Sequence[_Chunk], errors: Sequence[BaseException]
) -> list[ocdbt.Entry]:
    """Writes a file; returns what lies where. Ends early when there are errors, of other files."""
    entries: list[ocdbt.Entry] = []
    file = DirectFile(folder / name)
    try:
        for chunk in chunks:
            if errors:
                return entries
            data = _contiguous(chunk).reshape(-1).view(np.uint8)
            checksum = ocdbt.checksum(data)
            num_bytes = len(data) + len(checksum)
            if num_bytes <= ocdbt.MAX_INLINE_BYTES:
                entries.append((chunk.key, data.tobytes() + checksum))
                continue
            offset = file.append(data)
            file.extend(np.frombuffer(checksum, np.uint8))
            entries.append((chunk.key, ocdbt.Place(name, offset, num_bytes)))
        file.finish()
    finally:
        file.close()
    return entries


def _contiguous(chunk: _Chunk) -> np.ndarray:
    """The data of all of a chunk: as it lies there, or a copy, with zeros beyond the array."""
    data = chunk.data
    if data.shape == chunk.shape and data.flags.c_contiguous:
        return data
    whole = dtypes.numpy_view(buffers.host_block(chunk.shape, dtypes.to_torch(data.dtype)))
    whole[tuple(slice(n) for n in data.shape)] = data
    return whole


def _give_way() -> None:
    """Has this thread run where nothing else does: Linux has a priority for each thread."""
    with suppress(OSError, AttributeError):  # the system forbids it, or has none
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
