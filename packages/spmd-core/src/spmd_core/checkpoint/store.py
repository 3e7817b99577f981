"""Reads the arrays of a step, and its JSON; each with its checksum.

Each chunk has a checksum (crc32c), and so has the JSON beside the arrays (sha256); every read
compares them.
"""

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd_core import dtypes
from spmd_core.checkpoint.arrays import Array, Arrays
from spmd_core.checkpoint.blocks import relative
from spmd_core.checkpoint.disk_arrays import DiskArrays
from spmd_core.checkpoint.folder import whole_steps
from spmd_core.checkpoint.index_reading import OtherFormError
from spmd_core.checkpoint.remote import Folder
from spmd_core.checkpoint.tensorstore_arrays import TensorstoreArrays
from spmd_core.checkpoint.threads import Threads
from spmd_core.errors import CheckpointError
from spmd_core.tensor.shards import Part

ARRAYS, STATE = "arrays", "state"
"""The folders of a step: its arrays, and all else as JSON."""

_CHECKSUM = "sha256"  # of the other entries of the JSON
# So much of an array is read at a time, or one chunk: each lies in memory of its own first.
_READ_BYTES = 16 << 20
_NUM_THREADS = max(DiskArrays.num_threads, TensorstoreArrays.num_threads)


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
        self._found: Arrays | None = None
        self._threads = Threads(_NUM_THREADS, "checkpoint-read")

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

    def array(self, name: str) -> Array:
        """An array.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        try:
            try:
                return self._arrays().array(name)
            except OtherFormError:
                self._found = TensorstoreArrays(self.folder / ARRAYS)
                return self._found.array(name)
        except (ValueError, OSError) as error:
            raise damaged(self.folder, f"{name}: {error}") from error

    def _arrays(self) -> Arrays:
        """What this package has written on a disk, it reads; tensorstore reads the rest."""
        if self._found is None:
            folder = self.folder / ARRAYS
            self._found = (
                DiskArrays(folder) if isinstance(folder, Path) else TensorstoreArrays(folder)
            )
        return self._found

    def open(self, names: Iterable[str]) -> None:
        """Begins to look for arrays, so that `array` need not wait for one after another.

        Raises:
            CheckpointError: the arrays of the step are damaged.
        """
        wanted = [*names]
        if wanted:
            self.array(wanted[0])
            self._arrays().open(wanted)

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """A block of an array.

        Raises:
            CheckpointError: a chunk is missing, or its checksum is not that of its data.
        """
        shape = [s.stop - s.start for s in index]
        found = np.empty(shape, self.array(name).dtype)
        self.fill(name, [(tuple(index), dtypes.tensor_view(found))])
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
        calls = []
        for number, start, needed in _by_chunk(self.array(name), parts):
            use = functools.partial(_spread, needed, start)
            calls.append(functools.partial(self._arrays().chunk, name, number, use))
        self._read(name, calls)

    def check(self, name: str, parts: Sequence[Part]) -> None:
        """Reads blocks of an array, and keeps nothing of them.

        Args:
            name: of the array.
            parts: as `fill` has them; on device meta.

        Raises:
            CheckpointError: see `read`.
        """
        numbers = [number for number, *_ in _by_chunk(self.array(name), parts)]
        self._read(name, [functools.partial(self._arrays().chunk, name, i) for i in numbers])

    def _read(self, name: str, calls: Sequence[Callable[[], None]]) -> None:
        """Reads chunks of an array, some at a time."""
        array, most = self.array(name), self._arrays().num_threads
        num_bytes = math.prod(array.chunks) * array.dtype.itemsize
        most = max(1, min(most, _READ_BYTES // max(1, num_bytes)))
        try:
            self._threads.all(calls, most - 1, here=True)
        except (ValueError, OSError) as error:
            raise damaged(self.folder, f"{name}: {error}") from error


def _by_chunk(
    array: Array, parts: Sequence[Part]
) -> list[tuple[tuple[int, ...], tuple[slice, ...], list[Part]]]:
    """For each chunk of an array that blocks need, in order, its number, slices and their parts."""
    found: dict[tuple[int, ...], list[Part]] = {}
    for index, into in parts:
        numbers = (range(s.start // n, -(-s.stop // n)) for s, n in zip(index, array.chunks))
        for number in itertools.product(*numbers):
            inside = tuple(
                slice(max(s.start, i * n), min(s.stop, (i + 1) * n))
                for s, i, n in zip(index, number, array.chunks)
            )
            if all(s.start < s.stop for s in inside):
                found.setdefault(number, []).append((inside, into[relative(inside, index)]))
    return [
        (number, tuple(slice(i * n, (i + 1) * n) for i, n in zip(number, array.chunks)), of)
        for number, of in sorted(found.items(), key=lambda item: item[0])
    ]


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
