"""Our shardings as jax's: placements, meshes, and one mesh for one program."""

from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.runtime import devices
from spmd_core.sharding import xla_text
from spmd_core.sharding.mesh import Mesh, check_devices
from spmd_core.sharding.sharding import Manual, Sharding


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
    return tuple(range(devices.global_runtime_device_count())) if devices.is_spmd() else (0,)


@lru_cache(maxsize=4096)
def _jax_mesh(
    device_ids: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...]
) -> jax.sharding.Mesh:
    every = devices.all_devices()
    return jax.sharding.Mesh(
        np.array([every[i] for i in device_ids], dtype=object).reshape(shape), names
    )


def jax_axis_names(mesh: Mesh) -> tuple[str, ...]:
    """The names of a mesh's axes to jax: its own, or made of their numbers."""
    return mesh.axis_names or tuple(f"axis{i}" for i in range(len(mesh.mesh_shape)))


def jax_partition_spec(sharding: Sharding) -> PartitionSpec:
    """A sharding's dims as jax's PartitionSpec, over `jax_axis_names` of its mesh."""
    names = jax_axis_names(sharding.mesh)
    return PartitionSpec(*(tuple(names[axis] for axis in axes) or None for axes in sharding.dims))


@lru_cache(maxsize=16384)
def named_sharding(sharding: Sharding, device_ids: tuple[int, ...] | None = None) -> NamedSharding:
    """jax's form of a sharding. With `device_ids` (a program's devices), the same tiles over exactly those devices: the sharding itself
    where its mesh has them in that order, else its nearest equivalent (tiles kept, spare devices hold replicas, or all replicate)."""
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
    """The whole tensor on each of the devices."""
    return NamedSharding(_jax_mesh(device_ids, (len(device_ids),), ("all",)), PartitionSpec())


def jax_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """jax's mesh over the same devices: `Mesh.get_jax_mesh`. Raises MeshError where the mesh names a device that does not exist."""
    check_devices(mesh, devices.global_runtime_device_count())
    return _jax_mesh(mesh.ids, tuple(mesh.mesh_shape), jax_axis_names(mesh))


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
    position = devices.position_of_id()
    return tuple(position[d.id] for d in jax_sharding._device_assignment)


def sharding_text(jax_sharding: Any, ndim: int) -> str:
    """A jax sharding in XLA's text form with every device's number; those that hold copies of one block are in order."""
    sharding = jax_sharding._to_xla_hlo_sharding(ndim)
    if sharding.is_replicated():
        return xla_text.REPLICATED
    is_partial = sharding.replicate_on_last_tile_dim()
    # XLA's numbers are places in the program's row of devices, which a mesh may have in any order.
    places = np.array(sharding.tile_assignment_devices())
    ids = np.array(device_ids_of(jax_sharding))[places]
    ids = ids.reshape(sharding.tile_assignment_dimensions())
    in_order = np.sort(ids, axis=-1) if is_partial else ids
    return xla_text.tiled(ids.shape, in_order.reshape(-1).tolist(), is_partial=is_partial)
