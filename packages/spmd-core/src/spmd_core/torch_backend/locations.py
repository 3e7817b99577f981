"""`torch.load(..., map_location="xla")`: the location of storages on device `xla`."""

from typing import Any

import torch

from spmd_core.tensor.logical_device import require_logical
from spmd_core.tensor.stored_bytes import HostBytes

# After torch's own locations, the last of which has 26.
_PRIORITY = 30


def _location_of(storage: Any) -> str | None:
    return "xla:0" if isinstance(storage, HostBytes) else None


def _restore(storage: Any, location: str) -> Any:
    """Marks host memory as device memory, if the location is the device.

    `Tensor.set_`, by which torch rebuilds tensors, then makes a storage of the device over it.
    """
    if location.split(":")[0] != "xla":
        return None
    require_logical(torch.device(location))
    storage.__class__ = HostBytes
    return storage


def install() -> None:
    """Registers the location with torch."""
    torch.serialization.register_package(_PRIORITY, _location_of, _restore)
