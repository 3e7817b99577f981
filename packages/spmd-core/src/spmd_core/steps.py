"""One step of a training loop: the optimizer's update, closures at its end, waiting for it, and how many of them run in a second."""

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core import execution, runtime
from spmd_core.config import config
from spmd_core.marking import mark_sharding
from spmd_core.mesh import Mesh
from spmd_core.storage import Storage
from spmd_core.structures import map_tensors, to_cpu
from spmd_core.tensor import XLAShardedTensor

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
    if isinstance(copied, XLAShardedTensor) and runtime.is_spmd() and runtime.num_processes() > 1:
        # Gathered by the step's program: were it done in the closure's thread, the processes would not meet in the same order.
        every = runtime.global_runtime_device_count()
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


# --- The step -------------------------------------------------------------------------------------------------------------------------


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    *,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
) -> Any:
    """`optimizer.step(**optimizer_args)`, and with `barrier` the end of the step, as `sync()`. Returns what the optimizer returns.

    Gradients need no reduction: they are those of the global batch.
    """
    result = optimizer.step(**(optimizer_args or {}))
    if barrier:
        execution.end_step()
    return result


def wait_device_ops() -> None:
    """Waits until every program that was started has ended. What is still pending stays so: `sync(wait=True)` computes it too.

    Raises:
        ProgramError: a program failed on the device.
    """
    runtime.in_flight.wait_all()


def unlazy(tensors: Any) -> None:
    """Computes the tensors, anywhere in a nested structure, and waits for them. For measurements; it ends no step.

    Everything else that is pending is computed in the same program.
    """
    storages: list[Storage] = []

    def take(t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, XLAShardedTensor):
            storages.append(t._handle.storage)
        return t

    map_tensors(tensors, take)
    values = [execution.materialize(storage) for storage in storages]
    for value in values:
        if value.placement.jax_sharding is not None:
            runtime.wait_for(value.data)


# --- Its rate -------------------------------------------------------------------------------------------------------------------------


class RateTracker:
    """Counts things, such as samples, and says how many of them there are in a second.

    Args:
        smooth_factor: how much of the rate before weighs in the next one, from 0 (nothing) to below 1. None: the environment variable
            `RATE_TRACKER_SMOOTHING`, else 0.4.

    Raises:
        ValueError: a factor outside of these bounds.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        factor = (
            float(os.environ.get("RATE_TRACKER_SMOOTHING", 0.4))
            if smooth_factor is None
            else smooth_factor
        )
        if not 0 <= factor < 1:
            raise ValueError(
                f"a smoothing factor lies from 0 to below 1; got {factor}. Use 0 for no smoothing."
            )
        self._factor = factor
        self._start_s = self._last_s = time.monotonic()
        self._count = self._last_count = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Counts `count` more."""
        self._count += count

    def rate(self) -> float:
        """How many in a second since the last call of this, smoothed with the rates before; the first is the plain one."""
        now = time.monotonic()
        elapsed_s = now - self._last_s
        if elapsed_s > 0:
            plain = (self._count - self._last_count) / elapsed_s
            self._rate = (
                plain
                if self._rate is None
                else (1 - self._factor) * plain + self._factor * self._rate
            )
            self._last_s, self._last_count = now, self._count
        return self._rate or 0.0

    def global_rate(self) -> float:
        """How many in a second since the tracker was made."""
        elapsed_s = time.monotonic() - self._start_s
        return self._count / elapsed_s if elapsed_s > 0 else 0.0
