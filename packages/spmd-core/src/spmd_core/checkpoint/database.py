"""Writes blocks of arrays as zarr 3 in an OCDBT database, and merges those of several processes.

On a disk, `disk.py` writes them. In a store of objects, tensorstore does: by transactions of many
chunks at a time, as each commit costs several waits; it refers to the blocks and does not copy
them.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from spmd_core.checkpoint import disk, index_reading
from spmd_core.checkpoint.blocks import in_chunks, relative
from spmd_core.checkpoint.ocdbt import Entry, Place
from spmd_core.checkpoint.pace import Pace
from spmd_core.checkpoint.remote import CONTEXT, Folder, RemotePath, url
from spmd_core.checkpoint.staging import Staged
from spmd_core.checkpoint.threads import NICE, Threads

# A transaction has so many bytes; as many transactions are committed at a time.
_BATCH_BYTES, _NUM_COMMITS = 128 << 20, 2
# Data files are at least and at most of this size, and larger ones for more bytes.
_FILE_BYTES = 32 << 20, 128 << 20
_MANY_FILES = 64
# Nobody else writes into the folder of a step: files need no lock.
_CONTEXT = ts.Context({"file_io_locking": {"mode": "none"}}, CONTEXT)


def write(
    arrays: Mapping[str, Staged],
    folder: Folder,
    threads: Threads,
    pace: Pace | None = None,
) -> None:
    """Writes this process's blocks into a new database; waits until they are there to stay.

    Args:
        arrays: by name; those without blocks are left to other processes.
        folder: of the database; is made.
        threads: that write to a disk; tensorstore has threads of its own.
        pace: at which they write; None: as fast as they can.

    Raises:
        OSError, ValueError: what the disk or the store refuses.
    """
    mine = {name: array for name, array in arrays.items() if array.blocks}
    if isinstance(folder, RemotePath):
        _write_remote(mine, folder)
    else:
        disk.write(mine, folder, threads, pace)


def _write_remote(mine: Mapping[str, Staged], folder: RemotePath) -> None:
    num_bytes = sum(block.nbytes for array in mine.values() for _, block in array.blocks)
    # What lies in memory:// stays there, and the next save would overwrite it.
    refers = not url(folder).startswith("memory://")
    commits = _Commits()
    try:
        opening = {
            name: ts.open(
                _spec(name, array, folder, num_bytes),
                create=True,
                open=True,
                context=_CONTEXT,
                transaction=commits.transaction,
            )
            for name, array in mine.items()
        }
        opened = {name: each.result() for name, each in opening.items()}
        _give_way()
        if num_bytes > _BATCH_BYTES:  # an array is of one transaction until that is committed
            commits.next()
            commits.finish()
        for name, array in mine.items():
            for index, block in array.blocks:
                for part in in_chunks(index, array.chunks):
                    commits.write(opened[name], part, block[relative(part, index)], refers=refers)
        commits.next()
    finally:
        commits.finish()


class _Commits:
    """Transactions one after the other, some of which are being committed.

    Attributes:
        transaction: the current one.
    """

    def __init__(self) -> None:
        self._begun = deque[Any]()
        self._begin()

    def _begin(self) -> None:
        self.transaction, self._bytes = ts.Transaction(atomic=True), 0
        self._copies: list[Any] = []

    def write(
        self, array: Any, index: tuple[slice, ...], block: np.ndarray, *, refers: bool
    ) -> None:
        """Has the current transaction write a block; waits where too many bytes are under way."""
        if self._bytes and self._bytes + block.nbytes > _BATCH_BYTES:
            self.next()
        bound = array if array.transaction is self.transaction else None
        bound = bound or array.with_transaction(self.transaction)
        written = bound[index].write(block, can_reference_source_data_indefinitely=refers)
        self._copies.append(written.copy)
        self._bytes += block.nbytes

    def next(self) -> None:
        """Begins to commit the current transaction, and takes another."""
        for copy in self._copies:
            copy.result()
        self._begun.append(self.transaction.commit_async())
        self._begin()
        while len(self._begun) >= _NUM_COMMITS:
            self._begun.popleft().result()

    def finish(self) -> None:
        """Waits for all, also where some fail; raises the first failure."""
        failed: BaseException | None = None
        while self._begun:
            try:
                self._begun.popleft().result()
            except (OSError, ValueError) as error:
                failed = failed or error
        if failed is not None:
            raise failed


def _spec(name: str, array: Staged, folder: Folder, num_bytes: int) -> dict[str, Any]:
    """tensorstore's, of an array in a database to which this process writes so many bytes."""
    least, most = _FILE_BYTES
    return {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": f"{url(folder)}/",
            "path": f"{name}/",
            "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 1_000_000},
            "target_data_file_size": min(max(least, num_bytes // _MANY_FILES), most),
            "assume_config": True,
        },
        "metadata": disk.zarr_metadata(array),
        "store_data_equal_to_fill_value": True,  # a chunk that is missing is an error
    }


def _give_way() -> None:
    """Has tensorstore's threads run where nothing else does.

    A step of a device of the CPU needs the cores that they would take. Linux has a priority for
    each thread, and a thread has that of the one that started it.
    """
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        with suppress(OSError):  # it has ended; or the system forbids it, and it goes on as before
            if (task / "comm").read_text().startswith("ts_pool"):
                os.setpriority(os.PRIO_PROCESS, int(task.name), NICE)


def merge(folder: Folder, databases: Sequence[Folder]) -> None:
    """Has a new database refer to what lies in others, in folders below its own.

    Raises:
        OSError, ValueError: what the disk or the store refuses, or one of them is damaged.
    """
    if not isinstance(folder, Path):
        transaction = ts.Transaction(atomic=True)
        merged = _opened(folder).with_transaction(transaction)
        for each in databases:
            _opened(each).experimental_copy_range_to(merged).result()
        transaction.commit_async().result()
        return
    entries: list[Entry] = []
    for each in databases:
        assert isinstance(each, Path)
        inside = each.relative_to(folder).as_posix()
        entries += [
            (key, Place(f"{inside}/{value.file}", value.offset, value.length))
            if isinstance(value, Place)
            else (key, value)
            for key, value in index_reading.index(each).items()
        ]
    (folder / "d").mkdir()
    disk.write_index(entries, folder)


def _opened(folder: Folder) -> Any:
    spec = {"driver": "ocdbt", "base": f"{url(folder)}/"}
    return ts.KvStore.open(spec, context=_CONTEXT).result()
