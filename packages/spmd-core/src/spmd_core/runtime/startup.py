"""What a program settles before the devices are first used: the platform, the processes that run together, the folder of compiled programs."""

import math
import os

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from spmd_core.config import config
from spmd_core.errors import SpmdError
from spmd_core.runtime import buffers, devices

DEVICE_TYPES = ("CPU", "TPU", "CUDA", "ROCM")
_DEFAULT_PORT = 12355
_coordinator: str | None = None


def device_type() -> str:
    """PJRT's name of the platform: `"CPU"`, `"TPU"`, `"CUDA"` or `"ROCM"`.

    Before the devices are used it is what `PJRT_DEVICE` says (up to an underscore), and nothing is started; where that is unset, this starts them.
    """
    wanted = os.environ.get("PJRT_DEVICE")
    if wanted and not devices.is_started():
        return wanted.upper().split("_")[0]
    if devices.platform() != "gpu":
        return devices.platform().upper()
    return "ROCM" if "rocm" in devices.all_devices()[0].client.platform_version.lower() else "CUDA"


def set_device_type(name: str) -> None:
    """Chooses the platform, by writing `PJRT_DEVICE`, which processes started from this one inherit. Call it before the first use of the devices.

    Raises:
        ValueError: the name is not one of `DEVICE_TYPES`.
        SpmdError: the devices are in use, on another platform.
    """
    if not isinstance(name, str) or name.upper() not in DEVICE_TYPES:
        raise ValueError(
            f"a device type is one of {', '.join(DEVICE_TYPES)}; got {name!r}. Pass one of them."
        )
    name = name.upper()
    if devices.is_started() and device_type() != name:
        raise SpmdError(
            f"the device type is fixed when a device is first used; it is {device_type()} and set_device_type({name!r}) came later. "
            "Call set_device_type at the top of the program."
        )
    os.environ["PJRT_DEVICE"] = name


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: int = 300,
) -> None:
    """Joins the processes of a program that runs on several hosts (or several times on one). Call it in each, before the first use of the devices.

    Waits until all have joined. What is not given is taken from torchrun's variables (`MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK`) where
    `WORLD_SIZE` is set, else found by jax, which knows TPU pods, SLURM, Open MPI and Kubernetes.

    Args:
        coordinator_address: `"host:port"` of process 0, the same in every process.
        num_processes: how many there are.
        process_id: which this one is, from 0.
        timeout_s: seconds to wait for the others.

    Raises:
        ValueError: a count or number that cannot be, or an address without a port.
        SpmdError: the devices are in use already, or the processes did not come together.

    Example:
        initialize("10.0.0.1:12355", num_processes=2, process_id=0)
    """
    if devices.is_started():
        raise SpmdError(
            "processes join before a device is first used; the devices are in use and initialize() came later. Call it at the top of the program."
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
            f"a coordinator's address is 'host:port'; got {coordinator_address!r}. Write for instance '10.0.0.1:{_DEFAULT_PORT}'."
        )
    if num_processes is not None and (
        num_processes < 1 or not 0 <= (process_id or 0) < num_processes
    ):
        raise ValueError(
            f"a process's number lies between 0 and the number of processes; got process {process_id} of {num_processes}. "
            "Give each process its own number, from 0."
        )
    try:
        jax.distributed.initialize(
            coordinator_address, num_processes, process_id, initialization_timeout=timeout_s
        )
    except (RuntimeError, ValueError) as error:
        raise SpmdError(
            f"the processes must find each other; got coordinator {coordinator_address}, process {process_id} of {num_processes}: {error}. "
            "Give all three in every process, with an address that all of them reach."
        ) from error
    global _coordinator
    _coordinator = coordinator_address


def coordinator_address() -> str | None:
    """The address of process 0 that `initialize` was given or found in torchrun's variables; None where jax found it, or nobody asked."""
    return _coordinator


def initialize_cache(path: str | os.PathLike[str], readonly: bool = False) -> None:
    """Keeps compiled programs in the folder `path`, in place of `config.cache_dir`, so that another process need not compile them again.

    Args:
        path: the folder; made when the first program is written.
        readonly: programs are taken from the folder, and none are added: for many processes that share one folder.

    Raises:
        SpmdError: a program was compiled already.
    """
    if buffers.in_flight.has_started:
        raise SpmdError(
            f"the folder of compiled programs is chosen before the first one is compiled; a program has run and initialize_cache({str(path)!r}) "
            "came later. Call it at the top of the program."
        )
    config.cache_dir = str(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    # jax writes what took at least this long: everything, or nothing.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf if readonly else 0.0)
    if readonly:
        # The compiler of GPUs would write the results of its measurements there too.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    # jax may have met a small program of its own, and settled on the folder before.
    jax_cache.reset_cache()
