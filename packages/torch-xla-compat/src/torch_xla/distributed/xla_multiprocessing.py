"""Starting processes: under SPMD there is one for each host, started by hand or by a launcher."""

from collections.abc import Callable
from typing import Any

import spmd_core as spmd
from torch_xla._upstream import refuse


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Runs `fn(0, *args)` here for `nprocs=1`. NotImplementedError under SPMD, and for several processes.

    Raises:
        NotImplementedError: SPMD mode is on, where one process drives all devices, or more than one process is asked for.
    """
    if spmd.is_spmd() or nprocs not in (None, 1):
        refuse(
            "xmp.spawn",
            f"starts a process for each device (nprocs={nprocs}), and here one process drives all of them",
            "Call fn(0, *args) yourself.",
        )
    return fn(0, *args)


class MpModelWrapper:
    """Holds a module for functions that `spawn` runs; `to` moves it to the device."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def to(self, device: Any) -> Any:
        """The module on the device."""
        return self._model.to(device)


class MpSerialExecutor:
    """Runs functions one process after another: here, at once."""

    def run(self, fn: Callable[[], Any]) -> Any:
        """`fn()`."""
        return fn()
