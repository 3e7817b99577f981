"""The device guard of device type XLA, by which torch's C++ gets the current device and stream."""

import ctypes
import itertools
import re
from pathlib import Path

import torch
from torch.utils import backend_registration

from spmd_core import releases
from spmd_core.errors import SpmdError

_FOLDER = Path(torch.__file__).parent
_HEADER = "c10/core/impl/DeviceGuardImplInterface.h"


class _XlaGuard(backend_registration._DummyDeviceGuard):
    """A device guard without state, as there is one logical device and no stream to switch.

    torch calls `type_` from many of the guard's functions: an iterator's method, which is C, is the
    fastest, and has no bytecodes between which Python would handle a signal.
    """

    type_ = staticmethod(itertools.repeat(torch._C._autograd.DeviceType.XLA).__next__)


def install() -> None:
    """Registers a guard for DeviceType.XLA.

    torch's C++ looks up the guard of a tensor's device type in c10's registry (in `Tensor.to` and
    in autograd's engine), and aborts if there is none. From Python, torch can only make a guard for
    PrivateUse1, so this function makes that one and moves it to XLA's slot, leaving PrivateUse1
    free. No longer needed once torch can register a Python guard for any device type.
    """
    library = ctypes.CDLL(str(_FOLDER / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * 25).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    xla, private, cpu = (
        int(getattr(torch._C._autograd.DeviceType, name)) for name in ("XLA", "PrivateUse1", "CPU")
    )
    if registry[xla]:
        raise SpmdError(
            "device type 'xla' must not have an owner when spmd_core is imported; "
            "another package (torch_xla?) has registered it. "
            "Uninstall that package, or import it in another process."
        )
    before = registry[private]
    torch._C._acc.register_python_privateuseone_device_guard(_XlaGuard())
    made, of_cpu = registry[private], registry[cpu]
    if not of_cpu or not made or made == before:
        raise SpmdError(
            f"torch {torch.__version__} lays out its device guards in a way that spmd_core does "
            "not know. Use torch 2.11 or later."
        )
    _take_streams_from(of_cpu, made)
    registry[xla], registry[private] = made, before


def _take_streams_from(of_cpu: int, guard: int) -> None:
    """Gives a Python guard the CPU's `getStream`, for a device without streams.

    torch calls it for each node of autograd's graph, as a function that must not throw. The one of
    a Python guard calls `type_`, and pybind looks at the calling frame for that: there Python may
    handle a signal, whose exception ends the process ("terminate called without an active
    exception"). It also takes time. No longer needed once torch's own does not call Python.

    Args:
        of_cpu: the address of the CPU's guard.
        guard: the address of the Python guard.
    """
    names = virtual_functions()
    if "getStream" not in names:
        releases.note_absent(_HEADER)
        return
    # The table starts with the offset of the object and its type; the destructor has two entries.
    size = 2 + len(names) + 2
    pointer = ctypes.sizeof(ctypes.c_void_p)
    tables = [ctypes.c_void_p.from_address(address) for address in (guard, of_cpu)]
    own, cpu = (
        (ctypes.c_void_p * size).from_address(table.value - 2 * pointer)  # type: ignore[operator]
        for table in tables
    )
    changed = (ctypes.c_void_p * size)(*own)
    position = 2 + names.index("getStream")
    changed[position] = cpu[position]
    tables[0].value = ctypes.addressof(changed) + 2 * pointer
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(changed))  # it lives as long as the process


def virtual_functions() -> list[str]:
    """The virtual functions of torch's device guards, in their order, without the destructor.

    From the header that comes with torch; empty if it is not there, or has another order of this.
    """
    header = _FOLDER / "include" / _HEADER
    if not header.exists():
        return []
    names = re.findall(r"^  virtual [\w:]+\*? (\w+)\(", header.read_text(), re.MULTILINE)
    is_known = names[:1] == ["type"] and header.read_text().count("\n  virtual ") == len(names) + 1
    return names if is_known else []
