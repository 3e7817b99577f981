"""Top-level functions of the package: devices, steps, compiled functions, seeds."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import spmd_core as spmd
from spmd_core.arguments import checked, require_callable, require_kind
from spmd_core.runtime import processes
from spmd_core.torch_backend import random_state
from torch_xla._environment import is_set
from torch_xla._upstream import refuse, refused, warn_of_one_replica
from torch_xla.core._devices import require_logical


def device(index: int | None = None) -> torch.device:
    """The one logical device, `xla:0`. IndexError for any other index."""
    if index not in (None, 0):
        raise IndexError(
            f"there is one logical device, with index 0; got {index}. Call torch_xla.device()."
        )
    return spmd.device()


def devices() -> list[torch.device]:
    """The logical devices: one."""
    return [spmd.device()]


def real_devices() -> list[str]:
    """The physical devices, such as `CPU:0`."""
    return processes.real_devices()


def device_count() -> int:
    """Number of logical devices: 1."""
    return 1


@checked()
def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """Ends a step: `spmd_core.sync`."""
    spmd.sync(wait=wait or is_set("XLA_SYNC_WAIT"))


@contextmanager
def step() -> Iterator[None]:
    """Context of one step: syncs on entry and on exit, also when an exception leaves it."""
    try:
        with spmd.step():
            yield
    except Exception:
        spmd.sync()
        raise


@checked()
def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    custom_compile_options: dict[str, Any] | None = None,
    *,
    capture: bool = False,
) -> Any:
    """`spmd_core.compile`: runs a function, or as a context a block, as one program.

    `custom_compile_options` apply to all programs from now on. `capture`, which is not torch_xla's,
    runs the program of a function again without its Python code, once two calls agree.
    """
    if custom_compile_options is not None:
        _set_compile_options("custom_compile_options", custom_compile_options)
    return spmd.compile(
        f,
        full_graph=bool(full_graph),
        name=name,
        max_different_graphs=max_different_graphs,
        capture=capture,
    )


def set_custom_compile_options(options: dict[str, Any]) -> None:
    """Sets XLA's own compiler options for all programs from now on; an empty dict clears them.

    They are stored in `spmd_core.config.compiler_options`.

    Raises:
        TypeError: `options` is no dict of XLA's names to texts, numbers and booleans.
    """
    _set_compile_options("options", options)


def _set_compile_options(name: str, options: dict[str, Any]) -> None:
    write = "a dict of XLA's options, such as {'xla_cpu_enable_fast_math': False}"
    require_kind(name, options, Mapping, write=write)
    spmd.config.compiler_options = dict(options)


def manual_seed(seed: int, device: torch.device | None = None) -> None:
    """Seeds torch's generator, from which the device's random numbers derive.

    RuntimeError for another device than the logical one.
    """
    require_logical(device)
    random_state.manual_seed(seed)


@checked()
def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    """Runs `fn(0, *args)` in this process; warns of it unless `debug_single_process` asks for it.

    Raises:
        TypeError: `fn` is no function, or `args` no list of its arguments.
        NotImplementedError: SPMD mode is on; there one process drives all devices.
    """
    require_callable("fn", fn)
    require_kind("args", args, tuple, list, write="the arguments after the first in a tuple")
    if spmd.is_spmd():
        refuse(
            "torch_xla.launch",
            "starts a process for each device, and in SPMD mode one drives all of them",
            "Call fn(0, *args) yourself.",
        )
    if not debug_single_process:
        warn_of_one_replica("torch_xla.launch")
    fn(0, *args)


_REASON = "exports a model for TensorFlow's and other runtimes"
_INSTEAD = "Use torch.export, or spmd_core.debugging.stablehlo for the text of a program."
save_as_stablehlo = refused("torch_xla.save_as_stablehlo", _REASON, _INSTEAD)
save_torch_model_as_stablehlo = refused(
    "torch_xla.save_torch_model_as_stablehlo", _REASON, _INSTEAD
)
