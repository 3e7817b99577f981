"""Step closures: functions that run at the end of a step, in the loop or in a background thread."""

import atexit
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd_core.arguments import checked, require_callable, require_kind
from spmd_core.config import config
from spmd_core.errors import CaptureError
from spmd_core.graph.recorders import lock
from spmd_core.marks.marking import mark_sharding
from spmd_core.program import cut_guard, execution
from spmd_core.runtime import devices, interrupts
from spmd_core.sharding.mesh import Mesh
from spmd_core.source_lines import user_line
from spmd_core.steps.structures import map_tensors, to_cpu
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

Closure = Callable[..., Any]


@dataclass(eq=False)
class _StepClosure:
    closure: Closure
    args: tuple[Any, ...]
    is_async: bool
    thread: threading.Thread = field(default_factory=threading.current_thread)


# Those of the current step of each thread.
# Guarded by: the GIL to add, the graph lock to take. Cleared by: the end of the thread's step.
_waiting: deque[_StepClosure] = deque()


@checked()
def add_step_closure(closure: Closure, args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Runs `closure(*args)` at the end of the step, for instance to log without a cut in the step.

    This thread's next `sync()` runs the closures, in the order in which they were added, after it
    has started the step's program. By default they run in `sync()` itself and get the tensors in
    `args` themselves. With `run_async` they run in one background thread and get copies in host
    memory of the values at the end of this step, as reading the tensors themselves would cut a
    later step in its middle. `sync()` waits while `config.max_async_closures` of them are waiting.

    An exception in a closure is raised by `sync()` after the other closures ran; several exceptions
    are raised as an ExceptionGroup. An exception in an asynchronous closure is the cause of a
    RuntimeError from the next `add_step_closure`, `sync()` or `wait_for_closures()`, or is printed
    if the process ends first. If a step's program fails, its closures are dropped. Each of several
    processes must add the same closures, as reading a sharded tensor gathers it.

    Args:
        closure: any function.
        args: its arguments; tensors may be inside nested structures.
        run_async: whether to run the closure in the background thread, so that the loop does not
            wait for it.

    Raises:
        RuntimeError: an earlier asynchronous closure raised.
        CaptureError: called inside of a captured step.
        TypeError: `closure` is no function, or `args` no tuple or list.
    """
    require_callable("closure", closure)
    guard = cut_guard.this_thread.cut_guard
    if guard is not None and guard.after_start is not None:
        raise CaptureError(
            "a captured step runs its Python only when it is recorded; got add_step_closure inside "
            f"of one, at {user_line()}. Call it after the step, with what that returns."
        )
    require_kind("args", args, tuple, list, write="args=(value,)")
    _background.raise_error()
    _waiting.append(_StepClosure(closure, tuple(args), run_async))


def wait_for_closures() -> None:
    """Waits until the asynchronous closures of all ended steps have run.

    Raises:
        RuntimeError: an asynchronous closure raised.
    """
    _background.drain()
    _background.raise_error()


@contextmanager
def set_aside() -> Iterator[None]:
    """For a plan: inside, only closures that are added inside wait, and the end drops them.

    The earlier ones wait again afterwards.
    """
    with lock:
        before = [*_waiting]
        _waiting.clear()
    try:
        yield
    finally:
        with lock:
            _waiting.clear()
            _waiting.extend(before)


def _around_step() -> AbstractContextManager[None] | None:
    """What is around the cut that ends a step; None if no closure waits."""
    _background.raise_error()
    return _closures_of_step() if _waiting else None


@contextmanager
def _closures_of_step() -> Iterator[None]:
    """Around the cut that ends a step: prepares the step's closures before it, runs them after."""
    closures = _take_own()
    try:
        for added in closures:
            if added.is_async:
                # The step's own program makes the copies: the tensors themselves may have other
                # values when the closure runs.
                added.args = map_tensors(added.args, _snapshot)
        yield
    except Exception:
        # The step has no values, and those of a later step would be the wrong ones for the
        # closures.
        raise
    except BaseException:
        _waiting.extendleft(reversed(closures))  # interrupted: the closures wait again
        raise
    _run(closures)


def _take_own() -> list[_StepClosure]:
    """Takes the closures of this thread's step, and those of threads that have ended."""
    with lock:
        taken = [
            added
            for added in _waiting
            if added.thread is threading.current_thread()
            or not added.thread.is_alive()
            or added.thread.ident == _background.thread_id
        ]
        for added in taken:
            _waiting.remove(added)
        return taken


def _snapshot(t: torch.Tensor) -> torch.Tensor:
    copied = t.detach().clone()
    if isinstance(copied, XLAShardedTensor) and devices.is_spmd() and devices.num_processes() > 1:
        # The step's program gathers the copy: in the closures' threads, the processes would gather
        # in different orders.
        if copied.sharding is None:
            num_devices = devices.global_runtime_device_count()
            mesh = Mesh(range(num_devices), (num_devices,))
        else:
            mesh = copied.sharding.mesh
        mark_sharding(copied, mesh, ())
    return copied


def _run(closures: list[_StepClosure]) -> None:
    if devices.is_abstract():
        return  # a plan has no values for them
    errors: list[Exception] = []
    remaining = deque(closures)
    while remaining:
        added = remaining.popleft()
        try:
            if added.is_async:
                _background.submit(added)
            else:
                added.closure(*added.args)
        except Exception as error:
            errors.append(error)
        except BaseException:  # an interruption
            if added.is_async:
                remaining.appendleft(added)  # it has not begun
            _waiting.extendleft(reversed(remaining))
            raise
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup(f"{len(errors)} closures of one step raised", errors)


class _Background:
    """One thread that runs closures in order, with a bounded queue.

    Keeps the first exception until `raise_error` or `print_error` reports it.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        self._num_waiting = 0
        self.thread_id: int | None = None
        self._error: tuple[Closure, BaseException] | None = None

    def submit(self, added: _StepClosure) -> None:
        """Queues a closure; waits while the queue is full.

        In the background thread, a closure that adds others would wait for itself, so it does not.
        """
        with self._changed:
            if threading.get_ident() != self.thread_id:
                self._wait_for_room()
            self._num_waiting += 1
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="spmd-step-closures")
            self._executor.submit(self._run, added)

    @interrupts.waits
    def _wait_for_room(self) -> None:
        self._changed.wait_for(lambda: self._num_waiting < max(config.max_async_closures, 1))

    def _run(self, added: _StepClosure) -> None:
        self.thread_id = threading.get_ident()
        error: BaseException | None = None
        try:
            added.closure(*to_cpu(added.args))
        except BaseException as raised:  # also SystemExit, of which the main thread should learn
            error = raised
        with self._changed:
            if error is not None and self._error is None:
                self._error = (added.closure, error)
            self._num_waiting -= 1
            self._changed.notify_all()

    @interrupts.waits
    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._num_waiting)

    def raise_error(self) -> None:
        with self._changed:
            found, self._error = self._error, None
        if found is not None:
            closure, error = found
            raise RuntimeError(
                "an asynchronous step closure must not raise; "
                f"{getattr(closure, '__qualname__', closure)} raised {type(error).__name__}: "
                f"{error}. "
                "Its own traceback stands above; correct it."
            ) from error

    def print_error(self) -> None:
        """At exit, after the thread has ended, prints an exception that was not raised."""
        if self._error is not None:
            print(
                "an asynchronous step closure raised, and no step followed in which to say so:",
                file=sys.stderr,
            )
            error = self._error[1]
            sys.excepthook(type(error), error, error.__traceback__)


# The thread of asynchronous closures, with its queue and first error.
# Guarded by: its own lock. Cleared by: wait_for_closures().
_background = _Background()
atexit.register(_background.print_error)
execution.around_step.append(_around_step)
