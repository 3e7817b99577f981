"""`CheckpointManager`: checkpoints every few steps, by torch.distributed.checkpoint.

For programs written for torch_xla; `spmd_core.CheckpointManager` keeps more promises: it writes
what a killed save cannot leave half, goes by names, and pickles nothing.
"""

import functools
import json
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import fsspec  # type: ignore[import-untyped]
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp

from spmd_core import distributed
from spmd_core.arguments import require_int
from torch_xla.experimental.distributed_checkpoint._helpers import _sharded_cpu_state_dict
from torch_xla.experimental.distributed_checkpoint.planners import SPMDLoadPlanner, SPMDSavePlanner

try:
    from torch.distributed.checkpoint import fsspec_filesystem as fs  # type: ignore[attr-defined]
except ImportError:  # before torch 2.15
    from torch.distributed.checkpoint import _fsspec_filesystem as fs

# What marks a whole step; what PyTorch/XLA wrote into it, a pickle, is not read.
_MARK = ".manager_metadata"


class CheckpointManager:
    """Saves a state dict every few steps, keeps the newest ones, and restores any of them.

    A step lies in a folder of its number, in torch.distributed.checkpoint's format. Saving in the
    background first copies the state to host memory, each process the blocks of its devices.

    Args:
        path: a folder, or an address that fsspec knows, such as `gs://bucket/run`.
        save_interval: `save` and `save_async` take steps that are multiples of it.
        max_to_keep: when another one is whole, the oldest beyond so many go; 0: all stay.
        max_pending_async: so many saves in the background may wait; another call waits itself.
        num_of_threads: that write the files of a process.
        process_group: with a CPU backend such as gloo; None: a new one of all processes.
        chkpt_on_preemption: after SIGTERM, the step that all processes agree on is taken, whatever
            the interval; `reached_preemption` says which.

    Raises:
        AssertionError: there is no process group, or a number is out of its range.

    Example:
        >>> import tempfile, torch, torch.distributed as dist
        >>> from torch_xla.experimental.distributed_checkpoint import CheckpointManager
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 2, device="xla")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = CheckpointManager(folder, 10, chkpt_on_preemption=False)
        ...     [manager.save(step, model.state_dict()) for step in (5, 10)], manager.all_steps()
        ([False, True], [10])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        path: str,
        save_interval: int,
        max_to_keep: int | None = 0,
        max_pending_async: int | None = 1,
        num_of_threads: int = 1,
        process_group: dist.ProcessGroup | None = None,
        chkpt_on_preemption: bool = True,
    ) -> None:
        assert dist.is_initialized(), (
            "A process group is required. Call torch.distributed.init_process_group('gloo', "
            "init_method='xla://') first."
        )
        for name, value, least in (
            ("save_interval", save_interval, 1),
            ("max_to_keep", max_to_keep or 0, 0),
            ("max_pending_async", max_pending_async or 0, 1),
            ("num_of_threads", num_of_threads, 1),
        ):
            word = "positive" if least else "non-negative"
            assert value >= least, f"{name} must be {word}; got {value}. Pass at least {least}."
        self.base_path = str(path)
        self.save_interval = save_interval
        self.max_to_keep = max_to_keep or 0
        self.chkpt_on_preemption = chkpt_on_preemption
        self.pg = process_group or dist.new_group()
        self._num_threads = num_of_threads
        self._files, self._root = fsspec.core.url_to_fs(self.base_path)
        self._steps = self._found()
        self._executor = ThreadPoolExecutor(1, "checkpoints")
        self._places = threading.Semaphore(max_pending_async or 1)
        self._pending: list[Future[None]] = []
        self._asked: tuple[int, bool] | None = None  # the last step of `reached_preemption`
        if chkpt_on_preemption and threading.current_thread() is threading.main_thread():
            self._before: Any = signal.signal(signal.SIGTERM, self._on_preemption)

    def _on_preemption(self, number: int, frame: FrameType | None) -> None:
        distributed.request_stop()
        # A second one acts as before. None is a handler that is not Python's.
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _found(self) -> list[int]:
        """The whole steps that are there, the oldest first."""
        found = []
        if self._files.isdir(self._root):
            for path in self._files.ls(self._root, detail=False):
                mark = f"{path.rstrip('/')}/{_MARK}"
                name = path.rstrip("/").rpartition("/")[2]
                if name.isdecimal() and self._files.exists(mark):
                    found.append((self._time_s(mark), int(name)))
        return [step for _, step in sorted(found)]

    def _time_s(self, mark: str) -> float:
        try:
            return float(json.loads(self._files.cat_file(mark))["time_s"])
        except ValueError:  # PyTorch/XLA's
            return float(self._files.modified(mark).timestamp())

    def should_save(self, step: int) -> bool:
        """Whether a step is a multiple of the interval, or the one at which a preemption is met."""
        return require_int("step", step) % self.save_interval == 0 or (
            self.chkpt_on_preemption and self.reached_preemption(step)
        )

    def save(self, step: int, state_dict: dict[str, Any], force: bool | None = False) -> bool:
        """Saves a state dict and waits until it is on the disk. In every process.

        Args:
            step: its number; one that is there is replaced.
            state_dict: tensors and whatever torch.save takes, nested as one likes.
            force: whether to save a step that `should_save` does not want.

        Returns:
            Whether it was saved.

        Raises:
            Exception: what an earlier save in the background failed with.
        """
        if not force and not self.should_save(step):
            return False
        self.join()
        self._save(step, state_dict)
        return True

    def save_async(self, step: int, state_dict: dict[str, Any], force: bool | None = False) -> bool:
        """Copies a state dict to host memory, and saves it in the background. See `save`.

        Waits for the devices, and for a place among `max_pending_async`.
        """
        if not force and not self.should_save(step):
            return False
        self._raise_failed()
        copy = _sharded_cpu_state_dict(state_dict)
        self._places.acquire()
        self._pending.append(self._executor.submit(self._save_and_leave, step, copy))
        return True

    def _save_and_leave(self, step: int, state_dict: dict[str, Any]) -> None:
        try:
            self._save(step, state_dict)
        finally:
            self._places.release()

    def _save(self, step: int, state_dict: dict[str, Any]) -> None:
        path = f"{self._root}/{step}"
        self._on_the_first(lambda: self._remove(step))
        if step in self._steps:
            self._steps.remove(step)
        dist_cp.save(
            state_dict,
            storage_writer=self._writer(step),
            planner=SPMDSavePlanner(),
            process_group=self.pg,
        )
        mark = json.dumps({"step": step, "time_s": time.time()}).encode()
        self._on_the_first(lambda: self._files.pipe_file(f"{path}/{_MARK}", mark))
        self._steps.append(step)
        while 0 < self.max_to_keep < len(self._steps):
            self._on_the_first(functools.partial(self._remove, self._steps.pop(0)))

    def _on_the_first(self, action: Callable[[], object]) -> None:
        """Acts in one process, which the others wait for."""
        if dist.get_rank(self.pg) == 0:
            action()
        dist.barrier(group=self.pg)

    def _remove(self, step: int) -> None:
        path = f"{self._root}/{step}"
        if self._files.isdir(path):
            mark = f"{path}/{_MARK}"
            if self._files.exists(mark):
                self._files.rm_file(mark)  # first, so that half a step is none
            self._files.rm(path, recursive=True)

    def _writer(self, step: int) -> Any:
        if "://" in self.base_path:  # streams, which have nothing to fsync
            return fs.FsspecWriter(
                f"{self.base_path}/{step}", thread_count=self._num_threads, sync_files=False
            )
        return dist_cp.FileSystemWriter(f"{self._root}/{step}", thread_count=self._num_threads)

    def restore(self, step: int, state_dict: dict[str, Any]) -> None:
        """Loads a step into a state dict, in place: into tensors that are there, see
        `prime_optimizer`. In every process. Tensors keep their shardings.

        Raises:
            AssertionError: there is no such step.
        """
        assert step in self._steps, (
            f"Cannot restore from untracked step {step}. Valid steps are {self._steps}. Restore "
            "one of these."
        )
        reader = (
            fs.FsspecReader(f"{self.base_path}/{step}")
            if "://" in self.base_path
            else dist_cp.FileSystemReader(f"{self._root}/{step}")
        )
        dist_cp.load(
            state_dict, storage_reader=reader, planner=SPMDLoadPlanner(), process_group=self.pg
        )

    def all_steps(self) -> list[int]:
        """The whole steps, the oldest first."""
        return [*self._steps]

    def join(self) -> None:
        """Waits for the saves in the background.

        Raises:
            Exception: what one of them failed with. (PyTorch/XLA's says nothing.)
        """
        pending, self._pending = self._pending, []
        for each in pending:
            each.exception()
        for each in pending:
            each.result()

    def _raise_failed(self) -> None:
        self._pending, ended = (
            [each for each in self._pending if each.done() is done] for done in (False, True)
        )
        for each in ended:
            each.result()

    def reached_preemption(self, step: int) -> bool:
        """Whether this is the step at which all processes save because one was told to end.

        Call it, or `should_save`, in every process at each step.

        Raises:
            AssertionError: `chkpt_on_preemption` is false.
        """
        assert self.chkpt_on_preemption, (
            "Preemption is looked for with chkpt_on_preemption=True; this manager has False. "
            "Make one with it."
        )
        if self._asked is None or self._asked[0] != step:
            self._asked = step, distributed.should_stop()
        return self._asked[1]
