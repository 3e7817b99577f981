"""Checks of the devices that torch_xla's functions take: one logical device, and physical ones."""

from collections.abc import Sequence
from typing import Any

import spmd_core as spmd
from spmd_core.arguments import require_kind
from spmd_core.errors import DeviceMismatchError
from spmd_core.runtime import processes
from spmd_core.tensor.logical_device import as_device


def require_logical(device: Any) -> None:
    """Raises for a device argument that is neither None nor the logical device.

    Raises:
        TypeError: it is no device.
        DeviceMismatchError: it is another device; a RuntimeError, as upstream's.
    """
    if device is not None and as_device("device", device).type != "xla":
        raise DeviceMismatchError(
            f"device is the one logical device, 'xla:0'; got {str(device)!r}. "
            "Pass torch_xla.device()."
        )


def physical_names(devices: Sequence[Any]) -> list[str]:
    """The name of each device's physical one: see `xla_model.xla_real_devices`.

    Raises:
        TypeError: `devices` is no list.
        RuntimeError: a device is neither the logical device nor a physical one.
    """
    require_kind("devices", devices, list, tuple, write="[torch_xla.device()]")
    known = processes.real_devices()
    names = []
    for device in devices:
        name = known[0] if str(device) in ("xla", str(spmd.device())) else str(device)
        if name not in known:
            raise RuntimeError(
                f"a device is xla:0 or one of {', '.join(known)}; got {device}. "
                "Pass torch_xla.device()."
            )
        names.append(name)
    return names
