"""Converts shardings to jax's: partition specs, meshes, and the common mesh of a program."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.errors import ProgramError
from spmd_core.runtime import devices
from spmd_core.sharding import xla_text
from spmd_core.sharding.mesh import Mesh, check_devices
from spmd_core.sharding.sharding import Sharding


def default_device_ids() -> tuple[int, ...]:
    """The devices of a program without any mark: all devices in SPMD mode, else the first one."""
    return tuple(range(devices.global_runtime_device_count())) if devices.is_spmd() else (0,)


@lru_cache(maxsize=4096)
def _jax_mesh(
    device_ids: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...]
) -> jax.sharding.Mesh:
    all_devices = devices.all_devices()
    return jax.sharding.Mesh(
        np.array([all_devices[i] for i in device_ids], dtype=object).reshape(shape), names
    )


def jax_axis_names(mesh: Mesh) -> tuple[str, ...]:
    """The names of a mesh's axes in jax: the mesh's own, or `axis0`, `axis1`, ... if unnamed."""
    return mesh.axis_names or tuple(f"axis{i}" for i in range(len(mesh.mesh_shape)))


def jax_partition_spec(sharding: Sharding) -> PartitionSpec:
    """The dims of a sharding as jax's PartitionSpec, over `jax_axis_names` of its mesh."""
    names = jax_axis_names(sharding.mesh)
    return PartitionSpec(*(tuple(names[axis] for axis in axes) or None for axes in sharding.dims))


@lru_cache(maxsize=16384)
def named_sharding(sharding: Sharding, device_ids: tuple[int, ...] | None = None) -> NamedSharding:
    """A sharding as jax's NamedSharding, over its own devices or over those of a program.

    Args:
        sharding: the sharding.
        device_ids: the devices of a program, all of which the result covers; None for the devices
            of the sharding's mesh. Where they are other devices, or in another order, the result is
            the nearest equivalent: it keeps the blocks, and additional devices hold replicas; if
            the number of devices is not a multiple of the mesh's, all devices hold the whole.
    """
    mesh = sharding.mesh
    own_ids = mesh.ids
    names = jax_axis_names(mesh)
    spec = jax_partition_spec(sharding)
    if device_ids is None or device_ids == own_ids:
        check_devices(mesh, devices.global_runtime_device_count())
        return NamedSharding(_jax_mesh(own_ids, tuple(mesh.mesh_shape), names), spec)
    spare, rest = divmod(len(device_ids), len(own_ids))
    if rest:
        return replicated(device_ids)
    return NamedSharding(_jax_mesh(device_ids, (*mesh.mesh_shape, spare), (*names, "_spare")), spec)


@lru_cache(maxsize=1024)
def replicated(device_ids: tuple[int, ...]) -> NamedSharding:
    """The sharding that puts the whole tensor on each of the devices."""
    return NamedSharding(_jax_mesh(device_ids, (len(device_ids),), ("all",)), PartitionSpec())


def jax_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """The mesh as jax's Mesh over the same devices. This is the method `Mesh.get_jax_mesh`.

    Raises:
        MeshError: the mesh names a device that does not exist.
    """
    check_devices(mesh, devices.global_runtime_device_count())
    return _jax_mesh(mesh.ids, tuple(mesh.mesh_shape), jax_axis_names(mesh))


Mesh.get_jax_mesh = jax_mesh
devices.on_exchange += (_jax_mesh.cache_clear, named_sharding.cache_clear, replicated.cache_clear)


def require_shardy(what: str) -> None:
    """Raises ProgramError where jax does not partition by Shardy, which alone has open dims.

    Args:
        what: the function that was given an open dim or a priority.
    """
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise ProgramError(
            f"open dims and priorities need jax's partitioner Shardy; {what} got one, and "
            "jax_use_shardy_partitioner is False. Set it to True, or leave them out."
        )


class CommonMesh:
    """Converts the shardings of one program to one mesh: the common refinement of their meshes.

    jax expresses the shardings that the partitioner chose over the first mesh that it meets, and
    fails if that mesh cannot express them. Meshes over the same devices in the same order have a
    common refinement if the sizes at which they split the devices divide each other: 4x2, 8 and
    2x2x2 do; 2x3 and 3x2 do not.

    Attributes:
        exists: whether there is a common refinement; if not, every sharding stays as it is.
        mesh: the refinement; not set if there is none.
    """

    def __init__(self, shardings: list[NamedSharding], device_ids: tuple[int, ...]) -> None:
        split = [s for s in shardings if s.spec != PartitionSpec()]
        meshes = list(dict.fromkeys(s.mesh for s in split))
        self._meshes = frozenset(meshes)
        self.exists = True
        if len(meshes) < 2:
            self.mesh = meshes[0] if meshes else _jax_mesh(device_ids, (len(device_ids),), ("all",))
            return
        bounds = sorted({b for mesh in meshes for b in _bounds(mesh.axis_sizes)})
        self.exists = all(high % low == 0 for low, high in pairwise(bounds))
        if self.exists:
            sizes = [high // low for low, high in pairwise(bounds)][::-1]
            self._axis_at = {low: f"m{len(sizes) - 1 - i}" for i, low in enumerate(bounds[:-1])}
            self.mesh = _jax_mesh(
                device_ids, tuple(sizes), tuple(f"m{i}" for i in range(len(sizes)))
            )

    def has(self, sharding: NamedSharding) -> bool:
        """Whether a sharding has a form over the common mesh: its mesh was among those given."""
        return sharding.spec == PartitionSpec() or sharding.mesh in self._meshes

    def __call__(self, sharding: NamedSharding) -> NamedSharding:
        """The same sharding over the common mesh."""
        if not self.exists or sharding.mesh == self.mesh:
            return sharding
        if sharding.spec == PartitionSpec():
            return NamedSharding(self.mesh, PartitionSpec())
        bounds = _bounds(sharding.mesh.axis_sizes)[::-1]
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


def _bounds(axis_sizes: tuple[int, ...]) -> list[int]:
    """The strides of a mesh's axes and the mesh's size, ascending."""
    bounds = [1]
    for size in reversed(axis_sizes):
        bounds.append(bounds[-1] * size)
    return bounds


def device_ids_of(jax_sharding: jax.sharding.Sharding) -> tuple[int, ...]:
    """The devices of a jax sharding, in its order, as positions among all devices."""
    position = devices.position_of_id()
    assigned: Sequence[Any] = jax_sharding._device_assignment  # jax's type is not resolvable
    return tuple(position[device.id] for device in assigned)


def sharding_text(jax_sharding: jax.sharding.Sharding, ndim: int) -> str:
    """XLA's text of a jax sharding, with a list of device ids.

    The ids of devices that hold the same block are sorted.
    """
    sharding = jax_sharding._to_xla_hlo_sharding(ndim)
    if sharding.is_replicated():
        return xla_text.REPLICATED
    is_partial = sharding.replicate_on_last_tile_dim()
    # XLA's numbers are positions in the program's device assignment, which may be in any order.
    positions = np.array(sharding.tile_assignment_devices())
    ids = np.array(device_ids_of(jax_sharding))[positions]
    ids = ids.reshape(sharding.tile_assignment_dimensions())
    ids = np.sort(ids, axis=-1) if is_partial else ids
    return xla_text.tiled(ids.shape, ids.reshape(-1).tolist(), is_partial=is_partial)
