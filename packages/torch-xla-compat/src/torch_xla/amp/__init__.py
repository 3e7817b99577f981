"""Automatic mixed precision on the device, by torch's own autocast and scaler."""

from typing import Any

import torch
from torch.amp import GradScaler as _GradScaler

from spmd_core.arguments import checked


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
        super().__init__(
            torch.device(device).type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled
        )


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
        **kwargs: Any,
    ) -> None:
        super().__init__("xla", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
