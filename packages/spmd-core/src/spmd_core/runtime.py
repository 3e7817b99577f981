"""The devices: which there are, how a sharding becomes jax's, and how data travels between host memory and device memory.

Together with `lowering`, `ops` and `execution`'s calls, the only code that knows jax. No device is touched before the first call that needs one.
"""

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core import dtypes, metrics
from spmd_core.config import config
from spmd_core.errors import NotInSpmdModeError, ProgramError, SpmdError
from spmd_core.mesh import Mesh, check_devices
from spmd_core.sharding import Manual, Sharding

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


def devices() -> tuple[Any, ...]:
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
def _position_of_id() -> dict[int, int]:
    return {d.id: i for i, d in enumerate(devices())}


def is_started() -> bool:
    """Whether the devices are in use, so that which they are is settled."""
    return _state.devices is not None


def platform() -> str:
    """`"cpu"`, `"gpu"` or `"tpu"`."""
    return devices()[0].platform


def free_memory_maps() -> int | None:
    """How many more memory maps Linux gives this process; None on other systems, and where programs do not run on the CPU."""
    limit, maps = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
    if platform() != "cpu" or not limit.exists() or not maps.exists():
        return None
    return int(limit.read_text()) - maps.read_bytes().count(b"\n")


def global_runtime_device_count() -> int:
    """How many devices there are on all hosts."""
    return len(devices())


def num_processes() -> int:
    """How many processes (hosts) run the program together."""
    devices()
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
    for i, d in enumerate(devices()):
        row = {"name": device_name(i), "kind": d.device_kind, "process_index": d.process_index}
        for extra in ("coords", "core_on_chip", "num_cores", "slice_index"):
            value = getattr(d, extra, None)
            if value is not None:
                row[extra] = value
        rows.append(row)
    return rows


def memory_stats() -> list[dict[str, int]]:
    """Per local device what the allocator says (`bytes_in_use`, `peak_bytes_in_use`, `bytes_limit`); empty dicts where it says nothing (CPU)."""
    return [d.memory_stats() or {} for d in devices() if d.process_index == jax.process_index()]


# --- Shardings ------------------------------------------------------------------------------------------------------------------------


class Placement:
    """Where a leaf's data lies: jax's sharding, and ours where the user marked it. Interned, so equality is identity.

    `jax_sharding` None means host memory: the data goes up when the first program needs it. With `manual` the data is a local tensor's: one value for
    each position along those axes, stacked along a first dim of their own.
    """

    __slots__ = ("jax_sharding", "manual", "sharding")
    _known: ClassVar[dict[tuple[Any, Any, Any], "Placement"]] = {}

    def __init__(self, jax_sharding: Any, sharding: Sharding | None, manual: Manual | None) -> None:
        self.jax_sharding, self.sharding, self.manual = jax_sharding, sharding, manual

    @staticmethod
    def of(
        jax_sharding: Any, sharding: Sharding | None, manual: Manual | None = None
    ) -> "Placement":
        key = (jax_sharding, sharding, manual)
        found = Placement._known.get(key)
        if found is None:
            found = Placement._known.setdefault(key, Placement(jax_sharding, sharding, manual))
        return found

    def __repr__(self) -> str:
        return f"Placement({self.jax_sharding}, marked={self.sharding is not None})"


def default_device_ids() -> tuple[int, ...]:
    """The devices of a program without any mark: all of them in SPMD mode, else the first."""
    return tuple(range(global_runtime_device_count())) if _state.spmd else (0,)


@lru_cache(maxsize=4096)
def _jax_mesh(
    device_ids: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...]
) -> jax.sharding.Mesh:
    every = devices()
    return jax.sharding.Mesh(
        np.array([every[i] for i in device_ids], dtype=object).reshape(shape), names
    )


def axis_names(mesh: Mesh) -> tuple[str, ...]:
    """The names of a mesh's axes to jax: its own, or made of their numbers."""
    return mesh.axis_names or tuple(f"axis{i}" for i in range(len(mesh.mesh_shape)))


@lru_cache(maxsize=16384)
def named_sharding(sharding: Sharding, device_ids: tuple[int, ...] | None = None) -> NamedSharding:
    """jax's form of a sharding. With `device_ids` (a program's devices), the same tiles over exactly those devices: the sharding itself
    where its mesh has them in that order, else its nearest equivalent (tiles kept, spare devices hold replicas, or all replicate)."""
    mesh = sharding.mesh
    own_ids = tuple(int(i) for i in mesh.device_ids)
    names = axis_names(mesh)
    spec = PartitionSpec(
        *(tuple(names[a] for a in axes) if axes else None for axes in sharding.dims)
    )
    if device_ids is None or device_ids == own_ids:
        check_devices(mesh, global_runtime_device_count())
        return NamedSharding(_jax_mesh(own_ids, tuple(mesh.mesh_shape), names), spec)
    spare, rest = divmod(len(device_ids), len(own_ids))
    if rest:
        return replicated(device_ids)
    return NamedSharding(_jax_mesh(device_ids, (*mesh.mesh_shape, spare), (*names, "_spare")), spec)


@lru_cache(maxsize=1024)
def replicated(device_ids: tuple[int, ...]) -> NamedSharding:
    """The whole tensor on each of the devices."""
    return NamedSharding(_jax_mesh(device_ids, (len(device_ids),), ("all",)), PartitionSpec())


def jax_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """jax's mesh over the same devices: `Mesh.get_jax_mesh`. Raises MeshError where the mesh names a device that does not exist."""
    check_devices(mesh, global_runtime_device_count())
    return _jax_mesh(
        tuple(int(i) for i in mesh.device_ids), tuple(mesh.mesh_shape), axis_names(mesh)
    )


Mesh.get_jax_mesh = jax_mesh


class OneMesh:
    """Writes the shardings of one program over one mesh: the coarsest that refines all of theirs.

    jax derives what the partitioner chose from the first mesh that it meets, and fails where another mesh is needed to say it. Meshes over the
    same devices in the same order have a common refinement when the sizes at which they split the devices divide each other (4x2 and 8 and
    2x2x2 do; 2x3 and 3x2 do not, and `exists` is then False and every sharding stays as it is).
    """

    def __init__(self, shardings: list[NamedSharding], device_ids: tuple[int, ...]) -> None:
        split = [s for s in shardings if s.spec != PartitionSpec()]
        meshes = list(dict.fromkeys(s.mesh for s in split))
        self.exists = True
        if len(meshes) < 2:
            self.mesh = meshes[0] if meshes else _jax_mesh(device_ids, (len(device_ids),), ("all",))
            return
        bounds = sorted({b for mesh in meshes for b in _bounds(mesh)})
        self.exists = all(high % low == 0 for low, high in pairwise(bounds))
        if self.exists:
            sizes = [high // low for low, high in pairwise(bounds)][::-1]
            self._axis_at = {low: f"m{len(sizes) - 1 - i}" for i, low in enumerate(bounds[:-1])}
            self.mesh = _jax_mesh(
                device_ids, tuple(sizes), tuple(f"m{i}" for i in range(len(sizes)))
            )

    def __call__(self, sharding: NamedSharding) -> NamedSharding:
        """The same sharding over the one mesh."""
        if not self.exists or sharding.mesh == self.mesh:
            return sharding
        if sharding.spec == PartitionSpec():
            return NamedSharding(self.mesh, PartitionSpec())
        bounds = _bounds(sharding.mesh)[::-1]
        parts = {}
        for name, high, low in zip(sharding.mesh.axis_names, bounds, bounds[1:]):
            parts[name] = tuple(
                axis for at, axis in sorted(self._axis_at.items(), reverse=True) if low <= at < high
            )
        spec = []
        for entry in sharding.spec:
            names = () if entry is None else (entry,) if isinstance(entry, str) else entry
            spec.append(tuple(axis for name in names for axis in parts[name]) or None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))


def _bounds(mesh: Any) -> list[int]:
    """The strides of a mesh's axes and its size, ascending: where it splits the row of devices."""
    bounds = [1]
    for size in reversed(mesh.devices.shape):
        bounds.append(bounds[-1] * size)
    return bounds


def device_ids_of(jax_sharding: Any) -> tuple[int, ...]:
    """The positions, among all devices, of the devices of a jax sharding, in its order."""
    position = _position_of_id()
    return tuple(position[d.id] for d in jax_sharding._device_assignment)


# --- Data -----------------------------------------------------------------------------------------------------------------------------


def upload(tensor: torch.Tensor, jax_sharding: Any, padded_shape: tuple[int, ...]) -> jax.Array:
    """Host data as a device array of `padded_shape`; each device receives its own shard only. Does not wait."""
    data = dtypes.numpy_view(tensor.detach().contiguous())
    metrics.count("uploads")
    metrics.count("uploaded_bytes", data.nbytes)
    with jax.enable_x64(True):
        if padded_shape == data.shape:
            if jax_sharding.is_fully_addressable and jax_sharding.is_fully_replicated:
                return jax.device_put(data, jax_sharding)
            return jax.make_array_from_callback(data.shape, jax_sharding, lambda index: data[index])
        return jax.make_array_from_callback(
            padded_shape, jax_sharding, lambda index: _padded_block(data, index, padded_shape)
        )


def _padded_block(data: np.ndarray, index: Any, padded_shape: tuple[int, ...]) -> np.ndarray:
    bounds = [s.indices(n)[:2] for s, n in zip(index, padded_shape)]
    block = data[tuple(slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, data.shape))]
    return np.pad(block, [(0, (b - a) - have) for (a, b), have in zip(bounds, block.shape)])


def reshard(
    array: jax.Array, jax_sharding: Any, shape: tuple[int, ...], padded_shape: tuple[int, ...]
) -> jax.Array:
    """The array's first `shape` elements, laid out anew with `jax_sharding` and padded to `padded_shape`. Does not wait."""
    metrics.count("resharded_bytes", array.nbytes)
    with jax.enable_x64(True):
        if 0 in shape:
            # jax moves the blocks of an empty array as they are, of their old shape, where the order of the devices changes.
            return jax.make_array_from_callback(
                padded_shape,
                jax_sharding,
                lambda _: np.zeros(jax_sharding.shard_shape(padded_shape), array.dtype),
                dtype=array.dtype,
            )
        if array.shape == padded_shape:
            return jax.device_put(array, jax_sharding)
        whole = jax.device_put(array, replicated(device_ids_of(array.sharding)))[
            tuple(slice(n) for n in shape)
        ]
        return jax.device_put(
            jax.numpy.pad(whole, [(0, p - n) for n, p in zip(shape, padded_shape)]), jax_sharding
        )


def download(array: jax.Array, shape: tuple[int, ...]) -> torch.Tensor:
    """The logical value in host memory, as a CPU tensor that owns its memory. Waits for the device."""
    metrics.count("host_reads")
    wait_for(array)
    if array.is_fully_addressable or array.is_fully_replicated:
        host = np.asarray(array)
    else:
        host = multihost_utils.process_allgather(array, tiled=True)
    if host.shape != shape:
        host = host[tuple(slice(n) for n in shape)]
    return dtypes.tensor_view(np.array(host, copy=True, order="C"))


def wait_for(array: jax.Array) -> None:
    """Blocks until the array is computed. Raises ProgramError where the program that should have computed it failed on the device."""
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        raise ProgramError(
            f"a program that was started without waiting failed on the device: {error}. "
            "Its results are lost; call sync(wait=True) after each step to find which."
        ) from error


class InFlight:
    """Bounds the programs that wait on the devices, by waiting for the oldest. Each program gives a token: a result that is never donated.

    Attributes:
        has_started: whether any program ever was.
    """

    def __init__(self) -> None:
        self._queue: deque[Any] = deque()
        self.has_started = False

    def add(self, token: jax.Array) -> None:
        """Counts a program in; waits while there are too many."""
        self.has_started = True
        limit = config.max_in_flight_cpu if platform() == "cpu" else config.max_in_flight
        self._queue.append(token)
        while len(self._queue) > limit:
            wait_for(self._queue.popleft())

    def wait_all(self) -> None:
        """Blocks until every program that was started has ended."""
        while self._queue:
            wait_for(self._queue.popleft())


in_flight = InFlight()


def from_blocks(
    blocks: dict[int, torch.Tensor], jax_sharding: Any, padded_shape: tuple[int, ...]
) -> jax.Array:
    """The device array whose block on each local device (by its number) is host data, padding included. Does not wait."""
    with jax.enable_x64(True):
        # Copies: on the CPU, jax may use a numpy array's own memory, and the caller may write to the block later.
        arrays = [
            jax.device_put(np.array(dtypes.numpy_view(block.detach())), devices()[device])
            for device, block in blocks.items()
        ]
        return jax.make_array_from_single_device_arrays(padded_shape, jax_sharding, arrays)


def local_device_ids(mesh: Mesh) -> tuple[int, ...]:
    """The devices of a mesh that belong to this process, in the order of their ids."""
    every, process = devices(), jax.process_index()
    return tuple(sorted(int(i) for i in mesh.device_ids if every[i].process_index == process))


def first_local_device() -> int:
    """The number of this process's first device."""
    process = jax.process_index()
    return next(i for i, device in enumerate(devices()) if device.process_index == process)


def device_name(device: int) -> str:
    """Such as `"CPU:3"`."""
    return f"{platform().upper()}:{device}"


def addressable(array: jax.Array) -> Sequence[Any]:
    """The shards that this host holds, by global device id."""
    return sorted(array.addressable_shards, key=lambda s: s.device.id)


def position_of_device(device: Any) -> int:
    """The position of one jax device among all devices."""
    return _position_of_id()[device.id]


def sharding_text(jax_sharding: Any, ndim: int) -> str:
    """A jax sharding in XLA's text form with every device's number; those that hold copies of one block are in order."""
    sharding = jax_sharding._to_xla_hlo_sharding(ndim)
    if sharding.is_replicated():
        return "{replicated}"
    is_partial = sharding.replicate_on_last_tile_dim()
    # XLA's numbers are places in the program's row of devices, which a mesh may have in any order.
    devices_of_tiles = np.array(device_ids_of(jax_sharding))[
        np.array(sharding.tile_assignment_devices())
    ]
    devices_of_tiles = devices_of_tiles.reshape(sharding.tile_assignment_dimensions())
    dims = ",".join(map(str, devices_of_tiles.shape))
    ids = ",".join(
        map(
            str,
            (np.sort(devices_of_tiles, axis=-1) if is_partial else devices_of_tiles).reshape(-1),
        )
    )
    suffix = " last_tile_dim_replicate" if is_partial else ""
    return f"{{devices=[{dims}]{ids}{suffix}}}"
