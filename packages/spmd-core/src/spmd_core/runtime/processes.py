"""Read-only facts about the processes, hosts and devices that run the program."""

import os
import socket

import jax
import jax.numpy as jnp
import torch

from spmd_core.arguments import checked, require_int
from spmd_core.errors import SpmdError, UnsupportedOpError
from spmd_core.runtime import devices, startup
from spmd_core.sharding.mesh import Mesh

_LOCAL_COUNTS = (
    "PJRT_LOCAL_PROCESS_COUNT",
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
)


def process_index() -> int:
    """This process's number among those that run the program together; 0 is the master.

    Starts the devices.
    """
    devices.all_devices()
    return 0 if devices.is_abstract() else jax.process_index()


def process_count() -> int:
    """The number of processes that run the program together. Starts the devices."""
    return devices.num_processes()


def local_process_count() -> int:
    """The number of processes on each host.

    It is `PJRT_LOCAL_PROCESS_COUNT` if that is set, else what the launcher says (torchrun's
    `LOCAL_WORLD_SIZE`, Open MPI's `OMPI_COMM_WORLD_LOCAL_SIZE`, `SLURM_NTASKS_PER_NODE`), else 1.

    Raises:
        SpmdError: the variable is not a positive number.
    """
    for name in _LOCAL_COUNTS:
        text = os.environ.get(name)
        if text is not None:
            if not text.isdigit() or int(text) < 1:
                raise SpmdError(
                    f"{name} is the number of processes on this host, at least 1; got {text!r}. "
                    "Correct it or unset it."
                )
            return int(text)
    return 1


def host_index() -> int:
    """The number of this process's host; processes of one host must have consecutive numbers."""
    return process_index() // local_process_count()


@checked()
def is_master(*, local: bool = False) -> bool:
    """Whether this is process 0; with `local`, whether it is the first process of its host."""
    return (process_index() % local_process_count() if local else process_index()) == 0


def addressable_runtime_device_count() -> int:
    """The number of this process's devices."""
    return len(_local_devices())


def real_devices() -> list[str]:
    """The names of this process's devices, such as `["CPU:0", "CPU:1"]`.

    The number in a name is the device's position among all devices.
    """
    return [
        devices.device_name(i)
        for i, device in enumerate(devices.all_devices())
        if devices.is_local(device)
    ]


def get_1d_mesh(axis_name: str | None = None, num_devices: int | None = None) -> Mesh:
    """A mesh of one axis over the first devices.

    Args:
        axis_name: the axis's name, or None for an unnamed axis.
        num_devices: the number of devices; None for all, which starts the devices.

    Example:
        >>> get_1d_mesh("data")
        Mesh(range(0, 8), (8,), ('data',))
    """
    if num_devices is None:
        count = devices.global_runtime_device_count()
    else:
        count = require_int("num_devices", num_devices, least=1)
    return Mesh(range(count), (count,), None if axis_name is None else (axis_name,))


def _local_devices() -> list[jax.Device]:
    return [d for d in devices.all_devices() if devices.is_local(d)]


def memory_stats(device: int | str | torch.device | None = None) -> dict[str, int]:
    """The allocator's statistics of one of this process's devices, in bytes. Does not wait.

    Among the keys are `bytes_in_use`, `bytes_limit` and `peak_bytes_in_use`.

    Args:
        device: a position among all devices, or a name such as `"TPU:0"`. None and the logical
            device (`"xla"`) stand for the device of this process with the most bytes in use.

    Raises:
        ValueError: this process has no such device.
        UnsupportedOpError: the platform keeps no statistics, such as emulated devices on a CPU.
    """
    stats = [_memory_of(d) for d in _chosen(device)]
    return max(stats, key=lambda row: row["bytes_in_use"])


def _chosen(device: int | str | torch.device | None) -> list[jax.Device]:
    names = real_devices()
    if device is None or str(device) in ("xla", "xla:0"):
        return _local_devices()
    wanted = (
        f"{names[0].split(':')[0]}:{device}" if isinstance(device, int) else str(device).upper()
    )
    if wanted not in names:
        raise ValueError(
            f"memory is known of this process's devices, which are {', '.join(names)}; "
            f"got {device!r}. Pass one of these, or None."
        )
    return [_local_devices()[names.index(wanted)]]


def _memory_of(device: jax.Device) -> dict[str, int]:
    found = None if devices.is_abstract() else device.memory_stats()
    if not found or "bytes_limit" not in found:
        raise UnsupportedOpError(
            "the memory of a device is what its allocator counts; "
            f"the {device.platform} platform counts nothing, got a question for {device}. "
            "Ask metrics.programs() what each program takes by the compiler's own analysis "
            "(peak_bytes)."
        )
    return found


def is_bf16_supported() -> bool:
    """Whether the devices compute in bfloat16: tries one addition. Waits for the device."""
    if devices.is_abstract():
        return True  # every TPU does, and XLA's CPU compiler
    try:
        one = jax.device_put(jnp.ones((), jnp.bfloat16), _local_devices()[0])
        return float(one + one) == 2.0
    except jax.errors.JaxRuntimeError:
        return False


def get_master_ip() -> str:
    """The IP address of the host of process 0.

    It comes from the first of these that is set: the address given to `distributed.initialize`,
    `MASTER_ADDR`, jax's `JAX_COORDINATOR_ADDRESS`, a TPU pod's variables.

    Raises:
        SpmdError: none of these is set, or the host name has no address.
    """
    variables = (
        "MASTER_ADDR",
        "JAX_COORDINATOR_ADDRESS",
        "TPU_PROCESS_ADDRESSES",
        "TPU_WORKER_HOSTNAMES",
    )
    for name, text in (
        ("spmd.distributed.initialize()", startup.coordinator_address()),
        *((name, os.environ.get(name)) for name in variables),
    ):
        if text:
            host = _host(text.split(",")[0])
            try:
                return str(socket.getaddrinfo(host, None)[0][4][0])
            except OSError as error:
                raise SpmdError(
                    f"the host that {name} names must have an address; got {text!r}: {error}. "
                    "Set it to one that this host knows."
                ) from error
    raise SpmdError(
        "the master's address is given to spmd.distributed.initialize() or in the environment; "
        f"got none of {', '.join(variables)}. "
        "Set MASTER_ADDR, or call spmd.distributed.initialize(coordinator_address=...)."
    )


def _host(address: str) -> str:
    """The host part of `host`, `host:port`, `[v6]:port` or a bare IPv6 address."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address if address.count(":") > 1 else address.partition(":")[0]
