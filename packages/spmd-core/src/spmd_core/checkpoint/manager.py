"""`CheckpointManager`: a folder of checkpoints, one for each step that was saved."""

import atexit
import functools
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from spmd_core import files, progress, releases, source_lines
from spmd_core.arguments import require_int, require_kind
from spmd_core.checkpoint import folder as steps
from spmd_core.checkpoint import loading, lock, plain
from spmd_core.checkpoint.behind import Behind
from spmd_core.checkpoint.entries import packed
from spmd_core.checkpoint.loading import FORMAT, Restored
from spmd_core.checkpoint.lock import FolderLock
from spmd_core.checkpoint.pace import Pace
from spmd_core.checkpoint.remote import RemoteLock, RemotePath, folder_at
from spmd_core.checkpoint.retention import Retention, Written
from spmd_core.checkpoint.staging import Memory, Staged, staged
from spmd_core.checkpoint.store import Reader
from spmd_core.checkpoint.writer import RemoteWriter, Writer
from spmd_core.errors import CheckpointError
from spmd_core.runtime import collection, host_memory, processes, watch
from spmd_core.steps.structures import raise_together

_multihost_utils = releases.jax_module("jax.experimental.multihost_utils", "process_allgather")


class CheckpointManager:
    """Saves the state of a run every few steps, and restores it on any mesh.

    A state is a dict of parts by name. A part is an object that has `state_dict` and
    `load_state_dict`: a module, an optimizer, a scheduler, a scaler, a loader; a
    `torch.Generator`; or a structure of tensors and plain Python values, such as what
    `state_dict()` returns. The state of torch's CPU generator, from which the devices draw too, is
    saved with it. Tensors go by their names, and an optimizer's state by the names of its
    parameters: pass the optimizer itself, and its module in the same state. An optimizer's
    `state_dict()` has names if it was made of `model.named_parameters()`; else its state goes by
    positions, as torch loads it: the model may then neither gain nor lose parameters.

    Each process writes and reads the blocks that its own devices hold, and each block is written
    once. So a state can be restored on another mesh, on another number of devices or processes, and
    into eager torch's tensors. `save` returns when this process's blocks are in host memory, and
    writes them behind the program.

    A step is whole or not there at all. One run at a time may write into a folder. Each of several
    processes must make a manager of the same folder, and make the same calls.

    Args:
        folder: is made if it is missing: a local or a shared one; or an address that begins with
            `gs://` or `s3://`, by tensorstore. A store of objects has no lock that ends with its
            process. So there a second run is not refused: it takes the folder over, and the first
            one's next save fails.
        every: `should_save` is true for multiples of it.
        keep: the number of newest steps that stay when another one is whole; None: all.
        keep_every: steps that are multiples of it stay, too.
        keep_for_s: steps that are younger, in seconds, stay, too.
        keep_best: the step with the best value of this metric stays, too: `"loss"` the lowest,
            `"-score"` the highest.
        async_: whether `save` writes behind the program, else it waits until the step is whole.
        identity: plain values that tell this run from others, such as its configuration. They are
            written with the first save; a manager with other ones refuses the folder.

    Raises:
        CheckpointError: the folder is that of a run with another identity, or another live run
            writes into it.
        OSError: the folder cannot be made or written.
        ValueError, TypeError: an argument is not as above.

    Example:
        >>> import tempfile, torch
        >>> import spmd_core as spmd
        >>> model = torch.nn.Linear(2, 3, device="xla")
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with spmd.CheckpointManager(folder, every=10, keep=2) as manager:
        ...         for step in range(40):
        ...             if manager.should_save(step):
        ...                 manager.save(step, {"model": model, "optimizer": optimizer})
        ...         manager.wait()
        ...         manager.all_steps(), manager.restore({"model": model}, strict=False).step
        ([20, 30], 30)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_for_s: float | None = None,
        keep_best: str | None = None,
        async_: bool = True,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        require_kind("folder", folder, str, os.PathLike, write="the folder's path")
        if require_int("every", every) < 1:
            raise ValueError(f"every counts steps, from 1; got {every}. Pass for instance 100.")
        self._every, self._async = every, async_
        self._retention = Retention(keep, keep_every, keep_for_s, keep_best)
        self._folder = folder_at(folder)
        self._identity = None if identity is None else _as_json("identity", dict(identity))
        self._memory = Memory()
        self._behind = Behind()
        # By step: what `Retention` asks of those that are whole. Of one thread: that of the save.
        self._known: dict[int, Written] = {}
        self._lock: FolderLock | RemoteLock | None = None
        self._closed = threading.Event()
        error: Exception | None = None
        try:
            self._open()
        except CheckpointError as raised:
            error = raised
        except OSError as raised:
            error = OSError(
                raised.errno,
                "checkpoints are written into a folder that may be made and changed; got "
                f"{self._folder}: {raised.strerror or raised}. Name another folder, or have its "
                "owner let this user write there; to read alone, call load_checkpoint",
            )
            error.__cause__ = raised
        try:
            raise_together(error)
        except BaseException:
            self._release()
            raise
        self._writer: Writer
        if isinstance(self._folder, RemotePath):
            assert not isinstance(self._lock, FolderLock)
            self._writer = RemoteWriter(self._folder, self._lock)
        else:
            self._writer = Writer(self._folder)
        _close_before_the_end(self)

    def _open(self) -> None:
        if not processes.is_master():
            return
        if isinstance(self._folder, Path):
            self._folder.mkdir(parents=True, exist_ok=True)
        steps.check_identity(self._folder, self._identity)
        self._lock = (
            RemoteLock(self._folder)
            if isinstance(self._folder, RemotePath)
            else FolderLock(self._folder)
        )
        lock.remove_leftovers(self._folder)
        path = self._folder / steps.IDENTITY_FILE
        if self._identity is not None and not path.exists():
            text = json.dumps(self._identity, indent=2)
            if isinstance(path, RemotePath):
                path.write_text(text)
            else:
                files.write_text(path, text)

    # --- Which steps there are --------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether a step is a multiple of `every`. Looks at nothing else."""
        return require_int("step", step) % self._every == 0

    def all_steps(self) -> list[int]:
        """The whole steps that are on the disk now, ascending."""
        return steps.whole_steps(self._folder)

    def latest(self) -> int | None:
        """The newest whole step that is on the disk now; None if there is none."""
        return max(self.all_steps(), default=None)

    # --- Saving -----------------------------------------------------------------------------------

    def save(
        self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Saves a state. Cuts, and waits for the devices and for the copies to host memory.

        The writes go on behind the program, unless `async_` is false. One save is in flight: this
        waits for the one before. The state may change as soon as this returns. Steps of devices of
        the CPU need the cores that write: behind them, a save takes a small share of a core, until
        it is waited for, or three quarters of the time between the two saves before it are over.

        Args:
            step: from 0; not there yet.
            state: the parts by name.
            metrics: numbers by name, which `keep_best` may ask for.

        Raises:
            CheckpointError: the step is there; or the state holds what a checkpoint cannot hold; or
                the save before failed, which the message names: then nothing was saved now, and
                steps before are as they were.
        """
        self._refuse_closed()
        if require_int("step", step) < 0:
            raise CheckpointError(f"steps are counted from 0; got {step}. Pass a step from 0.")
        values = {name: float(value) for name, value in (metrics or {}).items()}
        self._retention.check(values)
        self.wait()
        if steps.is_whole(self._folder, step):
            raise CheckpointError(
                f"a step is saved once; {self._folder} has step {step}. Its steps are "
                f"{self._listed()}. Save a later step, or write into another folder."
            )
        if "random" in state:
            raise CheckpointError(
                "'random' is the name of the state of torch's generator, which is saved with each "
                "state; got a part of that name. Rename it."
            )
        with progress.shown(f"copying step {step} from the devices"), collection.paused():
            saved, arrays = packed(state)
            random = arrays.pack("random", torch.get_rng_state())
            copies = staged(arrays.entries, self._memory)
        about = {
            "format": FORMAT,
            "step": step,
            "time_s": time.time(),
            "metrics": plain.encode("metrics", values, _no_tensor),
            "processes": processes.process_count(),
            "parts": saved,
            "random": random,
        }
        num_bytes = sum(block.nbytes for array in copies.values() for _, block in array.blocks)
        self._writer.start()
        write = functools.partial(self._write, step, about, copies)
        self._behind.begin(step, num_bytes, write)
        if not self._async:
            self.wait()

    def wait(self) -> None:
        """Waits until the save in flight is whole on the disk. Does nothing without one.

        Several processes wait for each other: when this returns, they find the same steps.

        Raises:
            CheckpointError: it failed; steps before it are as they were.
            SpmdError: it failed in another process.
        """
        self._wait(together=True)

    def _wait(self, *, together: bool) -> None:
        step = self._behind.step
        if step is None:
            return
        with progress.shown(f"writing step {step} to {self._folder}"):
            error = self._behind.finish()
        self._memory.reuse()
        failed = None
        if error is not None:
            failed = self._unwritten(step, error)
            failed.__cause__ = error
        if together:
            try:
                raise_together(failed)
            except BaseException:
                if processes.is_master():  # nobody writes there any more
                    with suppress(OSError):  # such as of a folder that became read-only: told
                        lock.remove_leftovers(self._folder)  # which take the next save's room
                raise
        elif failed is not None:
            raise failed

    def _unwritten(self, step: int, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"a step must be written whole; step {step} could not be written to "
            f"{self._folder}: {' '.join(str(error).split())}. Earlier steps are as they were: "
            f"{self._listed()}. Free space, or name another folder, and save again."
        )

    def _write(
        self,
        step: int,
        about: Mapping[str, Any],
        copies: Mapping[str, Staged],
        pace: Pace | None,
    ) -> None:
        """Behind the program: writes a step; when it is whole, others go."""
        self._writer.write(step, about, copies, pace)
        if not processes.is_master():
            return
        there = [self._written(step) for step in self.all_steps()]
        for step in self._retention.removed(there, time.time()):
            lock.remove_step(self._folder / str(step))
            self._known.pop(step, None)

    def _written(self, step: int) -> Written:
        if step not in self._known:
            about = Reader(self._folder / str(step)).state()
            metrics = plain.decode("", about["metrics"], _no_tensor)
            self._known[step] = Written(step, about["time_s"], metrics)
        return self._known[step]

    # --- Restoring --------------------------------------------------------------------------------

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        strict: bool = True,
        convert: bool = False,
        check: bool = True,
    ) -> Restored:
        """Gives a state the values of a saved one, in place. Waits for the transfers.

        Tensors keep their devices, shardings and dtypes, whatever those of the saved ones were.
        Each process reads what its devices hold; the host holds a few blocks of one tensor at a
        time. An optimizer's state is made where it is not born yet, sharded as its parameters.
        torch's CPU generator gets its saved state.

        Everything is compared, and each chunk that this process needs is read and compared with
        its checksum, before anything changes in any process. What comes into tensors without values
        is read once: into an optimizer's state that is not born yet, and into parameters whose
        initial values were recorded and not computed. Memory for both the values before and those
        that come is not taken: what replaces values is read twice, the second time mostly from
        the system's cache of files.

        Args:
            state: the parts by name, as for `save`.
            step: None: the newest.
            strict: whether parts and tensors may neither be missing in the checkpoint nor be there
                besides.
            convert: whether values may be converted to the tensors' dtypes: floating-point ones to
                each other, and integers to wider ones.
            check: whether everything is read once before anything changes. Without, what replaces
                values is read once, and checked then; a damaged chunk leaves new values in the
                tensors before it, and another step is to be restored, or the state to be built
                again.

        Raises:
            CheckpointError: there is no such step; or the state differs, with all differences; or
                the step is damaged. Then the state is as it was, unless `check` is false, or the
                files changed since they were checked.
            SpmdError: another process could not read its part; the state is as it was.
            Exception: what a part's own `load_state_dict` raises, or a device that lacks memory:
                then parts of the state have new values.
        """
        self._refuse_closed()
        self.wait()
        step = self._agreed(step)
        shown = progress.shown(f"restoring step {step} from {self._folder}")
        with shown, host_memory.returned_when_freed():
            return self._restored(step, state, strict=strict, check=check, convert=convert)

    def _restored(
        self, step: int, state: Mapping[str, Any], *, strict: bool, check: bool, convert: bool
    ) -> Restored:
        error: Exception | None = None
        try:
            restoration, restored = loading.planned(
                self._folder, step, state, strict=strict, convert=convert
            )
            restoration.read(check=check)
        except (OSError, CheckpointError) as raised:
            error = raised
        raise_together(error, action="read")
        restoration.run()
        return Restored(step, restored, restoration.missing, restoration.extra)

    def _agreed(self, step: int | None) -> int:
        """The step to restore, which all processes find."""
        if step is not None:
            require_int("step", step)
        there = self.all_steps()
        chosen = max(there, default=None) if step is None else step if step in there else None
        if processes.process_count() > 1:
            everyone = tuple(range(processes.process_count()))
            watch.note_transfer("choice of a checkpoint", source_lines.user_line(), everyone)
            mine = np.array(-1 if chosen is None else chosen)
            found = np.unique(_multihost_utils.process_allgather(mine)).tolist()
            if len(found) > 1:
                raise CheckpointError(
                    "all processes restore one step from one folder; they found different ones in "
                    f"{self._folder}: {found} (-1: none). Use a folder that all hosts share."
                )
        return loading.found(self._folder, step if chosen is None else chosen)

    def remove_after(self, step: int) -> None:
        """Removes the steps after one, so that a run that was restored to it can save them again.

        Waits for the save in flight, and in several processes for each other.

        Raises:
            CheckpointError: there is no such step, or the save in flight failed.
            OSError: a step cannot be removed.
            SpmdError: process 0 could not remove one.
        """
        self._refuse_closed()
        self.wait()
        error: Exception | None = None
        try:
            loading.found(self._folder, require_int("step", step))
            if processes.is_master():
                for later in reversed([each for each in self.all_steps() if each > step]):
                    lock.remove_step(self._folder / str(later))
                    self._known.pop(later, None)
        except (OSError, CheckpointError) as raised:
            error = raised
        raise_together(error, action="remove")

    def _listed(self) -> str:
        return steps.listed(self._folder)

    # --- The end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for the save in flight, and gives the folder up to other runs.

        Raises:
            CheckpointError: that save failed.
        """
        self._close(together=True)

    def _close(self, *, together: bool) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._wait(together=together)
        finally:
            self._behind.close()
            self._writer.close()
            self._memory = Memory()
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise CheckpointError(
                f"a manager is used until it is closed; that of {self._folder} is. Make another."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error, the other processes may be elsewhere.
        self._close(together=error is None)


def _no_tensor(path: str, value: Any) -> Any:
    raise CheckpointError(f"{path} holds plain values; got a tensor. Pass value.item().")


def _as_json(path: str, value: dict[str, Any]) -> Any:
    """Plain values as JSON gives them back."""
    return json.loads(json.dumps(plain.encode(path, value, _no_tensor)))


def _close_before_the_end(manager: CheckpointManager) -> None:
    """Has a program that ends without `close` write its last step, and give the folder up."""
    known = weakref.ref(manager)

    def close() -> None:
        found = known()
        if found is not None:
            found._close(together=False)

    atexit.register(close)
