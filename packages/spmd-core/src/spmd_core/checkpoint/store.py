"""Arrays on the disk by Orbax: zarr 3 in OCDBT, one folder for each process, merged at the end.

Orbax's `AsyncCheckpointer` makes the folder of a step under a temporary name, runs the writes
behind the program, has all processes meet, merges their databases, and renames the folder last. How
blocks become chunks is ours (`_BlockHandler`): jax arrays are padded here, and Orbax would write
the padding. Orbax reads what this writes. Each chunk has a checksum (crc32c), which every read
compares.
"""

import asyncio
import itertools
import json
import logging
import math
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd_core.checkpoint.folder import whole_steps
from spmd_core.checkpoint.staging import Staged
from spmd_core.errors import CheckpointError
from spmd_core.runtime import processes

try:
    import orbax.checkpoint as ocp
    import tensorstore as ts
    from orbax.checkpoint import future, options, type_handlers
except ImportError as error:
    raise ImportError(
        "checkpoints are written with the packages orbax-checkpoint and tensorstore; got "
        f"{error}. Run: pip install 'spmd-core[checkpoint]'"
    ) from error

# What fails behind the program is raised by `Writer.wait`; Orbax would write it to stderr, too.
logging.getLogger("absl").addFilter(
    lambda record: (
        "in background save thread" not in (said := record.getMessage())
        and "_SignalingThread.run() raised" not in said
    )
)

ARRAYS, STATE = "arrays", "state"
"""The folders of a step: its arrays, and all else as JSON."""

# Data files of this size: the values of one are held until it is written.
_FILE_BYTES = 128 << 20
# What may be encoded and not written yet.
_IN_FLIGHT_BYTES = 256 << 20
# At most so much of an array is read at a time.
_READ_BYTES = 64 << 20
_CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]


class _Budget:
    """Has writers wait while others write too many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._total = self._free = num_bytes
        self._changed = asyncio.Condition()

    async def take(self, num_bytes: int) -> int:
        num_bytes = min(num_bytes, self._total)
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= num_bytes)
            self._free -= num_bytes
        return num_bytes

    async def give(self, num_bytes: int) -> None:
        async with self._changed:
            self._free += num_bytes
            self._changed.notify_all()


class _BlockHandler(type_handlers.TypeHandler):  # type: ignore[misc, unused-ignore]
    """Writes the blocks of arrays, for Orbax."""

    def typestr(self) -> str:
        return "np.ndarray"  # as which Orbax reads them without being told a sharding

    async def serialize(
        self, values: Sequence[Staged], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        del args
        return [
            future.CommitFutureAwaitingContractedSignals(_write(values, infos), name="spmd_blocks")
        ]

    async def metadata(self, infos: Sequence[Any]) -> Any:
        raise NotImplementedError("Orbax's own handler of arrays reads")

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        raise NotImplementedError("Orbax's own handler of arrays reads")


async def _write(values: Sequence[Staged], infos: Sequence[Any]) -> None:
    budget = _Budget(_IN_FLIGHT_BYTES)
    await _all(_write_array(value, info, budget) for value, info in zip(values, infos))


async def _all(writes: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits for all, also where some fail: what goes on would answer a loop that has ended."""
    for result in await asyncio.gather(*writes, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _write_array(value: Staged, info: Any, budget: _Budget) -> None:
    await info.await_path_creation()
    if not value.blocks:
        return  # other processes write it
    folder = info.parent_dir / f"ocdbt.process_{processes.process_index()}"
    database = {
        "driver": "ocdbt",
        "base": f"{_url(folder)}/",
        "path": f"{info.name}/",
        "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 1_000_000},
        "target_data_file_size": _FILE_BYTES,
        "assume_config": True,
    }
    metadata = {
        "shape": list(value.shape),
        "data_type": value.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(value.chunks)}},
        "codecs": _CODECS,
    }
    array = await ts.open(
        {
            "driver": "zarr3",
            "kvstore": database,
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,  # a chunk that is missing is an error
        },
        create=True,
        open=True,
        context=info.ts_context,
    )

    async def write(index: tuple[slice, ...], block: np.ndarray) -> None:
        taken = await budget.take(block.nbytes)
        try:
            await array[index].write(block, can_reference_source_data_indefinitely=True)
        finally:
            await budget.give(taken)

    await _all(
        write(part, block[_relative(part, index)])
        for index, block in value.blocks
        for part in _chunks(index, value.chunks)
    )


def _chunks(index: tuple[slice, ...], chunks: Sequence[int]) -> list[tuple[slice, ...]]:
    """A block in chunks."""
    parts: list[tuple[slice, ...]] = [()]
    for s, size in zip(index, chunks):
        starts = range(s.start, s.stop, size) or [s.start]
        parts = [(*p, slice(a, min(a + size, s.stop))) for p in parts for a in starts]
    return parts


def _relative(part: Sequence[slice], of: Sequence[slice]) -> tuple[slice, ...]:
    return tuple(slice(p.start - s.start, p.stop - s.start) for p, s in zip(part, of))


def _url(folder: Any) -> str:
    return f"file://{folder.as_posix()}"


class Writer:
    """Writes steps behind the program, one at a time. Each of several processes has one.

    Args:
        folder: of all steps.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        registry = type_handlers.create_type_handler_registry(
            (Staged, _BlockHandler()),
            (jax.Array, type_handlers.ArrayHandler()),  # Orbax warns where it is missing
        )
        together = (
            {"active_processes": set(range(processes.process_count()))}
            if processes.process_count() > 1
            else {}
        )
        multiprocessing_options = options.MultiprocessingOptions(
            # Several managers of one program do not meet each other.
            barrier_sync_key_prefix=_prefix(folder),
            **together,
        )
        arrays = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True,
            use_zarr3=True,
            type_handler_registry=registry,
            multiprocessing_options=multiprocessing_options,
        )
        state = ocp.JsonCheckpointHandler(multiprocessing_options=multiprocessing_options)
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                **{ARRAYS: arrays, STATE: state},
                composite_options=ocp.CompositeOptions(
                    multiprocessing_options=multiprocessing_options
                ),
            ),
            multiprocessing_options=multiprocessing_options,
        )

    def start(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Staged]) -> None:
        """Begins to write a step; waits for the one before."""
        tree: dict[str, Any] = {}
        for name, array in arrays.items():  # Orbax joins keys by dots: the same name again
            part, _, rest = name.partition(".")
            if rest:
                tree.setdefault(part, {})[rest] = array
            else:
                tree[part] = array
        self._checkpointer.save(
            self._folder / str(step),
            args=ocp.args.Composite(
                **{
                    ARRAYS: ocp.args.PyTreeSave(tree),
                    STATE: ocp.args.JsonSave(dict(state)),
                }
            ),
        )

    def wait(self) -> None:
        """Waits for the step that is being written; raises what failed there."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Ends the threads."""
        self._checkpointer.close()


def _prefix(folder: Path) -> str:
    return f"spmd_{folder}".replace("/", "_")


# --- Reading --------------------------------------------------------------------------------------


class Reader:
    """The arrays of one step.

    Attributes:
        folder: of the step.
    """

    def __init__(self, step: Path) -> None:
        self.folder = step
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
            }
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
        if not isinstance(found, dict):
            raise damaged(self.folder, f"{path} holds no object")
        return found

    def array(self, name: str) -> Any:
        """An array, as tensorstore's.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        if name not in self._open:
            database = {
                "driver": "ocdbt",
                "base": f"{_url(self.folder / ARRAYS)}/",
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
            try:
                self._open[name] = ts.open(spec, read=True, context=self._context).result()
            except (ValueError, OSError) as error:
                raise damaged(self.folder, f"{name}: {error}") from error
        return self._open[name]

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

    def check(self, name: str, index: Sequence[slice]) -> None:
        """Reads a block of an array, and keeps nothing of it.

        Raises:
            CheckpointError: see `read`.
        """
        if any(s.stop <= s.start for s in index):
            return
        array, reading = self.array(name), deque[Any]()
        try:
            for piece in self.pieces(name, index):
                reading.append(array[tuple(piece)].read())
                if len(reading) > 1:  # one is checked while the next is read
                    reading.popleft().result()
            while reading:
                reading.popleft().result()
        except (ValueError, OSError) as error:
            raise damaged(self.folder, f"{name}: {error}") from error

    def pieces(self, name: str, index: Sequence[slice]) -> list[tuple[slice, ...]]:
        """A block in parts that are read one at a time, along its first dim and whole chunks."""
        array = self.array(name)
        if not index:
            return [()]
        (rows, *others), itemsize = index, array.dtype.numpy_dtype.itemsize
        row_bytes = math.prod(s.stop - s.start for s in others) * itemsize
        chunk = array.chunk_layout.read_chunk.shape[0]
        step = max(1, _READ_BYTES // max(1, row_bytes * chunk)) * chunk
        bounds = [rows.start, *range(rows.start // step * step + step, rows.stop, step), rows.stop]
        return [(slice(a, b), *others) for a, b in itertools.pairwise(bounds)]


def damaged(step: Path, why: str) -> CheckpointError:
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
