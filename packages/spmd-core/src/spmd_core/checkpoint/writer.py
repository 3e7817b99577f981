"""Writes steps, behind the program: the arrays of each process, then one process makes it whole.

In a folder of a disk, a step has a temporary name until all of it is on the disk; then it is
renamed. A store of objects renames no folder: there, the object that says that a step is whole is
written last. Either has Orbax's layout, which Orbax reads; its own writer is not used, as it has
parts of a step renamed before they are on the disk.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spmd_core import files
from spmd_core.checkpoint import database, disk
from spmd_core.checkpoint.lock import UNFINISHED
from spmd_core.checkpoint.meetings import Meetings
from spmd_core.checkpoint.pace import Pace
from spmd_core.checkpoint.remote import WHOLE, Folder, RemoteLock, RemotePath
from spmd_core.checkpoint.staging import Staged
from spmd_core.checkpoint.store import ARRAYS, STATE, with_checksum
from spmd_core.checkpoint.threads import Threads
from spmd_core.runtime import processes

# How long a process waits for others that write.
_TIMEOUT_MS = 1200 * 1000
# What Orbax reads the two parts of a step by, and that a key of its tree is one of a dict.
_HANDLERS = {
    ARRAYS: "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    STATE: "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
}
_DICT_KEY = 2


class Writer:
    """Writes steps into a folder of a disk, one at a time. Each of several processes has one.

    Args:
        folder: of all steps.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        # Several managers of one program do not meet each other.
        self._meetings = Meetings(f"spmd_{folder}".replace("/", "_"))
        self._threads = Threads(disk.NUM_FILES, "checkpoint-file", gives_way=True)

    def start(self) -> None:
        """Makes what a save needs, so that one that goes on at the program's end has it."""
        self._threads.start()

    def write(
        self,
        step: int,
        state: Mapping[str, Any],
        arrays: Mapping[str, Staged],
        pace: Pace | None = None,
    ) -> None:
        """Writes a step, and waits until it is whole on the disk. In every process.

        Args:
            step: the step.
            state: what it has beside its arrays.
            arrays: by name; this process writes its blocks of them.
            pace: at which it does; None: as fast as it can.

        Raises:
            OSError, ValueError: what failed in this process.
            CheckpointError: another process failed; or another run has taken the folder over.
        """
        self._meetings.begin()
        try:
            self._write(step, state, arrays, pace)
        except BaseException as error:
            self._meetings.fail(error)
            raise

    def close(self) -> None:
        """Ends its threads."""
        self._threads.close()

    def _write(
        self,
        step: int,
        state: Mapping[str, Any],
        arrays: Mapping[str, Staged],
        pace: Pace | None,
    ) -> None:
        begun = time.time_ns()
        path, is_master = self._place(step), processes.is_master()
        if is_master:
            self._begin(path)
        self._meetings.meet("begun", _TIMEOUT_MS)
        together, count = path / ARRAYS, processes.process_count()
        own = [together / f"ocdbt.process_{rank}" for rank in range(count)]
        mine = together if count == 1 else own[processes.process_index()]
        database.write(arrays, mine, self._threads, pace)
        self._meetings.meet("written", _TIMEOUT_MS)
        if is_master:
            if count > 1:
                database.merge(together, [each for each in own if each.is_dir()])
            self._put(together / "_METADATA", _tree(arrays))
            self._put(path / STATE / "metadata", with_checksum(state))
            times = {"init_timestamp_nsecs": begun, "commit_timestamp_nsecs": time.time_ns()}
            whole = {"item_handlers": _HANDLERS, "metrics": {}, "performance_metrics": {}}
            self._finish(step, path, {**whole, **times, "custom_metadata": {}})
        self._meetings.meet("whole", _TIMEOUT_MS)

    def _place(self, step: int) -> Any:
        """Where a step is written."""
        return self._folder / f"{step}{UNFINISHED}"

    def _begin(self, path: Any) -> None:
        """Makes the folder of a step."""
        shutil.rmtree(path, ignore_errors=True)  # of a save that failed
        for folder in (path, path / ARRAYS, path / STATE):
            folder.mkdir()

    def _put(self, path: Any, content: Mapping[str, Any]) -> None:
        """Writes a file; waits until its content is on the disk."""
        with path.open("w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())

    def _finish(self, step: int, path: Any, whole: Mapping[str, Any]) -> None:
        """Makes a step whole, all else of which is written."""
        self._put(path / WHOLE, whole)
        for folder in (path / ARRAYS, path / STATE, path):
            files.sync_folder(folder)
        assert isinstance(self._folder, Path)
        path.rename(self._folder / str(step))
        files.sync_folder(self._folder)


class RemoteWriter(Writer):
    """As `Writer`, for a store of objects.

    Args:
        folder: of all steps.
        lock: of the first process; None in others.
    """

    def __init__(self, folder: RemotePath, lock: RemoteLock | None) -> None:
        super().__init__(folder)
        self._lock = lock

    def start(self) -> None:
        """tensorstore has threads of its own."""

    def _place(self, step: int) -> Any:
        return self._folder / str(step)

    def _begin(self, path: Any) -> None:
        """A folder in a store of objects needs no creation."""

    def _put(self, path: Any, content: Mapping[str, Any]) -> None:
        path.write_text(json.dumps(content))

    def _finish(self, step: int, path: Any, whole: Mapping[str, Any]) -> None:
        assert self._lock is not None
        self._lock.check()
        self._put(path / WHOLE, whole)


def _tree(names: Iterable[str]) -> dict[str, Any]:
    """What says to Orbax how arrays lie in a tree: by the part of the state, and the rest."""
    tree = {}
    for name in names:
        part, _, rest = name.partition(".")
        keys = (part, rest) if rest else (name,)
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            # As which Orbax reads them without being told a sharding.
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
