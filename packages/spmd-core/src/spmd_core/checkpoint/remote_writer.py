"""Writes steps into a store of objects: without Orbax, whose steps are renamed."""

import asyncio
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import tensorstore as ts

from spmd_core.checkpoint import store
from spmd_core.checkpoint.meetings import Meetings
from spmd_core.checkpoint.remote import CONTEXT, WHOLE, RemoteLock, RemotePath
from spmd_core.checkpoint.staging import Staged
from spmd_core.runtime import processes


class RemoteWriter:
    """As `store.Writer`, for a store of objects.

    Args:
        folder: of all steps.
        lock: of the first process; None in others.
    """

    def __init__(self, folder: RemotePath, lock: RemoteLock | None) -> None:
        self._folder, self._lock = folder, lock
        self._meetings = Meetings(store.prefix(folder))

    def write(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Staged]) -> None:
        """Writes a step, and waits until it is whole there. In every process.

        Raises:
            CheckpointError: another run has taken the folder over; or another process failed.
            OSError, ValueError: what failed in this process.
        """
        self._meetings.begin()
        try:
            self._write(self._folder / str(step), state, arrays)
        except BaseException as error:
            self._meetings.fail(error)
            raise

    def _write(
        self, path: RemotePath, state: Mapping[str, Any], arrays: Mapping[str, Staged]
    ) -> None:
        infos = [
            SimpleNamespace(
                name=name,
                parent_dir=path / store.ARRAYS,
                ts_context=CONTEXT,
                await_path_creation=_is_there,
            )
            for name in arrays
        ]
        asyncio.run(store.write_blocks([*arrays.values()], infos))
        self._meetings.meet("written", _TIMEOUT_MS)
        if self._lock is not None:
            _merge(path / store.ARRAYS)
            (path / store.STATE / "metadata").write_text(json.dumps(store.with_checksum(state)))
            self._lock.check()
            (path / WHOLE).write_text("{}")
        self._meetings.meet("whole", _TIMEOUT_MS)

    def close(self) -> None:
        """Has nothing to end."""


# As long as Orbax waits for processes that write.
_TIMEOUT_MS = 1200 * 1000


async def _is_there() -> None:
    """A folder in a store of objects needs no creation."""


def _merge(arrays: RemotePath) -> None:
    """Has the database of a step refer to what the processes wrote into theirs."""
    transaction = ts.Transaction(atomic=True)
    merged = _database(arrays).with_transaction(transaction)
    for rank in range(processes.process_count()):
        own = arrays / f"ocdbt.process_{rank}"
        if own.is_dir():
            _database(own).experimental_copy_range_to(merged).result()
    transaction.commit_async().result()


def _database(path: RemotePath) -> Any:
    return ts.KvStore.open({"driver": "ocdbt", "base": f"{path}/"}, context=CONTEXT).result()
