"""Profiles: traces of host and devices, for TensorBoard's profile plugin (XProf) and Perfetto.

Traces are written under `logdir/plugins/profile`. A device's events carry the names of the recorded
operations (`aten::mm`); `Trace` and `StepTrace` add phases of the host.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax

from spmd_core.arguments import checked, require_int, require_kind
from spmd_core.errors import SpmdError, UnsupportedOpError
from spmd_core.program import execution
from spmd_core.runtime import devices, in_flight, processes

F = TypeVar("F", bound=Callable[..., Any])
# The running profiler server.
# Guarded by: nothing, as the main thread starts and stops it. Cleared by: stop_server().
_server: Any = None
# The folder of the running trace.
# Guarded by: nothing, as the main thread starts and stops it. Cleared by: stop_trace().
_logdir: str | None = None
# Whether a `StepTrace` has ended the step.
# Guarded by: nothing, as one thread ends steps. Cleared by: take_step_mark().
_is_step_marked = False


@checked(port=0)
def start_server(port: int, *, only_on_master: bool = True) -> None:
    """Starts the server from which tools such as TensorBoard profile this running process.

    Starts the devices.

    Args:
        port: the port of this host on which the server listens.
        only_on_master: start it only in the first process of each host, as a port serves one
            process; the call does nothing in the others.

    Raises:
        ValueError: there is no such port.
        SpmdError: the server runs already, or cannot listen on the port.
    """
    global _server
    require_int("port", port, least=0, most=65535)
    devices.all_devices()
    if only_on_master and not processes.is_master(local=True):
        return
    if _server is not None:
        raise SpmdError(
            f"a process has one profiler server; start_server({port}) came while it runs. "
            "Call stop_server() first."
        )
    try:
        _server = jax.profiler.start_server(port)
    except (ValueError, RuntimeError) as error:
        raise SpmdError(
            "the profiler server must be able to listen; "
            f"got port {port}: {error}. Choose a free port."
        ) from error


def stop_server() -> None:
    """Stops the profiler server. Raises SpmdError if none runs."""
    global _server
    if _server is None:
        raise SpmdError(
            "stop_server ends what start_server began; got a call without a server. "
            "Call start_server(port) first."
        )
    _server = None
    jax.profiler.stop_server()


def start_trace(logdir: str | os.PathLike[str]) -> None:
    """Starts recording a trace of host and devices, until `stop_trace`. Does not wait.

    Raises:
        TypeError: `logdir` is no path.
        SpmdError: a trace is being recorded already, or `logdir` can be no folder.
    """
    global _logdir
    require_kind("logdir", logdir, str, os.PathLike, write="the path of a folder for traces")
    above = [Path(logdir), *Path(logdir).parents]
    if not next(path for path in above if path.exists()).is_dir():
        raise SpmdError(
            f"a trace is written into a folder; got {os.fspath(logdir)!r}, a file or below one. "
            "Name another path."
        )
    if _logdir is not None:
        raise SpmdError(
            f"one trace is recorded at a time; one into {_logdir} is running. "
            "Call stop_trace() first."
        )
    devices.all_devices()
    try:
        jax.profiler.start_trace(logdir)
    except RuntimeError as error:
        raise SpmdError(
            "one trace is recorded at a time; "
            f"jax records one of its own: {error}. End that one first."
        ) from error
    _logdir = str(logdir)


def stop_trace() -> None:
    """Ends the recording and writes the trace.

    Waits for the programs in flight, so that the trace contains their events.

    Raises:
        SpmdError: no trace is being recorded.
        ProgramError: a program failed on the device; the trace is written nevertheless.
    """
    global _logdir
    if _logdir is None:
        raise SpmdError(
            "stop_trace ends what start_trace began; got a call without a trace. "
            "Call start_trace(logdir) first."
        )
    try:
        in_flight.programs.wait_all()
    finally:
        _logdir = None
        jax.profiler.stop_trace()


@contextmanager
def trace(logdir: str | os.PathLike[str]) -> Iterator[None]:
    """Records a trace of the block.

    End steps inside the block too, with `sync()`: operations that are still pending at its end are
    not in the trace.
    """
    start_trace(logdir)
    try:
        yield
    finally:
        stop_trace()


@checked(duration_ms=1)
def trace_remote(service_addr: str, logdir: str, duration_ms: int = 1000) -> None:
    """Refused: would profile another process through its server. Raises UnsupportedOpError."""
    raise UnsupportedOpError(
        "a profile of another process needs a client of its profiler server, "
        f"which jaxlib does not have; got {service_addr!r} for {duration_ms} ms. "
        "Install xprof and run `python -m jax.collect_profile "
        f"PORT {duration_ms} --log_dir {logdir}`, or call start_trace in that process."
    )


class Trace(ContextDecorator):
    """A named interval of host time in the current trace, as a context manager or a decorator.

    Costs next to nothing if no trace is being recorded.

    Args:
        name: the name that the trace shows.
        **facts: metadata that the trace shows with it.

    Raises:
        TypeError: `name` is no text.

    Example:
        >>> with Trace("data"):
        ...     batch = [1, 2]
    """

    def __init__(self, name: str, **facts: Any) -> None:
        require_kind("name", name, str, write="the name that the trace shows, such as 'data'")
        self.name, self._facts = name, facts
        self._annotation: Any = None

    def _recreate_cm(self) -> "Trace":
        # An interval is used once, and the decorated function may call itself.
        return type(self)(self.name, **self._facts)

    def _annotate(self) -> jax.profiler.TraceAnnotation:
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
    """One step of the training loop: a `Trace` interval that ends with a `sync()`.

    An exception in the block ends it without the `sync()`. Tools show time by step if `step_num` is
    given. Other code that ends steps, such as a loader, calls `take_step_mark()` to learn whether
    the step has ended already.

    Args:
        name: the name that the trace shows.
        **facts: metadata that the trace shows with it; `step_num` numbers the step.

    Example:
        >>> import torch
        >>> with StepTrace("train", step_num=3):
        ...     loss = torch.ones(2, device="xla").sum()
    """

    def _annotate(self) -> jax.profiler.TraceAnnotation:
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
    """Whether a `StepTrace` has ended a step since the previous call of this function.

    A loader that ends a step before each batch calls this first, and ends none if the result is
    True: a step ends once, and its closures run once.
    """
    global _is_step_marked
    was, _is_step_marked = _is_step_marked, False
    return was


def trace_me(scope: str) -> Callable[[F], F]:
    """A decorator that puts each call of the function into the trace, under the name `scope`."""
    return Trace(scope)
