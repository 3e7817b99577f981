"""Profiles: traces of host and devices under `logdir/plugins/profile`, in the format of TensorBoard's profile plugin (XProf) and Perfetto.

A device's events carry the operation that was recorded (`aten::mm`) in the program's own names; `Trace` and `StepTrace` put the host's phases beside.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import jax

from spmd_core.errors import SpmdError, UnsupportedOpError
from spmd_core.program import execution
from spmd_core.runtime import buffers, devices, processes

F = TypeVar("F", bound=Callable[..., Any])
_server: Any = None
_logdir: str | None = None
_is_step_marked = False


def start_server(port: int, *, only_on_master: bool = True) -> None:
    """Starts the server from which a tool takes profiles of this process while it runs, in TensorBoard for instance. Starts the devices.

    Args:
        port: where it listens, on this host.
        only_on_master: only in the first process of each host, as a port serves one; the others do nothing.

    Raises:
        SpmdError: the server runs already, or cannot listen on the port.
    """
    global _server
    devices.all_devices()
    if only_on_master and not processes.is_master(local=True):
        return
    if _server is not None:
        raise SpmdError(
            f"a process has one profiler server; start_server({port}) came while it runs. Call stop_server() first."
        )
    try:
        _server = jax.profiler.start_server(port)
    except (ValueError, RuntimeError) as error:
        raise SpmdError(
            f"the profiler server must be able to listen; got port {port}: {error}. Choose a free port."
        ) from error


def stop_server() -> None:
    """Stops the profiler server. Raises SpmdError where none runs."""
    global _server
    if _server is None:
        raise SpmdError(
            "stop_server ends what start_server began; got a call without a server. Call start_server(port) first."
        )
    _server = None
    jax.profiler.stop_server()


def start_trace(logdir: str | os.PathLike[str]) -> None:
    """Begins to record what host and devices do, until `stop_trace`. Does not wait for the device.

    Raises:
        SpmdError: a trace is being recorded already.
    """
    global _logdir
    if _logdir is not None:
        raise SpmdError(
            f"one trace is recorded at a time; one into {_logdir} is running. Call stop_trace() first."
        )
    devices.all_devices()
    try:
        jax.profiler.start_trace(logdir)
    except RuntimeError as error:
        raise SpmdError(
            f"one trace is recorded at a time; jax records one of its own: {error}. End that one first."
        ) from error
    _logdir = str(logdir)


def stop_trace() -> None:
    """Ends the recording and writes it. Waits for the programs that were started, so that their events are in it.

    Raises:
        SpmdError: no trace is being recorded.
        ProgramError: a program failed on the device; the trace is written.
    """
    global _logdir
    if _logdir is None:
        raise SpmdError(
            "stop_trace ends what start_trace began; got a call without a trace. Call start_trace(logdir) first."
        )
    try:
        buffers.in_flight.wait_all()
    finally:
        _logdir = None
        jax.profiler.stop_trace()


@contextmanager
def trace(logdir: str | os.PathLike[str]) -> Iterator[None]:
    """Records what runs inside. End steps inside too, with `sync()`: what is pending at the end is not in it."""
    start_trace(logdir)
    try:
        yield
    finally:
        stop_trace()


def trace_remote(service_addr: str, logdir: str, duration_ms: int = 1000) -> None:
    """Refused: would take a profile of another process, through its server. Raises UnsupportedOpError."""
    raise UnsupportedOpError(
        f"a profile of another process needs a client of its profiler server, which jaxlib does not have; got {service_addr!r} for {duration_ms} ms. "
        f"Install xprof and run `python -m jax.collect_profile PORT {duration_ms} --log_dir {logdir}`, or call start_trace in that process."
    )


class Trace(ContextDecorator):
    """A named stretch of time on the host, in the trace that is being recorded; costs next to nothing where none is. A context or a decorator.

    Args:
        name: what the trace shows.
        **facts: shown with it.

    Example:
        >>> with Trace("data"):
        ...     batch = [1, 2]
    """

    def __init__(self, name: str, **facts: Any) -> None:
        self.name, self._facts = name, facts
        self._annotation: Any = None

    def _recreate_cm(self) -> "Trace":
        # A stretch is used once, and the function may call itself.
        return type(self)(self.name, **self._facts)

    def _annotate(self) -> Any:
        return jax.profiler.TraceAnnotation(self.name, **self._facts)

    def __enter__(self) -> "Trace":
        self._annotation = self._annotate()
        self._annotation.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._annotation.__exit__(kind, error, traceback)


class StepTrace(Trace):
    """One step of the training loop: a stretch of time, with a `sync()` at its end, save where an exception ends it.

    Tools show time by step where `step_num` is given. The step is then ended, so whoever ends steps too, such as a loader, asks
    `take_step_mark()` whether it need not.

    Args:
        name: what the trace shows.
        **facts: shown with it; `step_num` numbers the step.

    Example:
        >>> import torch
        >>> with StepTrace("train", step_num=3):
        ...     loss = torch.ones(2, device="xla").sum()
    """

    def _annotate(self) -> Any:
        return jax.profiler.StepTraceAnnotation(self.name, **self._facts)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _is_step_marked
        try:
            if kind is None:
                execution.end_step()
                _is_step_marked = True
        finally:
            super().__exit__(kind, error, traceback)


def take_step_mark() -> bool:
    """Whether a `StepTrace` has ended a step since this was last asked.

    A loader that ends a step before each batch asks here first, and leaves it out where this is True: a step ends once, and so do its closures.
    """
    global _is_step_marked
    was, _is_step_marked = _is_step_marked, False
    return was


def trace_me(scope: str) -> Callable[[F], F]:
    """A decorator that puts each call of the function into the trace under the name `scope`."""
    return Trace(scope)
