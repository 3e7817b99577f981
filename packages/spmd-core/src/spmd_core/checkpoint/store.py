"""Arrays on the disk by Orbax: zarr 3 in OCDBT, one folder for each process, merged at the end.

Orbax's `AsyncCheckpointer` makes the folder of a step under a temporary name, runs the writes
behind the program, has all processes meet, merges their databases, and renames the folder last. How
blocks become chunks is ours (`_BlockHandler`): jax arrays are padded here, and Orbax would write
the padding. Orbax reads what this writes. Each chunk has a checksum (crc32c), and so has the JSON
beside the arrays (sha256); every read compares them.
"""

import asyncio
import functools
import hashlib
import itertools
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd_core import dtypes
from spmd_core.checkpoint.folder import whole_steps
from spmd_core.checkpoint.meetings import Meetings
from spmd_core.checkpoint.remote import CONTEXT, NEEDED, Folder, RemotePath
from spmd_core.checkpoint.staging import Staged
from spmd_core.errors import CheckpointError
from spmd_core.runtime import processes
from spmd_core.tensor.shards import Part

try:
    import orbax.checkpoint as ocp
    import tensorstore as ts
    from orbax.checkpoint import future, options, type_handlers
except ImportError as error:
    raise ImportError(NEEDED.format(error)) from error

# What fails behind the program is raised by `Writer.write`; Orbax would write it to stderr, too.
logging.getLogger("absl").addFilter(
    lambda record: (
        "in background save thread" not in (said := record.getMessage())
        and "_SignalingThread.run() raised" not in said
    )
)

ARRAYS, STATE = "arrays", "state"
"""The folders of a step: its arrays, and all else as JSON."""

_CHECKSUM = "sha256"  # of the other entries of the JSON
# Data files of this size: the values of one are held until it is written.
_FILE_BYTES = 128 << 20
# What may be encoded and not written yet.
_IN_FLIGHT_BYTES = 256 << 20
# So much of an array is read at a time, or one chunk.
_READ_BYTES = 16 << 20
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
            future.CommitFutureAwaitingContractedSignals(
                write_blocks(values, infos), name="spmd_blocks"
            )
        ]

    async def metadata(self, infos: Sequence[Any]) -> Any:
        raise NotImplementedError("Orbax's own handler of arrays reads")

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        raise NotImplementedError("Orbax's own handler of arrays reads")


async def write_blocks(values: Sequence[Staged], infos: Sequence[Any]) -> None:
    """Writes this process's blocks of arrays into its own database.

    Args:
        values: the arrays.
        infos: Orbax's of each: its name, the folder of all, and when that is there.
    """
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

    # What lies in memory:// stays there, and the next save would overwrite it.
    is_done = not _url(folder).startswith("memory://")

    async def write(index: tuple[slice, ...], block: np.ndarray) -> None:
        taken = await budget.take(block.nbytes)
        try:
            await array[index].write(block, can_reference_source_data_indefinitely=is_done)
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
    return folder.url if isinstance(folder, RemotePath) else f"file://{folder.as_posix()}"


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
        self._meetings = Meetings(prefix(folder))
        multiprocessing_options = options.MultiprocessingOptions(
            # Several managers of one program do not meet each other.
            barrier_sync_key_prefix=prefix(folder),
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
            async_options=options.AsyncOptions(barrier_sync_fn=self._meetings.meet),
        )

    def write(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Staged]) -> None:
        """Writes a step, and waits until it is whole on the disk. In every process.

        Raises:
            Exception: what failed in this process.
            CheckpointError: another process failed.
        """
        tree: dict[str, Any] = {}
        for name, array in arrays.items():  # Orbax joins keys by dots: the same name again
            part, _, rest = name.partition(".")
            if rest:
                tree.setdefault(part, {})[rest] = array
            else:
                tree[part] = array
        self._meetings.begin()
        try:
            self._checkpointer.save(
                self._folder / str(step),
                args=ocp.args.Composite(
                    **{
                        ARRAYS: ocp.args.PyTreeSave(tree),
                        STATE: ocp.args.JsonSave(with_checksum(state)),
                    }
                ),
            )
            self._checkpointer.wait_until_finished()
        except BaseException as error:
            self._meetings.fail(error)
            raise

    def close(self) -> None:
        """Ends the threads."""
        self._checkpointer.close()


def with_checksum(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of a state as JSON, whose checksum `Reader.state` compares."""
    return {**state, _CHECKSUM: _checksum(state)}


def _checksum(state: Mapping[str, Any]) -> str:
    """Of a state, before and after it was written as JSON."""
    as_read = json.loads(json.dumps(state))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def prefix(folder: Folder) -> str:
    """A name for what the processes tell each other of a folder."""
    return f"spmd_{folder}".replace("/", "_")


# --- Reading --------------------------------------------------------------------------------------


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
        self._begun = deque[tuple[Any, int, Callable[[Any], None] | None]]()
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
                found.setdefault(number, []).append((inside, into[_relative(inside, index)]))
    return [found[number] for number in sorted(found)]


def _spread(parts: Sequence[Part], index: tuple[slice, ...], block: np.ndarray) -> None:
    """Copies a block, which lies at `index`, into its parts."""
    for inside, into in parts:
        part = block[_relative(inside, index)]
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
