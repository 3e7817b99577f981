"""Counters and metrics under torch_xla's names, read from `spmd_core.metrics`."""

from collections.abc import Callable
from typing import Any

from spmd_core import metrics
from spmd_core.arguments import require_kind

Sample = tuple[float, float]


def _compiled_s() -> list[float]:
    return [program.compile_s for program in metrics.programs()]


# torch_xla's counters, and how each is read from spmd_core's.
_COUNTERS: dict[str, Callable[[], int]] = {
    "MarkStep": lambda: metrics.counter("steps"),
    "UncachedCompile": lambda: metrics.counter("compiles"),
    "CachedCompile": lambda: metrics.counter("cache_hits"),
    "ExecuteReplicated": lambda: metrics.counter("executions"),
    "DeviceDataCacheMiss": lambda: metrics.counter("host_reads"),
    "ReplicateShardedData": lambda: metrics.counter("host_reads"),
    "VirtualDeviceUsage": lambda: metrics.counter("uploads"),
    "CreateOpSharding": lambda: metrics.counter("op_shardings"),
}
_FALLBACK = "aten::"


def counter_names() -> list[str]:
    """Names of the counters that are not zero.

    The counter of an operation that ran on the host begins with `aten::`.
    """
    return [name for name, read in _COUNTERS.items() if read()] + executed_fallback_ops()


def counter_value(name: str) -> int | None:
    """A counter's value; None if it is zero or unknown. TypeError for what is no name."""
    require_kind("name", name, str, write="a counter's name, such as 'MarkStep'")
    if name.startswith(_FALLBACK):
        return sum(f.count for f in metrics.host_fallbacks() if _operation(f.op) == name) or None
    return (_COUNTERS[name]() or None) if name in _COUNTERS else None


def _metric(name: str) -> tuple[int, float, list[Sample]] | None:
    if name == "CompileTime":
        seconds = _compiled_s()
        return (
            (len(seconds), sum(seconds) * 1e9, [(0.0, s * 1e9) for s in seconds])
            if seconds
            else None
        )
    if name == "InputOutputAliasCount":
        donated = [float(len(program.donated)) for program in metrics.programs()]
        return (len(donated), sum(donated), [(0.0, d) for d in donated]) if donated else None
    if name == "ExecuteReplicatedTime":
        count = metrics.counter("executions")
        return (count, 0.0, []) if count else None
    if name in ("OutboundData", "TransferToDeviceTime"):
        count, size = metrics.counter("uploads"), metrics.counter("uploaded_bytes")
        return (count, float(size) if name == "OutboundData" else 0.0, []) if count else None
    if name == "TransferFromDeviceTime":
        count = metrics.counter("host_reads")
        return (count, 0.0, []) if count else None
    return None


_METRICS = (
    "CompileTime",
    "ExecuteReplicatedTime",
    "InputOutputAliasCount",
    "OutboundData",
    "TransferFromDeviceTime",
    "TransferToDeviceTime",
)


def metric_names() -> list[str]:
    """Names of the metrics that have samples."""
    return [name for name in _METRICS if _metric(name) is not None]


def metric_data(name: str) -> tuple[int, float, list[Any]] | None:
    """(count, sum, samples as (time, value)) of a metric; None for one without samples.

    Times are in ns, sizes in bytes. Execution times are not measured, as nothing waits for the end
    of an execution: their sum is 0 and their list of samples is empty. TypeError for what is no
    name.
    """
    require_kind("name", name, str, write="a metric's name, such as 'CompileTime'")
    return _metric(name)


def clear_counters() -> None:
    """Sets all counters to zero."""
    metrics.reset()


def clear_metrics() -> None:
    """Clears the metrics. They are read from the counters, so the counters become zero too."""
    metrics.reset()


def clear_all() -> None:
    """Sets all counters and metrics to zero."""
    metrics.reset()


def metrics_report() -> str:
    """Text with all counters and metrics."""
    named = [f"Counter: {name}\n  Value: {counter_value(name)}" for name in counter_names()]
    named += [f"Metric: {name}\n  TotalSamples: {_metric(name)[0]}" for name in metric_names()]  # type: ignore[index]
    return "\n".join([*named, metrics.report()])


def short_metrics_report(
    counter_names: list[str] | None = None, metric_names: list[str] | None = None
) -> str:
    """Text with the named counters and metrics; by default the most important ones."""
    for argument, names in (("counter_names", counter_names), ("metric_names", metric_names)):
        require_kind(argument, names or [], list, tuple, write="the names in a list")
    counters = (
        ["CachedCompile", "MarkStep", "UncachedCompile"] if counter_names is None else counter_names
    )
    metrics_ = ["CompileTime", "ExecuteReplicatedTime"] if metric_names is None else metric_names
    lines = [
        f"Counter: {name}\n  Value: {value}"
        for name in counters
        if (value := counter_value(name)) is not None
    ]
    lines += [
        f"Metric: {name}\n  TotalSamples: {data[0]}"
        for name in metrics_
        if (data := _metric(name)) is not None
    ]
    return "\n".join(lines)


def executed_fallback_ops() -> list[str]:
    """Names of the operations that ran on the host, such as `aten::_add_relu`."""
    return list(dict.fromkeys(_operation(fallback.op) for fallback in metrics.host_fallbacks()))


def _operation(overload: str) -> str:
    return overload.split(".")[0]
