"""The environment variables of PyTorch/XLA that mean something here, applied once, at the first import."""

import os

import spmd_core as spmd
from spmd_core import startup
from torch_xla._upstream import refuse


def is_set(name: str) -> bool:
    """Whether a switch is on: 'true' or a positive number."""
    value = os.environ.get(name, "").strip().lower()
    return value == "true" or (value.isdigit() and int(value) > 0)


def apply() -> None:
    """CPU_NUM_DEVICES, XLA_USE_SPMD and XLA_PERSISTENT_CACHE_PATH do what they did; automatic sharding is refused."""
    if is_set("XLA_AUTO_SPMD"):
        refuse("XLA_AUTO_SPMD", "asks for shardings that are found automatically", "Unset it, and mark tensors with mark_sharding.")
    num_devices = os.environ.get("CPU_NUM_DEVICES")
    if num_devices is not None and os.environ.get("PJRT_DEVICE", "CPU").upper() == "CPU":
        if not num_devices.isdigit() or int(num_devices) < 1:
            raise ValueError(f"CPU_NUM_DEVICES is a positive number of emulated devices; got {num_devices!r}. Write for instance CPU_NUM_DEVICES=8.")
        spmd.simulate(int(num_devices))
    if is_set("XLA_USE_SPMD"):
        spmd.use_spmd()
    path = os.environ.get("XLA_PERSISTENT_CACHE_PATH")
    if path:
        startup.initialize_cache(path, readonly=is_set("XLA_PERSISTENT_CACHE_READ_ONLY"))
