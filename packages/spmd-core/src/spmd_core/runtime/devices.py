"""The devices: starts the runtime, lists the devices and their facts, and holds the SPMD mode.

The devices start with the first call that needs them.
"""

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jaxlib

from spmd_core.chips import MAX_EMULATED_DEVICES
from spmd_core.config import config
from spmd_core.errors import NotInSpmdModeError, PlanError, SpmdError
from spmd_core.runtime import disk_cache, host_memory
from spmd_core.sharding.mesh import Mesh

_PLATFORM_OF_PJRT_DEVICE = {"CPU": "cpu", "TPU": "tpu", "CUDA": "gpu", "GPU": "gpu", "ROCM": "gpu"}

# libtpu asks the host that it runs on for its accelerators, and locks them for one process. The
# type and the host names concern no topology; without them, it writes to stderr that it could not
# determine them.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


# Read by XLA's CPU client, the first one before the second: how many threads its pools have.
_THREADS = "PJRT_NPROC", "NPROC"
# How many collectives of a device may wait for other devices at a time: one of a loop's body, and
# one of what runs beside the loop.
_COLLECTIVES_AT_ONCE = 2


@dataclass
class _State:
    spmd: bool = False
    devices: tuple[jax.Device, ...] | None = None
    abstract: bool = False


# The started devices, and whether SPMD mode is on.
# Guarded by: `_lock`; the mode is one assignment.
# Cleared by: never: a process starts its devices once.
_state = _State()
_lock = threading.Lock()
# Called when the devices are exchanged: each drops what a module has cached about them.
# Guarded by: imports. Cleared by: never.
on_exchange: list[Callable[[], None]] = []


def simulate(num_devices: int) -> None:
    """Emulates `num_devices` devices on this host's CPU. Call it before the first use of a device.

    Raises:
        ValueError: `num_devices` is no int from 1 to 2048.
        SpmdError: the devices are already in use with another count.
    """
    is_int = isinstance(num_devices, int) and not isinstance(num_devices, bool)
    if not is_int or not 1 <= num_devices <= MAX_EMULATED_DEVICES:
        raise ValueError(
            f"simulate needs a number of devices from 1 to {MAX_EMULATED_DEVICES}; "
            f"got {num_devices!r}. Write e.g. spmd.simulate(8)."
        )
    if _state.devices is not None:
        if len(_state.devices) == num_devices and _state.devices[0].platform == "cpu":
            return
        if _state.abstract:
            if len(_state.devices) == num_devices:
                return
            raise PlanError(
                "what is planned must take the devices of the plan's topology; it has "
                f"{len(_state.devices)} devices and simulate({num_devices}) asked for others. "
                "Plan for a topology of that many devices, or leave the call out."
            )
        raise SpmdError(
            "the number of emulated devices is fixed when the device is first used; "
            f"it is in use with {len(_state.devices)} "
            f"{_state.devices[0].platform} devices and simulate({num_devices}) came later. "
            "Call spmd.simulate at the top of the program."
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def all_devices() -> tuple[jax.Device, ...]:
    """Every device of every host, in the order of the global ids; starts the runtime.

    `PJRT_DEVICE` (CPU, TPU, CUDA) chooses the platform; if it is unset, jax chooses.
    """
    if _state.devices is None:
        with _lock:
            if _state.devices is None:
                _state.devices = _start()
    return _state.devices


def _start() -> tuple[jax.Device, ...]:
    wanted = os.environ.get("PJRT_DEVICE")
    if wanted is not None and wanted.upper() not in _PLATFORM_OF_PJRT_DEVICE:
        raise SpmdError(
            f"PJRT_DEVICE must be one of {', '.join(_PLATFORM_OF_PJRT_DEVICE)}; got {wanted!r}. "
            "Set one of them or unset it."
        )
    if config.cache_dir is not None and jax.config.values["jax_compilation_cache_dir"] is None:
        disk_cache.install()
        jax.config.update("jax_compilation_cache_dir", config.cache_dir)
        # By default jax stores only programs that took a second to compile: every process would
        # compile a step of many small programs again.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    os.environ["XLA_FLAGS"] = with_positional_shardings(
        os.environ.get("XLA_FLAGS", ""), jaxlib.__version__
    )
    # jax sets `jax_platforms` if it sees a TPU at import. If it is unset, jax tries each installed
    # platform: with libtpu that is TPU, also on hosts without one.
    is_named = bool(jax.config.values["jax_platforms"])
    try:
        with contextlib.nullcontext() if is_named else libtpu_without_tpus(), _enough_threads():
            found = jax.devices(_PLATFORM_OF_PJRT_DEVICE[wanted.upper()] if wanted else None)
    except (RuntimeError, AssertionError) as error:  # jax asserts that it has found a platform
        asked = f"PJRT_DEVICE={wanted}" if wanted else "JAX_PLATFORMS, or the default of jax,"
        raise SpmdError(
            f"{asked} asks for a platform that jax cannot start here: "
            f"{str(error) or 'it found no device'}. Unset it, or install jax for that platform."
        ) from error
    if found[0].platform == "cpu":
        host_memory.keep_mapped()
    return tuple(sorted(found, key=lambda d: d.id))


def expects_tpus() -> bool:
    """Whether jax found TPUs on this host at import, or was configured for them; starts nothing.

    An installed libtpu is no sign of a TPU: it also compiles for TPUs on hosts that have none.
    """
    return "tpu" in (jax.config.values["jax_platforms"] or "").split(",")


@contextmanager
def libtpu_without_tpus() -> Iterator[None]:
    """Inside, libtpu expects no TPU on this host: it locks none, and is silent about it.

    Variables of the environment that are set stay as they are.
    """
    added = {key: value for key, value in _LIBTPU.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


@contextmanager
def _enough_threads() -> Iterator[None]:
    """Inside, XLA's client for emulated devices starts with a thread for each waiting collective.

    By default its pool has a thread for each device, and each collective blocks one until all
    devices have come to it. With two at a time all threads may wait for devices that have none left
    to get there, and XLA aborts the process after a minute (docs/explanation/xla_errors.md). A
    number in the environment stays as it is.
    """
    count = _num_emulated()
    if count < 2 or any(name in os.environ for name in _THREADS):
        yield
        return
    name = _THREADS[0]
    os.environ[name] = str(max(_COLLECTIVES_AT_ONCE * count, _num_cores()))
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _num_cores() -> int:
    """The number of cores that this process may use, as many as XLA starts threads by default."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_emulated() -> int:
    """The number of devices that will be emulated, if the platform is the CPU."""
    count: int = jax.config.values["jax_num_cpu_devices"]
    if count < 0:
        flags = os.environ.get("XLA_FLAGS", "")
        flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
        count = 1 if flag is None else int(flag[1])
    return count


def with_positional_shardings(flags: str, jaxlib_version: str) -> str:
    """XLA's flags, with the form of shardings by named axes off where it is on by default.

    With that form, XLA's partitioner aborts the process for some products
    (docs/explanation/xla_errors.md). XLA also aborts for a flag that it does not know, so only
    tested releases get it.

    Example:
        >>> with_positional_shardings("--a=1", "0.12.0.1")
        '--a=1 --xla_enable_hlo_sharding_v3=false'
    """
    name = "--xla_enable_hlo_sharding_v3"
    release = tuple(int(part) for part in jaxlib_version.split(".")[:2])
    if name in flags or not (0, 11) <= release <= (0, 12):
        return flags
    return f"{flags} {name}=false".strip()


@contextmanager
def exchanged(devices: tuple[jax.Device, ...]) -> Iterator[None]:
    """Inside, these are the devices of this process, and programs for them are not run.

    SPMD mode is off inside at first. No operation may be pending at the start and at the end.

    Args:
        devices: those of a topology; all count as this process's own.
    """
    before = (_state.devices, _state.abstract, _state.spmd)
    _exchange(devices, abstract=True, spmd=False)
    try:
        yield
    finally:
        _exchange(*before)


def _exchange(devices: tuple[jax.Device, ...] | None, abstract: bool, spmd: bool) -> None:
    _state.devices, _state.abstract, _state.spmd = devices, abstract, spmd
    position_of_id.cache_clear()
    for forget in on_exchange:
        forget()


def is_abstract() -> bool:
    """Whether the devices are a topology's, for which programs are compiled and not run."""
    return _state.abstract


def is_local(device: jax.Device) -> bool:
    """Whether a device belongs to this process; each device of a topology does."""
    return _state.abstract or device.process_index == jax.process_index()


def process_of(device: int) -> int:
    """The process that the device at this position belongs to; 0 for each of a topology."""
    return 0 if _state.abstract else all_devices()[device].process_index


def is_started() -> bool:
    """Whether the runtime has started, so that the set of devices is fixed."""
    return _state.devices is not None


def platform() -> str:
    """`"cpu"`, `"gpu"` or `"tpu"`."""
    return all_devices()[0].platform


def free_memory_maps() -> int | None:
    """How many more memory maps Linux allows this process.

    None on other systems, and on platforms other than the CPU.
    """
    limit, maps = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
    if platform() != "cpu" or not limit.exists() or not maps.exists():
        return None
    return int(limit.read_text()) - maps.read_bytes().count(b"\n")


def global_runtime_device_count() -> int:
    """The number of devices of all hosts."""
    return len(all_devices())


def num_processes() -> int:
    """The number of processes (hosts) that run the program together."""
    all_devices()
    return 1 if _state.abstract else jax.process_count()


def device_attributes() -> list[dict[str, Any]]:
    """One dict per device: `name`, `kind` and `process_index`.

    On TPU also `coords`, `core_on_chip`, `num_cores` and `slice_index`.
    """
    rows = []
    for i, d in enumerate(all_devices()):
        row = {"name": device_name(i), "kind": d.device_kind, "process_index": d.process_index}
        for extra in ("coords", "core_on_chip", "num_cores", "slice_index"):
            value = getattr(d, extra, None)
            if value is not None:
                row[extra] = value
        rows.append(row)
    return rows


def allocator_stats() -> list[dict[str, int]]:
    """The allocator's statistics of each local device, in bytes.

    `bytes_in_use`, `peak_bytes_in_use` and `bytes_limit`; an empty dict where the platform keeps no
    statistics (CPU).
    """
    if _state.abstract:
        return [{} for _ in all_devices()]
    return [d.memory_stats() or {} for d in all_devices() if is_local(d)]


def local_device_ids(mesh: Mesh) -> tuple[int, ...]:
    """The devices of a mesh that belong to this process, in the order of their ids."""
    devices = all_devices()
    return tuple(sorted(i for i in mesh.ids if is_local(devices[i])))


def first_local_device() -> int:
    """The position, among all devices, of this process's first device."""
    return next(i for i, device in enumerate(all_devices()) if is_local(device))


def device_name(device: int) -> str:
    """The name of the device at this position among all devices, such as `"CPU:3"`."""
    return f"{platform().upper()}:{device}"


@lru_cache(maxsize=1)
def position_of_id() -> dict[int, int]:
    """The position among all devices of each jax device id."""
    return {d.id: i for i, d in enumerate(all_devices())}


def position_of_device(device: jax.Device) -> int:
    """The position of a jax device among all devices."""
    return position_of_id()[device.id]


def use_spmd() -> None:
    """Turns on SPMD mode: one program over all devices, partitioned as the marks say.

    Tensors that exist already stay valid.
    """
    _state.spmd = True


def is_spmd() -> bool:
    """Whether `use_spmd()` was called."""
    return _state.spmd


def require_spmd(what: str) -> None:
    """Raises NotInSpmdModeError unless SPMD mode is on."""
    if not _state.spmd:
        raise NotInSpmdModeError(
            f"{what} works in SPMD mode only; it is off. Call spmd.use_spmd() first."
        )
