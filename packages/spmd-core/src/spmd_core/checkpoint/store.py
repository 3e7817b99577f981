"""Reads the arrays of a step by tensorstore, and its JSON; each with its checksum.

Each chunk has a checksum (crc32c), and so has the JSON beside the arrays (sha256); every read
compares them.
"""

import functools
import hashlib
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from spmd_core import dtypes
from spmd_core.checkpoint.blocks import relative
from spmd_core.checkpoint.folder import whole_steps
from spmd_core.checkpoint.remote import CONTEXT, Folder, url
from spmd_core.errors import CheckpointError
from spmd_core.tensor.shards import Part

ARRAYS, STATE = "arrays", "state"
"""The folders of a step: its arrays, and all else as JSON."""

_CHECKSUM = "sha256"  # of the other entries of the JSON
# So much of an array is read at a time, or one chunk.
_READ_BYTES = 16 << 20


def with_checksum(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of a state as JSON, whose checksum `Reader.state` compares."""
    return {**state, _CHECKSUM: _checksum(state)}


def _checksum(state: Mapping[str, Any]) -> str:
    """Of a state, before and after it was written as JSON."""
    as_read = json.loads(json.dumps(state))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


class Reader:
    """The arrays of one step.

    Attributes:
        folder: of the step.
    """

    def __init__(self, step: Folder) -> None:
        self.folder = step
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
                # Enough for a disk's bandwidth; each thread keeps memory for what it reads.
                "file_io_concurrency": {"limit": 4},
            },
            CONTEXT,
        )
        self._open: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """What was saved beside the arrays, as JSON.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        path = self.folder / STATE / "metadata"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise damaged(self.folder, f"{path}: {error}") from error
        if not isinstance(found, dict) or found.pop(_CHECKSUM, None) != _checksum(found):
            raise damaged(self.folder, f"{path} is not what its checksum says")
        return found

    def array(self, name: str) -> Any:
        """An array, as tensorstore's.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        if name not in self._open:
            self.open([name])
        try:
            return self._open[name].result()
        except (ValueError, OSError) as error:
            raise damaged(self.folder, f"{name}: {error}") from error

    def open(self, names: Iterable[str]) -> None:
        """Begins to look for arrays, so that `array` need not wait for one after another."""
        for name in {*names} - self._open.keys():
            database = {
                "driver": "ocdbt",
                "base": f"{url(self.folder / ARRAYS)}/",
                "path": f"{name}/",
                "cache_pool": "cache_pool#ocdbt",
            }
            spec = {
                "driver": "zarr3",
                "kvstore": database,
                "fill_missing_data_reads": False,
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
            }
            self._open[name] = ts.open(spec, read=True, context=self._context)

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """A block of an array.

        Raises:
            CheckpointError: a chunk is missing, or its checksum is not that of its data.
        """
        array = self.array(name)
        try:
            found: np.ndarray = array[tuple(index)].read().result()
        except (ValueError, OSError) as error:
            raise damaged(self.folder, f"{name}: {error}") from error
        return found

    def fill(self, name: str, parts: Sequence[Part]) -> None:
        """Reads blocks of an array into memory; each chunk that they need once.

        Args:
            name: of the array.
            parts: for each block its slices and a CPU tensor of that shape, of this or another
                dtype, which gets it.

        Raises:
            CheckpointError: see `read`; some of the blocks have their values.
        """
        array, reading = self.array(name), _Reading(self.folder, name)
        dtype = dtypes.to_torch(array.dtype.numpy_dtype)
        for needed in _by_chunk(array, parts):
            index, into = needed[0]
            if len(needed) == 1 and into.dtype == dtype:
                memory = ts.array(dtypes.numpy_view(into))
                reading.add(memory.write(array[index]), into.nbytes)
                continue
            hull = tuple(
                slice(min(s.start for s in of), max(s.stop for s in of))
                for of in zip(*(index for index, _ in needed))
            )
            size = math.prod(s.stop - s.start for s in hull) * dtype.itemsize
            reading.add(array[hull].read(), size, functools.partial(_spread, needed, hull))
        reading.finish()

    def check(self, name: str, parts: Sequence[Part]) -> None:
        """Reads blocks of an array, and keeps nothing of them.

        Args:
            name: of the array.
            parts: as `fill` has them; on device meta.

        Raises:
            CheckpointError: see `read`.
        """
        array, reading = self.array(name), _Reading(self.folder, name)
        size = math.prod(_grid(array)) * array.dtype.numpy_dtype.itemsize
        for (index, _), *_ in _by_chunk(array, parts):
            # For one element, all of its chunk is read and compared with its checksum.
            reading.add(array[tuple(s.start for s in index)].read(), size)
        reading.finish()


class _Reading:
    """Reads of an array that are under way: so many bytes of them at a time.

    Args:
        step, name: of the array.
    """

    def __init__(self, step: Folder, name: str) -> None:
        self._step, self._name = step, name
        self._begun = deque[tuple[Any, int, Callable[[np.ndarray], None] | None]]()
        self._bytes = 0

    def add(
        self, begun: Any, num_bytes: int, use: Callable[[np.ndarray], None] | None = None
    ) -> None:
        """Another one.

        Args:
            begun: tensorstore's future.
            num_bytes: that it takes.
            use: gets its result.
        """
        self._begun.append((begun, num_bytes, use))
        self._bytes += num_bytes
        while self._bytes > _READ_BYTES and len(self._begun) > 1:
            self._finish_one()

    def finish(self) -> None:
        """Waits for all."""
        while self._begun:
            self._finish_one()

    def _finish_one(self) -> None:
        begun, num_bytes, use = self._begun.popleft()
        try:
            result = begun.result()
        except (ValueError, OSError) as error:
            raise damaged(self._step, f"{self._name}: {error}") from error
        self._bytes -= num_bytes
        if use is not None:
            use(result)


def _grid(array: Any) -> tuple[int, ...]:
    """The shape of an array's chunks."""
    return tuple(array.chunk_layout.read_chunk.shape or ())


def _by_chunk(array: Any, parts: Sequence[Part]) -> list[list[Part]]:
    """The parts of blocks in each chunk of an array, in the chunks' order."""
    grid = _grid(array)
    found: dict[tuple[int, ...], list[Part]] = {}
    for index, into in parts:
        numbers = (range(s.start // n, -(-s.stop // n)) for s, n in zip(index, grid))
        for number in itertools.product(*numbers):
            inside = tuple(
                slice(max(s.start, i * n), min(s.stop, (i + 1) * n))
                for s, i, n in zip(index, number, grid)
            )
            if all(s.start < s.stop for s in inside):
                found.setdefault(number, []).append((inside, into[relative(inside, index)]))
    return [found[number] for number in sorted(found)]


def _spread(parts: Sequence[Part], index: tuple[slice, ...], block: np.ndarray) -> None:
    """Copies a block, which lies at `index`, into its parts."""
    for inside, into in parts:
        part = block[relative(inside, index)]
        if dtypes.to_torch(part.dtype) == into.dtype:
            # By numpy: torch's copy spreads over threads, which wait for those that read.
            np.copyto(dtypes.numpy_view(into), part)
        else:
            into.copy_(dtypes.tensor_view(part))


def damaged(step: Folder, why: str) -> CheckpointError:
    """The error for a step that cannot be read."""
    why, _, _ = why.partition(" [tensorstore_spec=")
    why, _, _ = why.partition(" [source locations=")
    before = [number for number in whole_steps(step.parent) if number < int(step.name)]
    advice = (
        f"Restore the step before: manager.restore(state, step={before[-1]})"
        if before
        else "There is no step before it: restore a later one, or begin anew"
    )
    return CheckpointError(
        f"a checkpoint is read as it was written, and each chunk has its checksum; step "
        f"{step.name} in {step.parent} cannot be read: {' '.join(why.split())}. {advice}."
    )
