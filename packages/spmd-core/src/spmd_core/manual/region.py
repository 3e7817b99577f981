"""The current manual region, its axes, and whether a tensor is local to a region."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

from spmd_core.graph.storage import read
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh, check_devices
from spmd_core.sharding.partition_spec import Axis
from spmd_core.sharding.sharding import Manual, Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

Axes: TypeAlias = Axis | Iterable[Axis]
"""A mesh axis, by number or name, or several, major first."""

# The region whose code is running; None outside of any.
# Guarded by: the context. Cleared by: the end of the region.
current_region: ContextVar[Manual | None] = ContextVar("region", default=None)


@contextmanager
def inside(manual: Manual) -> Iterator[None]:
    """Inside, this is the current region."""
    token = current_region.set(manual)
    try:
        yield
    finally:
        current_region.reset(token)


def is_local(tensor: XLAShardedTensor) -> bool:
    """Whether a tensor is local to a manual region: it has a separate value on each device."""
    return region_of(tensor) is not None


def region_of(tensor: XLAShardedTensor) -> Manual | None:
    """The manual region that a tensor is local to; None for a global tensor."""
    value = read(tensor._handle)
    seen: set[int] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.data is not None:
            if value.placement.manual is not None:
                return value.placement.manual
            continue
        border = value.entry.border if value.parent is None else None
        if border is not None:
            if not border.is_exit:
                return border.manual
            continue  # the result of leaving a region is global
        pending.extend(value.inputs if value.parent is None else (value.parent,))
    return None


def manual_axes(mesh: Mesh, axis_names: Iterable[Axis] | None = None) -> Manual:
    """The axes of a manual region: those in `axis_names`, or all of the mesh's."""
    check_devices(mesh, devices.global_runtime_device_count())
    all_axes = tuple(range(len(mesh.mesh_shape)))
    return Manual(
        mesh, all_axes if axis_names is None else tuple(sorted(axes_of(mesh, tuple(axis_names))))
    )


def axes_of(mesh: Mesh, axes: Axes) -> tuple[int, ...]:
    """The numbers of mesh axes, each of which may occur once.

    Raises:
        PartitionSpecError: the mesh lacks an axis, or one occurs twice.
    """
    sharding = Sharding.of(mesh, ((axes,) if isinstance(axes, (str, int)) else tuple(axes),), 1)
    return sharding.dims[0]
