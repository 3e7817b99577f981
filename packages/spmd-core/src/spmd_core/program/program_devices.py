"""The devices of a program: those of the shardings over which it has to run."""

from collections.abc import Sequence
from functools import lru_cache

from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value
from spmd_core.runtime.jax_sharding import default_device_ids, device_ids_of
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding


def marks_of(
    live: Sequence[Storage], nodes: Sequence[Value], leaves: Sequence[Value]
) -> set[Sharding]:
    """The shardings over which a program has to run."""
    marks = {s.sharding for s in live if s.sharding is not None}
    marks |= {p.sharding for p in {leaf.placement for leaf in leaves} if p.sharding is not None}
    for entry in {node.entry for node in nodes}:
        if entry.sharding is not None:
            marks.add(entry.sharding)
        if entry.border is not None:
            marks.add(entry.border.sharding)
        if entry.subgraphs:
            marks |= entry.shardings  # type: ignore[attr-defined]
    return marks


def program_devices(shardings: set[Sharding], leaves: Sequence[Value]) -> tuple[int, ...]:
    """The devices of a program: those of all its meshes; without meshes, those of its leaves."""
    meshes = frozenset(s.mesh for s in shardings)
    if meshes:
        return _union(meshes)
    leaf_devices = {
        device_ids_of(p.jax_sharding)
        for p in {v.placement for v in leaves}
        if p.jax_sharding is not None
    }
    return leaf_devices.pop() if len(leaf_devices) == 1 else default_device_ids()


@lru_cache(maxsize=1024)
def _union(meshes: frozenset[Mesh]) -> tuple[int, ...]:
    """The devices of all meshes: in the order of a mesh that has them all, else ascending."""
    orders = {mesh.ids for mesh in meshes}
    union = {i for ids in orders for i in ids}
    complete = sorted(ids for ids in orders if len(ids) == len(union))
    return complete[0] if complete else tuple(sorted(union))
