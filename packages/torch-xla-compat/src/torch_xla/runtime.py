"""torch_xla.runtime ("xr"): devices, processes and SPMD mode.

In SPMD mode there is one logical device; the physical devices are called *runtime* devices.
"""

import os
from typing import Any

import torch

import spmd_core as spmd
from spmd_core.arguments import checked
from spmd_core.errors import SpmdError
from spmd_core.program import compile_cache
from spmd_core.runtime import processes, startup
from torch_xla._environment import is_set, use_automatic_spmd
from torch_xla._upstream import raising


def set_device_type(pjrt_device: str) -> None:
    """Chooses the platform before its first use. RuntimeError if another is already in use."""
    with raising(RuntimeError, SpmdError):
        startup.set_device_type(pjrt_device)


def device_type() -> str | None:
    """PJRT's name of the platform: CPU, TPU or CUDA."""
    return startup.device_type()


def is_bf16_supported() -> bool:
    """Whether the devices compute in bfloat16."""
    return processes.is_bf16_supported()


def local_process_count() -> int:
    """Number of processes on this host."""
    return processes.local_process_count()


def global_device_count() -> int:
    """Number of logical devices: 1."""
    return 1


def world_size() -> int:
    """Number of logical replicas: 1, also with several hosts."""
    return 1


def local_device_count() -> int:
    """Number of logical devices of this host: 1."""
    return 1


def addressable_device_count() -> int:
    """Number of logical devices of this process: 1."""
    return 1


def global_ordinal() -> int:
    """Index of the logical replica: 0."""
    return 0


def local_ordinal() -> int:
    """Index of the logical replica on this host: 0."""
    return 0


def process_index() -> int:
    """Index of this process among all processes."""
    return processes.process_index()


def process_count() -> int:
    """Number of processes of all hosts."""
    return processes.process_count()


def host_index() -> int:
    """Index of this host."""
    return processes.host_index()


def runtime_device_attributes(device: str) -> dict[str, Any]:
    """Attributes of a physical device, such as `CPU:0`. RuntimeError for an unknown device."""
    for attributes in spmd.distributed.device_attributes():
        if attributes["name"] == device:
            return attributes
    names = [attributes["name"] for attributes in spmd.distributed.device_attributes()]
    raise RuntimeError(
        f"a device is named as in real_devices(), {', '.join(names[:8])}; got {device!r}. "
        "Use one of them."
    )


def global_runtime_device_attributes() -> list[dict[str, Any]]:
    """Attributes of every physical device of all hosts."""
    return spmd.distributed.device_attributes()


def global_runtime_device_count() -> int:
    """Number of physical devices of all hosts."""
    return spmd.global_runtime_device_count()


def addressable_runtime_device_count() -> int:
    """Number of physical devices of this process."""
    return processes.addressable_runtime_device_count()


@checked()
def use_spmd(auto: bool = False) -> None:
    """Turns SPMD mode on; tensors created before stay valid.

    Also sets `XLA_USE_SPMD=1`, which turns it on in processes started from this one.

    Args:
        auto: whether shardings are found automatically (`spmd_core.use_spmd`), over a mesh of the
            shape `XLA_AUTO_SPMD_MESH`, by default over the best one.

    Raises:
        ValueError: XLA_AUTO_SPMD_MESH is no shape of a mesh.
    """
    os.environ["XLA_USE_SPMD"] = "1"
    if auto:
        use_automatic_spmd()
    else:
        spmd.use_spmd()


def is_spmd() -> bool:
    """Whether SPMD mode is on. Setting `XLA_USE_SPMD=1` turns it on at any time."""
    if not spmd.is_spmd() and is_set("XLA_USE_SPMD"):
        spmd.use_spmd()
    return spmd.is_spmd()


def get_master_ip() -> str:
    """IP address of the first process's host. RuntimeError if it is not known."""
    with raising(RuntimeError, SpmdError):
        return processes.get_master_ip()


@checked()
def initialize_cache(path: str, readonly: bool = False) -> None:
    """Caches compiled programs in a folder. AssertionError once a program has been compiled."""
    with raising(AssertionError, SpmdError):
        startup.initialize_cache(path, readonly)


def get_num_cached_compilation_graph() -> int:
    """Number of compiled programs in memory."""
    return len(compile_cache.keys())


def device() -> torch.device:
    """The logical device."""
    return spmd.device()
