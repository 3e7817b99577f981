"""Functions for training loops: the optimizer's step, waiting for the devices, and rates."""

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from spmd_core.arguments import checked, require_kind
from spmd_core.graph.storage import Storage
from spmd_core.program import execution
from spmd_core.program.leaves import array_of
from spmd_core.runtime import in_flight
from spmd_core.steps.structures import map_tensors
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@checked()
def optimizer_step(
    optimizer: torch.optim.Optimizer,
    *,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
) -> Any:
    """Calls `optimizer.step(**optimizer_args)` and returns its result.

    Gradients need no reduction, as they are those of the global batch.

    Args:
        optimizer: the optimizer.
        barrier: whether to end the step afterwards, as `sync()` does.
        optimizer_args: keyword arguments for the optimizer's `step`.

    Raises:
        TypeError: `optimizer` is none, or `optimizer_args` no dict of names.
    """
    require_kind("optimizer", optimizer, torch.optim.Optimizer, write="a torch.optim.Optimizer")
    named = {} if optimizer_args is None else optimizer_args
    if not isinstance(named, Mapping) or any(not isinstance(name, str) for name in named):
        raise TypeError(
            "optimizer_args is a dict of keyword arguments of the optimizer's step(); got "
            f"{optimizer_args!r}. Write for instance optimizer_args={{'closure': closure}}."
        )
    result = optimizer.step(**named)
    if barrier:
        execution.end_step()
    return result


def wait_device_ops() -> None:
    """Waits until all started programs have ended.

    Pending tensors stay pending; `sync(wait=True)` computes them, too.

    Raises:
        ProgramError: a program failed on the device.
    """
    in_flight.programs.wait_all()


def unlazy(tensors: Any) -> None:
    """Computes the tensors in a nested structure and waits for them. Does not end the step.

    For measurements. The same program also computes everything else that is pending.
    """
    storages: list[Storage] = []

    def collect(t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, XLAShardedTensor):
            storages.append(t._handle.storage)
        return t

    map_tensors(tensors, collect)
    values = [execution.materialize(storage) for storage in storages]
    for value in values:
        if value.placement.jax_sharding is not None:
            in_flight.wait_for(array_of(value))


def _smoothing() -> float:
    """`RATE_TRACKER_SMOOTHING`, a number; 0.4 if it is unset."""
    text = os.environ.get("RATE_TRACKER_SMOOTHING", "0.4")
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"RATE_TRACKER_SMOOTHING is a number from 0 to below 1; got {text!r}. "
            "Correct it or unset it."
        ) from None


class RateTracker:
    """Counts items, such as samples, and computes their number per second.

    Args:
        smooth_factor: the weight of the previous rate in the next one, from 0 (no smoothing) to
            below 1. None for the environment variable `RATE_TRACKER_SMOOTHING`, or 0.4 if it is
            unset.

    Raises:
        ValueError: the factor is out of range.
    """

    @checked(smooth_factor=0)
    def __init__(self, smooth_factor: float | None = None) -> None:
        factor = _smoothing() if smooth_factor is None else smooth_factor
        if not 0 <= factor < 1:
            raise ValueError(
                f"a smoothing factor lies from 0 to below 1; got {factor}. Use 0 for no smoothing."
            )
        self._factor = factor
        self._start_s = self._last_s = time.monotonic()
        self._count = self._last_count = 0.0
        self._rate: float | None = None

    @checked(count=0)
    def add(self, count: float) -> None:
        """Adds `count` items."""
        self._count += count

    def rate(self) -> float:
        """Items per second since the previous call, exponentially smoothed.

        The first call returns the rate since the tracker was made, without smoothing.
        """
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
        """Items per second since the tracker was made."""
        elapsed_s = time.monotonic() - self._start_s
        return self._count / elapsed_s if elapsed_s > 0 else 0.0
