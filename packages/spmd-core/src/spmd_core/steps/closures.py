"""One step of a training loop: the optimizer's update, closures at its end, waiting for it, and how many of them run in a second."""

import atexit
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core.config import config
from spmd_core.marks.marking import mark_sharding
from spmd_core.program import execution
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh
from spmd_core.steps.structures import map_tensors, to_cpu
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

Closure = Callable[..., Any]


# --- Closures -------------------------------------------------------------------------------------------------------------------------


@dataclass
class _Added:
    closure: Closure
    args: tuple[Any, ...]
    is_async: bool


_added: deque[_Added] = deque()


def add_step_closure(closure: Closure, args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Runs `closure(*args)` at the end of the step, in the next `sync()`, once the step's program was started: for logging without a cut in between.

    Closures run in the order in which they were added. In `sync()` itself they get the tensors in `args` as they are. With `run_async` they run in
    one background thread and get copies in host memory, of the values at the end of this step, however far the program has gone on by then: recording
    operations there would cut a later step in its middle. `config.max_async_closures` of them may wait; then `sync()` waits.

    An exception in a closure leaves `sync()` after the others ran (several leave as an ExceptionGroup). That of an asynchronous closure is raised by
    the next `add_step_closure`, `sync()` or `wait_for_closures()`, as a RuntimeError from it, or printed where the process ends before. A step whose
    program fails takes its closures with it. Under several processes each of them adds the same closures: reading a sharded tensor gathers it.

    Args:
        closure: any function.
        args: its arguments; tensors may stand in nested structures.
        run_async: whether the loop need not wait for the closure, which reads the device.

    Raises:
        RuntimeError: an earlier asynchronous closure raised.
    """
    _background.raise_error()
    _added.append(_Added(closure, tuple(args), run_async))


def wait_for_closures() -> None:
    """Waits until every asynchronous closure whose step has ended has run. Raises RuntimeError where one raised."""
    _background.drain()
    _background.raise_error()


@contextmanager
def _closures_of_step() -> Iterator[None]:
    _background.raise_error()
    mine = list(_added)
    _added.clear()
    try:
        for added in mine:
            if added.is_async:
                # Copies made by the step's own program: the tensor itself may have another value by the time that the closure runs.
                added.args = map_tensors(added.args, _snapshot)
        yield
    except Exception:
        raise  # the step's values do not exist, and those of a later one are not what the closures wait for
    except BaseException:
        _added.extendleft(reversed(mine))  # interrupted: everything stays as it was
        raise
    _run(mine)


def _snapshot(t: torch.Tensor) -> torch.Tensor:
    copied = t.detach().clone()
    if isinstance(copied, XLAShardedTensor) and devices.is_spmd() and devices.num_processes() > 1:
        # Gathered by the step's program: were it done in the closure's thread, the processes would not meet in the same order.
        every = devices.global_runtime_device_count()
        mark_sharding(
            copied,
            Mesh(range(every), (every,)) if copied.sharding is None else copied.sharding.mesh,
            (),
        )
    return copied


def _run(closures: list[_Added]) -> None:
    errors: list[Exception] = []
    for added in closures:
        try:
            if added.is_async:
                _background.submit(added)
            else:
                added.closure(*added.args)
        except Exception as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup(f"{len(errors)} closures of one step raised", errors)


class _Background:
    """One thread that runs closures in order, behind a bounded queue. Keeps the first exception until somebody asks."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._thread_id: int | None = None
        self._error: tuple[Closure, BaseException] | None = None

    def submit(self, added: _Added) -> None:
        """Queues a closure; waits while the queue is full, save in a closure, which would wait for itself."""
        with self._changed:
            if threading.get_ident() != self._thread_id:
                self._changed.wait_for(
                    lambda: self._num_waiting < max(config.max_async_closures, 1)
                )
            self._num_waiting += 1
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="spmd-step-closures")
            self._executor.submit(self._run, added)

    def _run(self, added: _Added) -> None:
        self._thread_id = threading.get_ident()
        error: BaseException | None = None
        try:
            added.closure(*to_cpu(added.args))
        except BaseException as raised:  # also SystemExit: the main thread should know
            error = raised
        with self._changed:
            if error is not None and self._error is None:
                self._error = (added.closure, error)
            self._num_waiting -= 1
            self._changed.notify_all()

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._num_waiting)

    def raise_error(self) -> None:
        with self._changed:
            found, self._error = self._error, None
        if found is not None:
            closure, error = found
            raise RuntimeError(
                f"an asynchronous step closure must not raise; {getattr(closure, '__qualname__', closure)} raised {type(error).__name__}: {error}. "
                "Its own traceback stands above; correct it."
            ) from error

    def print_error(self) -> None:
        """At the end of the process, after the thread has ended: what nobody asked for any more."""
        if self._error is not None:
            print(
                "an asynchronous step closure raised, and no step followed in which to say so:",
                file=sys.stderr,
            )
            error = self._error[1]
            sys.excepthook(type(error), error, error.__traceback__)


_background = _Background()
atexit.register(_background.print_error)
execution.around_step.append(_closures_of_step)
