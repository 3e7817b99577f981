"""Automatic mixed precision on the device, by torch's own autocast and scaler."""

import torch
from torch.amp import GradScaler as _GradScaler

from spmd_core.arguments import checked, require_kind
from spmd_core.tensor.logical_device import as_device


class autocast(torch.autocast):
    """`torch.autocast("xla")` that also takes a device in place of the device type."""

    @checked()
    def __init__(
        self,
        device: torch.device | str = "xla",
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        cache_enabled: bool | None = True,
    ) -> None:
        if dtype is not None:
            require_kind("dtype", dtype, torch.dtype, write="for instance dtype=torch.bfloat16")
        chosen = as_device("device", device).type
        super().__init__(chosen, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(_GradScaler):
    """torch's gradient scaler for device type xla."""

    @checked(init_scale=0, growth_factor=0, backoff_factor=0, growth_interval=1)
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ) -> None:
        super().__init__("xla", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
