"""What a training loop calls: the optimizer's step, waiting, and rates."""

import os
import time
from typing import Any

import torch

from spmd_core.graph.storage import Storage
from spmd_core.program import execution
from spmd_core.runtime import buffers
from spmd_core.steps.structures import map_tensors
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

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
    buffers.in_flight.wait_all()


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
            buffers.wait_for(value.data)


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
