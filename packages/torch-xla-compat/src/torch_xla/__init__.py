"""PyTorch/XLA's import name over `spmd_core`: programs written for torch_xla's SPMD mode run unchanged on stock torch and jaxlib."""

import os as _os
from collections.abc import Callable as _Callable
from collections.abc import Iterator as _Iterator
from contextlib import contextmanager as _contextmanager
from importlib import metadata as _metadata
from typing import Any as _Any

import torch as _torch

import spmd_core as _spmd
from spmd_core import random_state as _random_state
from spmd_core import step_program as _step_program
from torch_xla._environment import apply as _apply_environment
from torch_xla._upstream import refuse as _refuse

# The version of PyTorch/XLA whose names these are: programs ask for it to learn what they may call.
__version__ = "2.9.0"

if any(_metadata.distributions(name="torch_xla")):
    raise ImportError(
        "one distribution must own the import name torch_xla; both PyTorch/XLA (torch_xla) and torch-xla-compat are installed. "
        "Remove the first and install the second again: pip uninstall torch_xla, then pip install --force-reinstall --no-deps torch-xla-compat."
    )
_apply_environment()


def device(index: int | None = None) -> _torch.device:
    """The one logical device, `xla:0`. IndexError for another index."""
    if index not in (None, 0):
        raise IndexError(f"there is one logical device, with index 0; got {index}. Call torch_xla.device().")
    return _spmd.device()


def devices() -> list[_torch.device]:
    """The logical devices: one."""
    return [_spmd.device()]


def real_devices() -> list[str]:
    """The physical devices, such as `CPU:0`."""
    return _spmd.real_devices()


def device_count() -> int:
    """Number of logical devices: 1."""
    return 1


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """Ends a step: `spmd_core.sync`."""
    _spmd.sync(wait=wait or _os.environ.get("XLA_SYNC_WAIT", "0") == "1")


@_contextmanager
def step() -> _Iterator[None]:
    """A step as a context: a sync before it and after it, also where an exception leaves it."""
    try:
        with _step_program.step():
            yield
    except Exception:
        _spmd.sync()
        raise


def compile(
    f: _Callable[..., _Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    custom_compile_options: dict[str, _Any] | None = None,
) -> _Any:
    """`spmd_core.compile`: the function (or the block, as a context) becomes one program. Compiler options are not available."""
    if custom_compile_options:
        _refuse("torch_xla.compile(custom_compile_options=...)", "sets options of PyTorch/XLA's own compiler call", "Set XLA_FLAGS.")
    return _step_program.compile(f, full_graph=bool(full_graph), name=name, max_different_graphs=max_different_graphs)


def set_custom_compile_options(options: dict[str, _Any]) -> None:
    """Refused, but for the empty dict that clears them."""
    if options:
        _refuse("set_custom_compile_options", "sets options of PyTorch/XLA's own compiler call", "Set XLA_FLAGS.")


def manual_seed(seed: int, device: _torch.device | None = None) -> None:
    """Seeds torch's generator, which randomness on the device follows."""
    _random_state.manual_seed(seed)


def launch(fn: _Callable[..., _Any], args: tuple[_Any, ...] = (), start_method: str = "spawn", debug_single_process: bool = False) -> None:
    """Runs `fn(0, *args)` here. NotImplementedError in SPMD mode, where one process drives all devices."""
    if _spmd.is_spmd():
        _refuse("torch_xla.launch", "starts a process for each device, and in SPMD mode one drives all of them", "Call fn(0, *args) yourself.")
    fn(0, *args)


from torch_xla import _XLAC as _XLAC  # noqa: E402
from torch_xla import _internal as _internal  # noqa: E402
from torch_xla import amp as amp  # noqa: E402
from torch_xla import core as core  # noqa: E402
from torch_xla import debug as debug  # noqa: E402
from torch_xla import distributed as distributed  # noqa: E402
from torch_xla import experimental as experimental  # noqa: E402
from torch_xla import runtime as runtime  # noqa: E402
from torch_xla import utils as utils  # noqa: E402
from torch_xla.core import xla_model as xm  # noqa: E402, F401
from torch_xla.debug import metrics as _metrics  # noqa: E402, F401
from torch_xla.debug import profiler as _profiler  # noqa: E402, F401
from torch_xla.distributed import parallel_loader as _parallel_loader  # noqa: E402, F401
from torch_xla.distributed import spmd as _spmd_names  # noqa: E402, F401
from torch_xla.distributed import xla_multiprocessing as xmp  # noqa: E402, F401
from torch_xla.utils import utils as xu  # noqa: E402, F401

xr = runtime
