"""torch_xla's functions that start processes; refused in SPMD mode.

In SPMD mode there is one process for each host, which the user or a launcher starts.
"""

from collections.abc import Callable
from typing import Any

import torch

import spmd_core as spmd
from spmd_core.arguments import checked, require_callable, require_kind
from torch_xla._upstream import refuse, warn_of_one_replica


@checked(nprocs=1)
def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Runs `fn(0, *args)` in this process, with `nprocs` 1, or with None, which warns of it.

    Raises:
        TypeError: `fn` is no function, or `args` no list of its arguments.
        NotImplementedError: SPMD mode is on, in which one process drives all devices, or `nprocs`
            is neither 1 nor None.
    """
    require_callable("fn", fn)
    require_kind("args", args, tuple, list, write="the arguments after the first in a tuple")
    if spmd.is_spmd() or nprocs not in (None, 1):
        refuse(
            "xmp.spawn",
            f"starts a process for each device (nprocs={nprocs}), and here one process drives all "
            "of them",
            "Call fn(0, *args) yourself.",
        )
    if nprocs is None:
        warn_of_one_replica("xmp.spawn")
    return fn(0, *args)


class MpModelWrapper:
    """Holds a module for the functions that `spawn` runs; `to` moves it to the device."""

    def __init__(self, model: Any) -> None:
        require_kind("model", model, torch.nn.Module, write="a torch.nn.Module")
        self._model = model

    def to(self, device: Any) -> Any:
        """Moves the module to the device and returns it."""
        return self._model.to(device)


class MpSerialExecutor:
    """Runs a function in one process after another: here in the only process, immediately."""

    def run(self, fn: Callable[[], Any]) -> Any:
        """Returns `fn()`. TypeError for what is no function."""
        require_callable("fn", fn)
        return fn()
