"""Settings before the first use of a device: platform, processes, folder of compiled programs."""

import math
import os
from typing import Any

import jax
import torch

from spmd_core import releases
from spmd_core.config import config
from spmd_core.errors import SpmdError
from spmd_core.runtime import buffers, devices, watch

DEVICE_TYPES = ("CPU", "TPU", "CUDA", "ROCM")
_jax_cache = releases.jax_module(
    "jax.experimental.compilation_cache.compilation_cache", "reset_cache"
)
_distributed = releases.jax_module("jax._src.distributed", "global_state")
_DEFAULT_PORT = 12355
_coordinator: str | None = None


def device_type() -> str:
    """PJRT's name of the platform: `"CPU"`, `"TPU"`, `"CUDA"` or `"ROCM"`.

    Until the devices are in use, this is the value of `PJRT_DEVICE` up to an underscore, and the
    call starts nothing. If that variable is unset, the call starts the devices.
    """
    wanted = os.environ.get("PJRT_DEVICE")
    if wanted and not devices.is_started():
        return wanted.upper().split("_")[0]
    if devices.platform() != "gpu":
        return devices.platform().upper()
    return "ROCM" if "rocm" in devices.all_devices()[0].client.platform_version.lower() else "CUDA"


def set_device_type(name: str) -> None:
    """Chooses the platform by setting `PJRT_DEVICE`. Call it before the first use of a device.

    Processes that this one starts inherit the variable.

    Raises:
        ValueError: the name is not one of `DEVICE_TYPES`.
        SpmdError: the devices are already in use on another platform.
    """
    if not isinstance(name, str) or name.upper() not in DEVICE_TYPES:
        raise ValueError(
            f"a device type is one of {', '.join(DEVICE_TYPES)}; got {name!r}. Pass one of them."
        )
    name = name.upper()
    if devices.is_started() and device_type() != name:
        raise SpmdError(
            "the device type is fixed when a device is first used; "
            f"it is {device_type()} and set_device_type({name!r}) came later. "
            "Call set_device_type at the top of the program."
        )
    os.environ["PJRT_DEVICE"] = name


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: int = 300,
    heartbeat_timeout_s: int = 30,
) -> None:
    """Joins the processes of one program, on several hosts or several on one host.

    Call it in each process before the first use of a device. Waits until all have joined. All then
    have the random state of process 0 (torch's CPU generator), and draw the same random numbers as
    long as they record the same operations. From here on, the failure of one process ends all, and
    they compare what they run (`config.compare_processes_every_s`). If
    `WORLD_SIZE` is set, arguments that are None are taken from torchrun's variables (`MASTER_ADDR`,
    `MASTER_PORT`, `WORLD_SIZE`, `RANK`); else jax finds them, on TPU pods and under SLURM, Open MPI
    and Kubernetes.

    Args:
        coordinator_address: `"host:port"` of process 0, the same in every process.
        num_processes: the number of processes.
        process_id: the number of this process, from 0.
        timeout_s: seconds to wait for the other processes.
        heartbeat_timeout_s: seconds after which a process that gives no sign of life counts as
            dead; the others then end, with an error that names it.

    Raises:
        ValueError: a number is out of its range, or the address has no port.
        SpmdError: the devices are already in use, or the processes could not join.

    Example:
        initialize("10.0.0.1:12355", num_processes=2, process_id=0)
    """
    if devices.is_started():
        raise SpmdError(
            "processes join before a device is first used; "
            "the devices are in use and initialize() came later. Call it at the top of the program."
        )
    if "WORLD_SIZE" in os.environ:
        if coordinator_address is None and "MASTER_ADDR" in os.environ:
            coordinator_address = (
                f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', _DEFAULT_PORT)}"
            )
        num_processes = int(os.environ["WORLD_SIZE"]) if num_processes is None else num_processes
        process_id = (
            int(os.environ["RANK"]) if process_id is None and "RANK" in os.environ else process_id
        )
    if coordinator_address is not None and not coordinator_address.rpartition(":")[2].isdigit():
        raise ValueError(
            f"a coordinator's address is 'host:port'; got {coordinator_address!r}. "
            f"Write for instance '10.0.0.1:{_DEFAULT_PORT}'."
        )
    if num_processes is not None and (
        num_processes < 1 or not 0 <= (process_id or 0) < num_processes
    ):
        raise ValueError(
            "a process's number lies between 0 and the number of processes; "
            f"got process {process_id} of {num_processes}. "
            "Give each process its own number, from 0."
        )
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            initialization_timeout=timeout_s,
            heartbeat_timeout_seconds=heartbeat_timeout_s,
        )
    except (RuntimeError, ValueError) as error:
        raise SpmdError(
            "the processes must find each other; "
            f"got coordinator {coordinator_address}, process {process_id} of {num_processes}: "
            f"{error}. "
            "Give all three in every process, with an address that all of them reach."
        ) from error
    global _coordinator
    _coordinator = coordinator_address
    state = _distributed.global_state
    if state.num_processes > 1:
        _share_random_state(state.client, state.process_id, timeout_s)
        watch.begin(state.client, state.process_id)


def _share_random_state(client: Any, process: int, timeout_s: int) -> None:
    """Gives torch's CPU generator of each process the state of process 0's.

    torch seeds it by chance. A random operation takes its seed from it, and its results must not
    depend on the process.
    """
    key = "spmd/random_state"
    if process == 0:
        client.key_value_set_bytes(key, torch.get_rng_state().numpy().tobytes())
    else:
        state = client.blocking_key_value_get_bytes(key, timeout_s * 1000)
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def coordinator_address() -> str | None:
    """The address of process 0 that `initialize` was given or took from torchrun's variables.

    None if jax found the address itself, or `initialize` was not called.
    """
    return _coordinator


def initialize_cache(path: str | os.PathLike[str], readonly: bool = False) -> None:
    """Stores compiled programs in the folder `path`, in place of `config.cache_dir`.

    Other processes can then load them instead of compiling them again.

    Args:
        path: the folder; it is made when the first program is written.
        readonly: whether programs are only read from the folder and never added, for many processes
            that share one folder.

    Raises:
        SpmdError: a program was already compiled.
    """
    if buffers.in_flight.has_started:
        raise SpmdError(
            "the folder of compiled programs is chosen before the first one is compiled; "
            f"a program has run and initialize_cache({str(path)!r}) "
            "came later. Call it at the top of the program."
        )
    config.cache_dir = str(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    # jax stores a program that took at least this many seconds to compile: here all, or none.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf if readonly else 0.0)
    if readonly:
        # XLA's GPU compiler would write its autotuning results there, too.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    # jax may have compiled a small program of its own before, and fixed the folder then.
    _jax_cache.reset_cache()
