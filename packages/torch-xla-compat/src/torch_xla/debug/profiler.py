"""Profiles of host and devices, written for TensorBoard's profile plugin."""

from spmd_core import profiler
from spmd_core.errors import SpmdError
from spmd_core.profiler import StepTrace as StepTrace
from spmd_core.profiler import Trace as Trace
from spmd_core.profiler import trace_me as trace_me
from torch_xla._upstream import raising


def start_trace(log_dir: str) -> None:
    """Records until `stop_trace`. RuntimeError while another trace is recorded."""
    with raising(RuntimeError, SpmdError):
        profiler.start_trace(log_dir)


def stop_trace() -> None:
    """Writes what was recorded. RuntimeError where nothing is."""
    with raising(RuntimeError, SpmdError):
        profiler.stop_trace()


def start_server(port: int, only_on_master: bool = True) -> None:
    """Listens for tools that ask for a profile. RuntimeError where it listens already, or cannot."""
    with raising(RuntimeError, SpmdError):
        profiler.start_server(port, only_on_master=only_on_master)


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
    """Asks a profiler server for a profile: see `spmd_core.profiler.trace_remote`."""
    profiler.trace_remote(service_addr, logdir, duration_ms)


def trace_detached(service_addr: str, logdir: str, duration_ms: int = 1000, **kwargs: int) -> None:
    """`trace`."""
    profiler.trace_remote(service_addr, logdir, duration_ms)
