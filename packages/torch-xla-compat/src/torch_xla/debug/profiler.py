"""Records profiles of host and devices for TensorBoard's profile plugin."""

from spmd_core.arguments import checked
from spmd_core.debugging import profiler
from spmd_core.debugging.profiler import StepTrace as StepTrace
from spmd_core.debugging.profiler import Trace as Trace
from spmd_core.debugging.profiler import trace_me as trace_me
from spmd_core.errors import SpmdError
from torch_xla._upstream import raising


def start_trace(log_dir: str) -> None:
    """Records a trace until `stop_trace`. RuntimeError while another one is recorded."""
    with raising(RuntimeError, SpmdError):
        profiler.start_trace(log_dir)


def stop_trace() -> None:
    """Ends the recording and writes the trace. RuntimeError if none is recorded."""
    with raising(RuntimeError, SpmdError):
        profiler.stop_trace()


@checked(port=0)
def start_server(port: int, only_on_master: bool = True) -> None:
    """Starts a server for tools that request profiles.

    Raises:
        RuntimeError: the server runs already, or cannot start.
    """
    with raising(RuntimeError, SpmdError):
        profiler.start_server(port, only_on_master=only_on_master)


@checked(
    duration_ms=1,
    num_tracing_attempts=0,
    host_tracer_level=0,
    device_tracer_level=0,
    delay_ms=0,
    timeout_s=0,
)
def trace(
    service_addr: str,
    logdir: str,
    duration_ms: int = 1000,
    num_tracing_attempts: int = 3,
    host_tracer_level: int = 2,
    device_tracer_level: int = 1,
    delay_ms: int = 0,
    timeout_s: int = 120,
    interactive: bool = False,
) -> None:
    """Refused with NotImplementedError: see `spmd_core.debugging.profiler.trace_remote`."""
    profiler.trace_remote(service_addr, logdir, duration_ms)


@checked(duration_ms=1)
def trace_detached(service_addr: str, logdir: str, duration_ms: int = 1000, **kwargs: int) -> None:
    """Refused like `trace`."""
    profiler.trace_remote(service_addr, logdir, duration_ms)
