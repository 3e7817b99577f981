"""Calls a function, in another thread, when a tensor is computed."""

import threading
from collections.abc import Callable

import torch

from spmd_core.arguments import require_callable
from spmd_core.program import execution
from spmd_core.runtime.in_flight import wait_for
from spmd_core.tensor.sharded_tensor import device_tensor


def on_ready_callback(tensor: torch.Tensor, callback: Callable[[], None]) -> None:
    """Calls `callback` in a thread of its own when the tensor is computed. Does not wait.

    Starts the program of what is pending, as `torch_xla.sync` does.

    Raises:
        TypeError: `callback` is no function.
        RuntimeError: the tensor is not on the device.
    """
    require_callable("callback", callback)
    # A later program may take over the tensor's own buffer, but not that of a slice, which the same
    # program computes.
    part = device_tensor(tensor, "on_ready_callback").detach().reshape(-1)[:1].clone()
    array = execution.place(device_tensor(part, "on_ready_callback")._handle.storage)

    def wait() -> None:
        wait_for(array)
        callback()

    threading.Thread(target=wait, name="on_ready_callback", daemon=True).start()


def on_ready_event(tensor: torch.Tensor) -> threading.Event:
    """An event that is set when the tensor is computed. Does not wait."""
    event = threading.Event()
    on_ready_callback(tensor, event.set)
    return event
