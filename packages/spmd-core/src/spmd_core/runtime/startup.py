"""Settings before the first use of a device: platform, processes, folder of compiled programs."""

import errno
import math
import os
import re
import socket
import threading
from dataclasses import dataclass
from typing import Any

import jax
import torch

from spmd_core import releases
from spmd_core.arguments import checked, require_int, require_kind
from spmd_core.config import config
from spmd_core.errors import SpmdError
from spmd_core.runtime import devices, disk_cache, in_flight, presence, watch

DEVICE_TYPES = ("CPU", "TPU", "CUDA", "ROCM")
_jax_cache = releases.jax_module(
    "jax.experimental.compilation_cache.compilation_cache", "reset_cache"
)


def _number(name: str) -> int:
    """A variable of the environment that is a whole number.

    Raises:
        SpmdError: it is something else.
    """
    text = os.environ[name]
    if not text.isdecimal():
        raise SpmdError(
            f"{name} is a whole number that the launcher sets, from 0; got {text!r}. "
            "Correct it or unset it."
        )
    return int(text)


@dataclass(frozen=True)
class _Launcher:
    """The environment variables by which a launcher numbers its processes.

    Attributes:
        sizes: the variable of the number of processes, and of those on this host.
        ranks: the variable of this process's number, and of that on this host.
        unless: a variable that, if set, lets jax find everything itself.
    """

    sizes: tuple[str, str]
    ranks: tuple[str, str]
    unless: str | None = None

    def is_present(self) -> bool:
        return self.sizes[0] in os.environ and (self.unless or "") not in os.environ

    def size(self) -> int:
        return _number(self.sizes[0])

    def rank(self) -> int | None:
        return _number(self.ranks[0]) if self.ranks[0] in os.environ else None

    def is_one_host(self) -> bool:
        here = os.environ.get(self.sizes[1], "")
        return here.isdecimal() and int(here) == self.size()


# jax itself finds everything under SLURM, on TPU pods, and under Open MPI before 5.
_LAUNCHERS = (
    _Launcher(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("RANK", "LOCAL_RANK")),
    _Launcher(
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        unless="OMPI_MCA_orte_hnp_uri",
    ),
)
_distributed = releases.jax_module("jax._src.distributed", "global_state")
_DEFAULT_PORT = 12355
# The address that `initialize` was given.
# Guarded by: the GIL. Cleared by: never: a process joins once.
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


_MOST_S = 10**6  # a wait that outlives every run


@checked(num_processes=1, process_id=0, timeout_s=1, heartbeat_timeout_s=1)
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
    they compare what they run (`config.compare_processes_every_s`).

    Arguments that are None are taken from torchrun's variables (`MASTER_ADDR`, `MASTER_PORT`,
    `WORLD_SIZE`, `RANK`) or from Open MPI's, with `MASTER_ADDR` if there are several hosts; else
    jax finds them, on TPU pods, under SLURM, and in Kubernetes with the package `kubernetes`.
    docs/guides/processes.md has a file for each to start from.

    Args:
        coordinator_address: `"host:port"` of process 0, the same in every process. Process 0
            listens at this address alone if it is one of its host's (with 127.0.0.1, nobody outside
            of the host can connect), else at all of its host's, as behind a proxy.
        num_processes: the number of processes.
        process_id: the number of this process, from 0.
        timeout_s: seconds to wait for the other processes.
        heartbeat_timeout_s: seconds after which a process that gives no sign of life counts as
            dead; the others then end, with an error that names it.

    Raises:
        ValueError: a number is out of its range, or the address has no port.
        SpmdError: the devices are already in use, the port is taken, or the processes could not
            join.

    Example:
        spmd.distributed.initialize("10.0.0.1:12355", num_processes=2, process_id=0)
    """
    require_int("timeout_s", timeout_s, least=1, most=_MOST_S)
    require_int("heartbeat_timeout_s", heartbeat_timeout_s, least=1, most=_MOST_S)
    if devices.is_started():
        raise SpmdError(
            "processes join before a device is first used; "
            "the devices are in use and spmd.distributed.initialize() came later. "
            "Call it at the top of the program."
        )
    for launcher in _LAUNCHERS:
        if launcher.is_present():
            coordinator_address = coordinator_address or _master_address(launcher)
            num_processes = launcher.size() if num_processes is None else num_processes
            process_id = launcher.rank() if process_id is None else process_id
            break
    if coordinator_address is not None and not _has_port(coordinator_address):
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
    bind_address = None
    if process_id == 0 and coordinator_address is not None:
        bind_address = _bind_address(coordinator_address)
    note = threading.Timer(
        config.warn_process_after_s,
        presence.say,
        [
            f"process {process_id} of {num_processes} still waits for all to join at "
            f"{coordinator_address}. Start each of them, with this address and its own number; it "
            f"waits for {timeout_s} s."
        ],
    )
    note.daemon = True
    note.start()
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            _local_device_ids(),
            # jax would look for a cluster, which need not exist here.
            "deactivate" if None not in (coordinator_address, num_processes, process_id) else None,
            initialization_timeout=timeout_s,
            heartbeat_timeout_seconds=heartbeat_timeout_s,
            coordinator_bind_address=bind_address,
        )
    except (RuntimeError, ValueError) as error:
        raise SpmdError(
            "the processes must find each other; "
            f"got coordinator {coordinator_address}, process {process_id} of {num_processes}: "
            f"{error}. "
            "Give all three in every process, or start them by torchrun, srun or mpirun, with "
            "MASTER_ADDR in the environment: an address of process 0 that all of them reach."
        ) from error
    finally:
        note.cancel()
    global _coordinator
    _coordinator = coordinator_address
    state = _distributed.global_state
    if state.num_processes > 1:
        _share_random_state(state.client, state.process_id, timeout_s)
        watch.begin(state.client, state.process_id, state.num_processes)


def _master_address(launcher: _Launcher) -> str | None:
    """`MASTER_ADDR` and `MASTER_PORT` as `host:port`; without them this host's, if it is alone."""
    host = os.environ.get("MASTER_ADDR")
    if host is None and launcher.is_one_host():
        host = "127.0.0.1"
    return None if host is None else f"{host}:{os.environ.get('MASTER_PORT', _DEFAULT_PORT)}"


def _has_port(address: object) -> bool:
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _bind_address(coordinator_address: str) -> str | None:
    """Where process 0 listens; None for all addresses of its host.

    jax would listen at all, and a port that is taken would end the process, or be shared with the
    program that has it.

    Raises:
        SpmdError: the port is taken.
    """
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return None
    host, _, port = coordinator_address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a name that only the other hosts know
        found = []
    everywhere = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("", int(port)))
    for family, kind, protocol, _, address in [*found, everywhere]:
        try:
            with socket.socket(family, kind, protocol) as tried:
                # So that a port that another program has just closed counts as free.
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SpmdError(
                    f"process 0 listens at a port that is free; got {coordinator_address}, which "
                    "another program has. End it, such as a run that was not ended, or give all "
                    "processes another port (MASTER_PORT)."
                ) from error
            continue  # not an address of this host, or not one that it may use
        if address[0]:
            name = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
            return f"{name}:{port}"
    return None


def _local_device_ids() -> list[int] | None:
    """Which of the host's GPUs are this process's; None to leave it to jax.

    Several processes on a host take one each. jax gives a single task of SLURM one, too: it gets
    all that SLURM has given to it.
    """
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    for launcher in _LAUNCHERS:
        count, rank = (os.environ.get(names[1], "") for names in (launcher.sizes, launcher.ranks))
        if launcher.is_present() and count.isdecimal() and rank.isdecimal():
            return [int(rank)] if int(count) > 1 else None
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    is_alone = re.fullmatch(r"1(\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return list(range(int(gpus))) if is_alone and gpus.isdecimal() and int(gpus) > 1 else None


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


@checked()
def initialize_cache(path: str | os.PathLike[str], readonly: bool = False) -> None:
    """Stores compiled programs in the folder `path`, in place of `config.cache_dir`.

    Other processes can then load them instead of compiling them again.

    Args:
        path: the folder; it is made when the first program is written.
        readonly: whether programs are only read from the folder and never added, for many processes
            that share one folder.

    Raises:
        TypeError: `path` is none.
        SpmdError: a program was already compiled.
    """
    require_kind("path", path, str, os.PathLike, write="the folder's path")
    if in_flight.programs.has_started:
        raise SpmdError(
            "the folder of compiled programs is chosen before the first one is compiled; "
            f"a program has run and initialize_cache({str(path)!r}) "
            "came later. Call it at the top of the program."
        )
    config.cache_dir = str(path)
    disk_cache.install()
    jax.config.update("jax_compilation_cache_dir", str(path))
    # jax stores a program that took at least this many seconds to compile: here all, or none.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf if readonly else 0.0)
    if readonly:
        # XLA's GPU compiler would write its autotuning results there, too.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    # jax may have compiled a small program of its own before, and fixed the folder then.
    _jax_cache.reset_cache()
