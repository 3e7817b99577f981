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


def as_device(name: str, value: object) -> torch.device:
    """The device that an argument names.

    Raises:
        TypeError: it is no device, name or number.
        DeviceMismatchError: the name is of no device, or of a second logical device.

    Example:
        >>> as_device("device", "xla")
        device(type='xla')
    """
    rule = f"{name} is a device or its name"
    if not isinstance(value, str | int | torch.device) or isinstance(value, bool):
        raise TypeError(
            f"{rule}; got {value!r}, of type {type(value).__name__}. Write {name}='xla'."
        )
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise DeviceMismatchError(
            f"{rule}; got {value!r}, which torch does not know. Write {name}='xla'."
        ) from error
    require_logical(device)
    return device
