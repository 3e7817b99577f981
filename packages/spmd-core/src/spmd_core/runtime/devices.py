"""The devices: which there are, how a sharding becomes jax's, and how data travels between host memory and device memory.

Together with `lowering`, `ops` and `execution`'s calls, the only code that knows jax. No device is touched before the first call that needs one.
"""

import os
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import torch

from spmd_core.config import config
from spmd_core.errors import NotInSpmdModeError, SpmdError
from spmd_core.sharding.mesh import Mesh

_PLATFORM_OF_PJRT_DEVICE = {"CPU": "cpu", "TPU": "tpu", "CUDA": "gpu", "GPU": "gpu", "ROCM": "gpu"}


@dataclass
class _State:
    spmd: bool = False
    devices: tuple[Any, ...] | None = None


_state = _State()
_lock = threading.Lock()


def simulate(num_devices: int) -> None:
    """Emulates `num_devices` devices on the CPU of this host. Call it before the device is first used.

    Raises:
        ValueError: `num_devices` is not a positive int.
        SpmdError: the devices are already in use with another count.
    """
    if not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(
            f"simulate needs a positive number of devices; got {num_devices!r}. Write e.g. simulate(8)."
        )
    if _state.devices is not None:
        if len(_state.devices) == num_devices and _state.devices[0].platform == "cpu":
            return
        raise SpmdError(
            f"the number of emulated devices is fixed when the device is first used; it is in use with {len(_state.devices)} "
            f"{_state.devices[0].platform} devices and simulate({num_devices}) came later. Call simulate at the top of the program."
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def all_devices() -> tuple[Any, ...]:
    """Every device of every host, by global id; starts the runtime. `PJRT_DEVICE` (CPU, TPU, CUDA) chooses the platform, else jax does."""
    if _state.devices is None:
        with _lock:
            if _state.devices is None:
                _state.devices = _start()
    return _state.devices


def _start() -> tuple[Any, ...]:
    wanted = os.environ.get("PJRT_DEVICE")
    if wanted is not None and wanted.upper() not in _PLATFORM_OF_PJRT_DEVICE:
        raise SpmdError(
            f"PJRT_DEVICE must be one of {', '.join(_PLATFORM_OF_PJRT_DEVICE)}; got {wanted!r}. Set one of them or unset it."
        )
    if config.cache_dir is not None and jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", config.cache_dir)
        # jax keeps only what took a second to compile; a step of many small programs would compile again in every process.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        found = jax.devices(_PLATFORM_OF_PJRT_DEVICE[wanted.upper()] if wanted else None)
    except RuntimeError as error:
        raise SpmdError(
            f"PJRT_DEVICE={wanted} asks for a platform that jax cannot start here: {error}. Unset it, or install jax for that platform."
        ) from error
    return tuple(sorted(found, key=lambda d: d.id))


@lru_cache(maxsize=1)
def position_of_id() -> dict[int, int]:
    return {d.id: i for i, d in enumerate(all_devices())}


def is_started() -> bool:
    """Whether the devices are in use, so that which they are is settled."""
    return _state.devices is not None


def platform() -> str:
    """`"cpu"`, `"gpu"` or `"tpu"`."""
    return all_devices()[0].platform


def free_memory_maps() -> int | None:
    """How many more memory maps Linux gives this process; None on other systems, and where programs do not run on the CPU."""
    limit, maps = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
    if platform() != "cpu" or not limit.exists() or not maps.exists():
        return None
    return int(limit.read_text()) - maps.read_bytes().count(b"\n")


def global_runtime_device_count() -> int:
    """How many devices there are on all hosts."""
    return len(all_devices())


def num_processes() -> int:
    """How many processes (hosts) run the program together."""
    all_devices()
    return jax.process_count()


def use_spmd() -> None:
    """Turns on SPMD mode: one program over every device, partitioned by the marks. Tensors made before stay valid.

    Autograd then runs backward in the thread that calls it, if that is the thread that called this, as it does for tensors on the CPU. A thread of
    autograd's own holds what `torch.autograd.grad` returned for some milliseconds longer than the caller: a cut in that time would compute all of
    it, in a program of its own.
    """
    _state.spmd = True
    torch.autograd.set_multithreading_enabled(False)


def is_spmd() -> bool:
    """Whether `use_spmd()` was called."""
    return _state.spmd


def require_spmd(what: str) -> None:
    """Raises NotInSpmdModeError unless SPMD mode is on."""
    if not _state.spmd:
        raise NotInSpmdModeError(
            f"{what} works in SPMD mode only; it is off. Call spmd_core.use_spmd() first."
        )


def device_attributes() -> list[dict[str, Any]]:
    """One dict per device: `name`, `kind`, `process_index`, and on TPU `coords`, `core_on_chip`, `num_cores` and `slice_index`."""
    rows = []
    for i, d in enumerate(all_devices()):
        row = {"name": device_name(i), "kind": d.device_kind, "process_index": d.process_index}
        for extra in ("coords", "core_on_chip", "num_cores", "slice_index"):
            value = getattr(d, extra, None)
            if value is not None:
                row[extra] = value
        rows.append(row)
    return rows


def memory_stats() -> list[dict[str, int]]:
    """Per local device what the allocator says (`bytes_in_use`, `peak_bytes_in_use`, `bytes_limit`); empty dicts where it says nothing (CPU)."""
    return [d.memory_stats() or {} for d in all_devices() if d.process_index == jax.process_index()]


def local_device_ids(mesh: Mesh) -> tuple[int, ...]:
    """The devices of a mesh that belong to this process, in the order of their ids."""
    every, process = all_devices(), jax.process_index()
    return tuple(sorted(i for i in mesh.ids if every[i].process_index == process))


def first_local_device() -> int:
    """The number of this process's first device."""
    process = jax.process_index()
    return next(i for i, device in enumerate(all_devices()) if device.process_index == process)


def device_name(device: int) -> str:
    """Such as `"CPU:3"`."""
    return f"{platform().upper()}:{device}"


def position_of_device(device: Any) -> int:
    """The position of one jax device among all devices."""
    return position_of_id()[device.id]
