"""Device `xla:0`, the one logical device, which stands for all devices of all hosts."""

import torch

from spmd_core.errors import DeviceMismatchError

XLA_DEVICE = torch.device("xla:0")


def require_logical(device: torch.device | None) -> None:
    """Raises DeviceMismatchError for a device of type `xla` with another index than 0 or none."""
    if device is not None and device.index and device.type == "xla":
        raise DeviceMismatchError(
            "device 'xla' is one logical device, which stands for all devices; "
            f"got {str(device)!r}. Write 'xla', and split a tensor over the devices by a mark: "
            "spmd.mark_sharding(tensor, mesh, partition_spec)."
        )
