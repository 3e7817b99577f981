"""Devices, processes and SPMD mode ("xr"). In SPMD mode there is one logical device; the physical ones are the *runtime* devices."""

import os
from typing import Any

import torch

import spmd_core as spmd
from spmd_core import compile_cache, startup, topology
from spmd_core.errors import SpmdError
from torch_xla._environment import is_set
from torch_xla._upstream import raising, refuse


def set_device_type(pjrt_device: str) -> None:
    """Chooses the platform before the first use. RuntimeError when another is in use."""
    with raising(RuntimeError, SpmdError):
        startup.set_device_type(pjrt_device)


def device_type() -> str | None:
    """PJRT's name of the platform: CPU, TPU or CUDA."""
    return startup.device_type()


def is_bf16_supported() -> bool:
    """Whether the devices compute in bfloat16."""
    return topology.is_bf16_supported()


def local_process_count() -> int:
    """Processes on this host."""
    return topology.local_process_count()


def global_device_count() -> int:
    """Logical devices: 1."""
    return 1


def world_size() -> int:
    """Logical replicas: 1, also with several hosts."""
    return 1


def local_device_count() -> int:
    """Logical devices of this host: 1."""
    return 1


def addressable_device_count() -> int:
    """Logical devices of this process: 1."""
    return 1


def global_ordinal() -> int:
    """The logical replica's number: 0."""
    return 0


def local_ordinal() -> int:
    """The logical replica's number on this host: 0."""
    return 0


def process_index() -> int:
    """This process's number among all processes."""
    return topology.process_index()


def process_count() -> int:
    """Number of processes of all hosts."""
    return topology.process_count()


def host_index() -> int:
    """This host's number."""
    return topology.host_index()


def runtime_device_attributes(device: str) -> dict[str, Any]:
    """What is known of a physical device, such as `CPU:0`. RuntimeError for one that does not exist."""
    for attributes in spmd.device_attributes():
        if attributes["name"] == device:
            return attributes
    names = [attributes["name"] for attributes in spmd.device_attributes()]
    raise RuntimeError(
        f"a device is named as in real_devices(), {', '.join(names[:8])}; got {device!r}. Use one of them."
    )


def global_runtime_device_attributes() -> list[dict[str, Any]]:
    """What is known of each physical device of all hosts."""
    return spmd.device_attributes()


def global_runtime_device_count() -> int:
    """Number of physical devices of all hosts."""
    return spmd.global_runtime_device_count()


def addressable_runtime_device_count() -> int:
    """Number of physical devices of this process."""
    return topology.addressable_runtime_device_count()


def use_spmd(auto: bool = False) -> None:
    """Turns SPMD mode on, here and (by `XLA_USE_SPMD=1`) in processes started from this one; tensors made before stay valid.

    Automatic sharding is refused.
    """
    if auto:
        refuse(
            "use_spmd(auto=True)",
            "asks for shardings that are found automatically",
            "Call use_spmd() and mark tensors with mark_sharding.",
        )
    os.environ["XLA_USE_SPMD"] = "1"
    spmd.use_spmd()


def is_spmd() -> bool:
    """Whether SPMD mode is on. `XLA_USE_SPMD=1` turns it on at any time."""
    if not spmd.is_spmd() and is_set("XLA_USE_SPMD"):
        spmd.use_spmd()
    return spmd.is_spmd()


def get_master_ip() -> str:
    """The address of the first process's host. RuntimeError where nobody told."""
    with raising(RuntimeError, SpmdError):
        return topology.get_master_ip()


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keeps compiled programs in a folder. AssertionError after the first one was compiled."""
    with raising(AssertionError, SpmdError):
        startup.initialize_cache(path, readonly)


def get_num_cached_compilation_graph() -> int:
    """Number of compiled programs in memory."""
    return len(compile_cache.keys())


def device() -> torch.device:
    """The logical device."""
    return spmd.device()
