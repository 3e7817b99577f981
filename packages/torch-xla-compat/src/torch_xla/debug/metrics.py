"""Counters and metrics under torch_xla's names, read from `spmd_core.metrics`."""

from collections.abc import Callable
from typing import Any

from spmd_core import metrics

Sample = tuple[float, float]


def _compiled_s() -> list[float]:
    return [program.compile_s for program in metrics.programs()]


# What torch_xla counts, and where it is counted here.
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
    """The counters that have counted something. One of an operation that ran on the host begins with `aten::`."""
    return [name for name, read in _COUNTERS.items() if read()] + executed_fallback_ops()


def counter_value(name: str) -> int | None:
    """A counter's value, None where it never counted."""
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
    """The metrics that have samples."""
    return [name for name in _METRICS if _metric(name) is not None]


def metric_data(name: str) -> tuple[int, float, list[Any]] | None:
    """(count, sum, samples as (time, value)), None where there is none. Times of executions are not measured, as nobody waits for them: sum 0."""
    return _metric(name)


def clear_counters() -> None:
    """Sets all counters to zero."""
    metrics.reset()


def clear_metrics() -> None:
    """Forgets the metrics; here they are read from the counters, which are set to zero."""
    metrics.reset()


def clear_all() -> None:
    """Sets everything to zero."""
    metrics.reset()


def metrics_report() -> str:
    """A table of everything."""
    named = [f"Counter: {name}\n  Value: {counter_value(name)}" for name in counter_names()]
    named += [f"Metric: {name}\n  TotalSamples: {_metric(name)[0]}" for name in metric_names()]  # type: ignore[index]
    return "\n".join([*named, metrics.report()])


def short_metrics_report(
    counter_names: list[str] | None = None, metric_names: list[str] | None = None
) -> str:
    """The named counters and metrics only; without names, the most telling ones."""
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
    """The operations that ran on the host, such as `aten::_add_relu`."""
    return list(dict.fromkeys(_operation(fallback.op) for fallback in metrics.host_fallbacks()))


def _operation(overload: str) -> str:
    return overload.split(".")[0]
